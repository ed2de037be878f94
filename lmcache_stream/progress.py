"""Bars for long work: on a terminal or in a notebook, on stderr, and nowhere else.

rich draws them, and is imported when the first bar is wanted.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from .errors import InvalidRequestError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

__all__ = ["Bars", "check_progress", "counting"]

_EXTRA = "pip install 'lmcache-stream[jobs]'"


def check_progress() -> None:
    """See to it that bars can be drawn here.

    Raises:
        InvalidRequestError: rich is missing, or in a notebook ipywidgets.
    """
    names = ["rich", "ipywidgets"] if _in_notebook() else ["rich"]
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise InvalidRequestError(f"progress bars need {name}: {_EXTRA}")


def _in_notebook() -> bool:
    """Whether this process is a notebook's kernel; a terminal's IPython is none."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


class Bars:
    """Progress bars, a line each, that go when the block ends; drawn where ``console`` is a terminal or a
    notebook. Use it with ``with`` around the work.

    Args:
        console: where they are drawn; stderr by default.
        stays: the bars stay when the block ends.
    """

    def __init__(self, console: Console | None = None, *, stays: bool = False) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True) if console is None else console
        self._is_drawn = self._console.is_terminal or self._console.is_jupyter
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            transient=not stays,
            disable=not self._is_drawn,
        )
        self._tasks: dict[Hashable, TaskID] = {}

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

    def show(self, name: Hashable, title: str, done: float, total: float | None, note: str = "") -> None:
        """Move a bar; it appears when its name is first shown.

        Args:
            name: which bar.
            title: in front of it.
            done: how much of ``total`` is done.
            total: None where nobody knows; what was known before stays.
            note: behind it.
        """
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(title, total=total, note=note)
        self._progress.update(self._tasks[name], completed=done, total=total, note=note)

    def say(self, line: str) -> None:
        """Write a line above the bars."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def counting(title: str, total: int, *, is_wanted: bool) -> Iterator[Callable[[bool], None]]:
    """Give what is called with each thing that is done, telling whether it went well, and draw a bar of
    ``total`` things where ``is_wanted``."""
    if not is_wanted:
        yield lambda is_ok: None
        return
    done = failed = 0
    with Bars(stays=True) as bars:

        def show() -> None:
            note = f"{done} of {total}" + (f", {failed} failed" if failed else "")
            bars.show(title, title, done, total, note)

        def count(is_ok: bool) -> None:
            nonlocal done, failed
            done, failed = done + 1, failed + (not is_ok)
            show()

        show()
        yield count
