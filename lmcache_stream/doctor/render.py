"""Results for people, as they come, and for programs, at the end."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from .checks import CHECKS
from .results import Result, Status

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Printer", "as_json"]

_COLOURS = {
    Status.OK: "green",
    Status.WARNING: "yellow",
    Status.FAILED: "bold red",
    Status.NOT_CHECKED: "dim",
}
_STATUS_WIDTH = max(map(len, Status))
_NAME_WIDTH = max(len(check.name) for check in CHECKS)


class Printer:
    """Writes each result as one line of what was seen and one of what to do."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._console = _console(out)
        self._group = ""

    def show(self, result: Result) -> None:
        """Write one result, under the heading of its group."""
        if result.group != self._group:
            self._group = result.group
            self._say(result.group)
        status, name = f"{result.status:<{_STATUS_WIDTH}}", f"{result.name:<{_NAME_WIDTH}}"
        self._say("  ", status, f"  {name}  {result.seen}", style=_COLOURS[result.status])
        if result.advice:
            self._say(f"{'':{_STATUS_WIDTH + _NAME_WIDTH + 6}}-> {result.advice}")

    def sum_up(self, results: Sequence[Result]) -> None:
        """Write how many checks ended how."""
        counts = Counter(result.status for result in results)
        self._say(", ".join(f"{counts[status]} {status}" for status in Status if counts[status]))

    def _say(self, before: str, marked: str = "", after: str = "", *, style: str = "") -> None:
        if self._console is None:
            self._out.write(f"{before}{marked}{after}\n")
            self._out.flush()
        else:
            from rich.text import Text

            self._console.print(Text.assemble(before, (marked, style), after))


def as_json(results: Sequence[Result]) -> str:
    """Return the results as a JSON list of objects."""
    listed = [
        {
            "group": result.group,
            "name": result.name,
            "status": str(result.status),
            "seen": result.seen,
            "advice": result.advice,
        }
        for result in results
    ]
    return json.dumps(listed, indent=2, ensure_ascii=False)


def _console(out: TextIO) -> Console | None:
    """Return what writes in colour: to a terminal, where rich is installed and nobody objects."""
    # By https://no-color.org only a value that is not empty counts.
    if not out.isatty() or os.environ.get("NO_COLOR"):
        return None
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return None
    return Console(file=out, highlight=False, soft_wrap=True)
