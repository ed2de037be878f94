"""Tables of a report: for a terminal, as plain text, and for a notebook."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TextIO

from ..metrics import Distribution

__all__ = ["LATENCIES", "Table", "as_html", "as_text", "write_table"]

LATENCIES = {
    "ttft": "TTFT",
    "itl": "ITL",
    "tpot": "TPOT",
    "e2e_latency": "E2E latency",
    "prefill_ttft": "TTFT of the prefill",
    "edit_time": "edit",
    "job_time": "whole stream",
    "queue_time": "client queue",
}
"""Field of a report, and what its row is called."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text.

    Attributes:
        title: what it shows; the heading of its first column.
        columns: headings of the other columns.
        rows: a name and a text for each of these columns.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of_figures(cls, title: str, figures: Mapping[str, Any]) -> Table:
        """Make one of a name and one value a row."""
        return cls(title, ("",), tuple((name, _shown(value)) for name, value in figures.items()))

    @classmethod
    def of_latencies(cls, title: str, latencies: Mapping[str, Distribution | None]) -> Table:
        """Make one of seconds, shown as milliseconds; what has no value is left out."""
        rows = tuple(
            (name, _shown(one.count), *(f"{1e3 * value:,.2f}" for value in _spread(one)))
            for name, one in latencies.items()
            if one is not None
        )
        return cls(title, ("count", "mean", "p50", "p90", "p99"), rows)


def write_table(title: str, tables: Sequence[Table], file: TextIO | None) -> None:
    """Write tables to ``file``: by rich on a terminal, where rich is installed, else as plain text."""
    out = sys.stdout if file is None else file
    if out.isatty() and importlib.util.find_spec("rich") is not None:
        _write_rich(title, tables, out)
    else:
        out.write(as_text(title, tables) + "\n")


def as_text(title: str, tables: Sequence[Table]) -> str:
    """Return tables as lines of plain text, numbers aligned to the right."""
    lines = [title]
    first = max((len(row[0]) for table in tables for row in _lines(table)), default=0)
    for table in tables:
        lines.append("")
        widths = [max(map(len, column)) for column in zip(*_lines(table), strict=True)]
        for name, *cells in _lines(table):
            aligned = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
            lines.append("  ".join([name.ljust(first), *aligned]).rstrip())
    return "\n".join(lines)


def as_html(title: str, tables: Sequence[Table]) -> str:
    """Return tables as HTML."""
    parts = [f"<p><b>{escape(title)}</b></p>"]
    for table in tables:
        head, *rows = _lines(table)
        parts.append("<table><thead>" + _html_row(head, "th") + "</thead><tbody>")
        parts += [_html_row(row, "td") for row in rows]
        parts.append("</tbody></table>")
    return "\n".join(parts)


def _write_rich(title: str, tables: Sequence[Table], out: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=out)
    console.print(Text(title, style="bold"))
    for table in tables:
        drawn = RichTable()
        drawn.add_column(Text(table.title))
        for column in table.columns:
            drawn.add_column(Text(column), justify="right")
        for row in table.rows:
            # As Text, because a name in square brackets would be taken for markup.
            drawn.add_row(*map(Text, row))
        console.print(drawn)


def _lines(table: Table) -> list[tuple[str, ...]]:
    return [(table.title, *table.columns), *table.rows]


def _html_row(cells: Sequence[str], tag: str) -> str:
    first, *others = (escape(cell) for cell in cells)
    right = "".join(f'<{tag} style="text-align: right">{cell}</{tag}>' for cell in others)
    return f'<tr><{tag} style="text-align: left">{first}</{tag}>{right}</tr>'


def _spread(one: Distribution) -> tuple[float, ...]:
    return one.mean, one.p50, one.p90, one.p99


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) >= 0.1 else f"{value:.3g}"
    return str(value)
