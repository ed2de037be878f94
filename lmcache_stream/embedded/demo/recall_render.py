"""The recall task on a terminal: a progress bar a prompt, a table a prompt."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .recall_run import Recall, RecallStep

__all__ = ["RecallProgress", "recall_table"]


class RecallProgress:
    """A progress bar a prompt, counting answers; nothing is drawn where ``console`` is no terminal. Use it
    with ``with`` around the run.

    Args:
        console: where it is drawn.
        answers: how many answers each prompt gets.
    """

    def __init__(self, console: Console, answers: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.completed} of {task.total} answers", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._answers = answers
        self._tasks: dict[int, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def show(self, step: RecallStep) -> None:
        """Move the bar of the step's prompt; it appears with its first step."""
        if step.task not in self._tasks:
            name = f"secret codes, prompt {step.task + 1}"
            self._tasks[step.task] = self._progress.add_task(name, total=self._answers)
        self._progress.update(self._tasks[step.task], completed=step.answers)


def recall_table(recall: Recall) -> Table:
    """Return the answers to one task, a row for each way to edit its KV."""
    task, whole, fact = recall.task, len(recall.prompt.token_ids), len(recall.prompt.fact)
    table = Table(
        title=Text(
            f"{len(task.facts)} secret codes in {whole} tokens, computed in {recall.prefill_seconds:.1f} s\n"
            f"{task.question} ({task.code})"
        ),
        title_justify="left",
    )
    for name in ("KV", "answer", "", "tokens", "fact", "edit", "TTFT"):
        figure = name not in ("KV", "answer", "")
        table.add_column(name, no_wrap=True, justify="right" if figure else "left")
    for answer in recall.answers:
        table.add_row(
            answer.policy or "whole",
            Text(" ".join(answer.text.split())),
            "right" if answer.is_right else "wrong",
            str(len(answer.kept_indices)),
            f"{answer.fact_kept} of {fact}",
            "-" if answer.edit is None else f"{answer.edit.seconds:.2f} s",
            "-" if answer.ttft is None else f"{answer.ttft:.2f} s",
        )
    return table
