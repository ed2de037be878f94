"""``lmcache-stream report``: reads the outputs of jobs and writes the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .._files import replace_file
from ..batch.tables import as_text
from ..errors import InvalidRequestError
from .html import build_page
from .rows import read_job
from .runs import Comparison, compare
from .summary import summary_tables

__all__ = ["Report", "write_report"]


@dataclass(frozen=True, slots=True)
class Report:
    """A page that was written, and what is in it."""

    path: Path
    comparison: Comparison

    def __str__(self) -> str:
        runs = self.comparison.runs
        title = f"{_many(len(self.comparison.entries), 'id')}, {_many(len(runs), 'run')}: {self.path}"
        lines = [as_text(title, summary_tables(self.comparison)), ""]
        for file in self.comparison.files:
            if file.broken:
                first = file.broken[0]
                count = _many(len(file.broken), "line")
                lines.append(f"{file.path}: {count} could not be read, line {first.line}: {first.reason}")
        if replaced := sum(run.replaced for run in runs):
            were = "was" if replaced == 1 else "were"
            lines.append(f"{_many(replaced, 'row')} {were} replaced by a later one with the same id")
        return "\n".join(lines).rstrip()


def _many(count: int, one: str) -> str:
    return f"{count:,} {one}" if count == 1 else f"{count:,} {one}s"


def write_report(outputs: Sequence[Path], page: Path) -> Report:
    """Write the page of ``outputs`` to ``page``, which, a file, is replaced at once or not at all.

    Raises:
        InvalidRequestError: an output cannot be read or is none, or the page cannot be written.
    """
    if any(_is_same(output, page) for output in outputs):
        raise InvalidRequestError(f"the page would replace a job's output: --html {page}")
    report = Report(page, compare([read_job(output) for output in outputs]))
    html = build_page(report.comparison)
    try:
        # Of a file whose name is no UTF-8 the page shows what it can.
        replace_file(page, html.encode(errors="replace"))
    except OSError as error:
        raise InvalidRequestError(f"--html {page}: {error.strerror or error}") from error
    return report


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
