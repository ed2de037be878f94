"""What the demo draws, on a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

import lmcache_stream as lms
from lmcache_stream.embedded.demo import Answer, Comparison, Document, Options, Step
from lmcache_stream.embedded.demo.render import DocumentProgress, comparison_table

DOCUMENTS = [Document("[b]first", "text", "Why [so]?"), Document("second", "text", "Who?")]
ANSWER = Answer(
    text="[red]because",
    token_ids=(1, 2),
    prefill_seconds=1.5,
    ttft=0.25,
    tokens_per_second=12.345,
    cached_tokens=96,
    finish_reason="stop",
)
COMPARISON = Comparison(
    document=DOCUMENTS[0],
    prompt_token_ids=tuple(range(100)),
    dropped=range(32, 64),
    edit=lms.EditReport(
        tokens_before=96,
        tokens_after=64,
        recomputed_tokens=0,
        bytes_before=3 << 20,
        bytes_after=2 << 20,
        cache_salt="x",
        seconds=0.125,
    ),
    whole=ANSWER,
    edited=Answer(
        text="so",
        token_ids=(3,),
        prefill_seconds=1.5,
        ttft=None,
        tokens_per_second=None,
        cached_tokens=None,
        finish_reason=None,
    ),
)


def drawn(*, is_terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=100, color_system=None)
    with DocumentProgress(console, DOCUMENTS, Options(max_tokens=10)) as progress:
        progress.step(Step(0, "prefill", 0))
        progress.step(Step(0, "edit", 11))
        progress.finish(0)
        progress.step(Step(1, "answer from the edited KV", 13))
    return file.getvalue()


def test_a_bar_a_document_on_a_terminal() -> None:
    text = drawn(is_terminal=True)
    # rich leaves a hidden cursor to whoever forgets to stop it.
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    last = text[text.rindex("[b]first") :]
    assert "done" in last
    assert "answer from the edited KV" in last


def test_no_bar_elsewhere() -> None:
    assert drawn(is_terminal=False).strip() == ""


@pytest.mark.parametrize("width", [80, 140])
def test_the_table_takes_texts_as_they_are(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(comparison_table(COMPARISON))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) == width
    assert lines[0].strip() == "[b]first"
    assert lines[1].strip() == "Why [so]?"
    rows = {cells[1].strip(): cells[2:4] for line in lines if len(cells := line.split("│")) == 5}
    flat = {name: [cell.strip() for cell in cells] for name, cells in rows.items()}
    assert flat["prompt tokens"] == ["100", "68 kept"]
    assert flat["time to first token"] == ["0.250 s", "-"]
    assert flat["decoding"] == ["12.3 tokens/s", "-"]
    assert flat["prefill, edit"] == ["1.500 s", "0.125 s"]
    assert flat["answer"] == ["[red]because", "so"]
    assert flat["KV in the cache"] == ["3,145,728 B (3.0 MiB)", "2,097,152 B (2.0 MiB)"]
