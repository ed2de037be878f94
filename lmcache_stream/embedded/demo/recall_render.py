"""The recall task on a terminal: a progress bar a prompt, a table a prompt."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...progress import Bars
from .recall_run import Recall, RecallStep

__all__ = ["RecallProgress", "recall_table"]


class RecallProgress(Bars):
    """A progress bar a prompt, counting answers.

    Args:
        console: where it is drawn.
        answers: how many answers each prompt gets.
    """

    def __init__(self, console: Console, answers: int) -> None:
        super().__init__(console)
        self._answers = answers

    def step(self, step: RecallStep) -> None:
        """Move the bar of the step's prompt; it appears with its first step."""
        title = f"secret codes, prompt {step.task + 1}"
        note = f"{step.answers} of {self._answers} answers"
        self.show(step.task, title, step.answers, self._answers, note)


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
