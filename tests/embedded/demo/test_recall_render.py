"""What the recall demo draws, on a terminal and elsewhere."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

import lmcache_stream as lms
from lmcache_stream.embedded.demo.recall_render import RecallProgress, recall_table
from lmcache_stream.embedded.demo.recall_run import Recall, RecallAnswer, RecallStep
from lmcache_stream.embedded.demo.recall_task import RecallPrompt, RecallTask

WHOLE = RecallAnswer(
    policy=None,
    text=" 2222.",
    token_ids=(1, 2),
    is_right=True,
    kept_indices=tuple(range(100)),
    fact_kept=12,
    edit=None,
    ttft=0.25,
    cached_tokens=96,
)
EDIT = lms.EditReport(
    tokens_before=96,
    tokens_after=48,
    recomputed_tokens=0,
    bytes_before=3 << 20,
    bytes_after=2 << 20,
    cache_salt="x",
    seconds=0.125,
)
EDITED = replace(
    WHOLE,
    policy="KeyDiff",
    text=" [b]11\n11.",
    is_right=False,
    kept_indices=tuple(range(52)),
    fact_kept=7,
    edit=EDIT,
    ttft=None,
)
RECALL = Recall(
    seed=0,
    task=RecallTask(lines=("a line",), facts=((0, "Alice", "1111"), (1, "Frank", "2222")), asked=1),
    prompt=RecallPrompt(token_ids=tuple(range(100)), fact=range(40, 52), question_start=90),
    prefill_seconds=1.5,
    answers=(WHOLE, EDITED),
)


@pytest.mark.parametrize("width", [80, 140])
def test_a_row_for_each_way_to_edit(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(recall_table(RECALL))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].strip() == "2 secret codes in 100 tokens, computed in 1.5 s"
    assert lines[1].strip() == "What is the secret code of Frank? (2222)"
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert rows == [
        ["whole", "2222.", "right", "100", "12 of 12", "-", "0.25 s"],
        ["KeyDiff", "[b]11 11.", "wrong", "52", "7 of 12", "0.12 s", "-"],
    ]


def drawn(*, is_terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=100, color_system=None)
    with RecallProgress(console, 5) as progress:
        for step in (RecallStep(0, 0), RecallStep(0, 5), RecallStep(1, 2)):
            progress.step(step)
    return file.getvalue()


def test_a_bar_a_prompt_on_a_terminal() -> None:
    text = drawn(is_terminal=True)
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    last = text[text.rindex("secret codes, prompt 1") :]
    assert "5 of 5 answers" in last
    assert "2 of 5 answers" in last


def test_no_bar_elsewhere() -> None:
    assert drawn(is_terminal=False).strip() == ""
