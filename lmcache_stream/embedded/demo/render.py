"""The demo on a terminal: progress bars while it works, a table a document."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...progress import Bars
from .documents import Document
from .run import Comparison, Options, Step

__all__ = ["DocumentProgress", "comparison_table"]


class DocumentProgress(Bars):
    """A progress bar a document, counting decoded tokens.

    Args:
        console: where it is drawn.
        documents: those of the run.
        options: those of the run.
    """

    def __init__(self, console: Console, documents: Sequence[Document], options: Options) -> None:
        super().__init__(console)
        self._titles = [document.title for document in documents]
        self._total = 2 * options.max_tokens

    def step(self, step: Step) -> None:
        """Move the bar of the step's document; it appears with its first step."""
        self._move(step.document, step.tokens, step.phase)

    def finish(self, document: int) -> None:
        """Fill the bar of a document, whose answers may have ended early."""
        self._move(document, self._total, "done")

    def _move(self, document: int, tokens: int, note: str) -> None:
        self.show(document, self._titles[document], tokens, self._total, f"{note:<25}")


def comparison_table(comparison: Comparison) -> Table:
    """Return both answers to a document and their figures, side by side."""
    edit, whole, edited = comparison.edit, comparison.whole, comparison.edited
    table = Table(
        title=Text(f"{comparison.document.title}\n{comparison.document.question}"),
        title_justify="left",
        expand=True,
    )
    table.add_column("", no_wrap=True)
    table.add_column("whole KV", ratio=1)
    table.add_column("edited KV", ratio=1)
    table.add_row("prompt tokens", str(len(comparison.prompt_token_ids)), f"{comparison.kept_tokens} kept")
    table.add_row("KV in the cache", _size(edit.bytes_before), _size(edit.bytes_after))
    table.add_row("prefill, edit", _seconds(whole.prefill_seconds), _seconds(edit.seconds))
    table.add_row("time to first token", _seconds(whole.ttft), _seconds(edited.ttft))
    table.add_row("decoding", _speed(whole.tokens_per_second), _speed(edited.tokens_per_second))
    table.add_section()
    table.add_row("answer", Text(whole.text), Text(edited.text))
    return table


def _size(count: int) -> str:
    return f"{count:,} B ({count / 2**20:.1f} MiB)"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"


def _speed(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} tokens/s"
