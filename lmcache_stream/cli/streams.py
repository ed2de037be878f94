"""The standard streams of a command: whatever they are, or are not, they do not end it."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import TextIO

__all__ = ["flush_streams", "prepare_streams", "say"]


def prepare_streams() -> None:
    """See to it that standard input, output and error are there, and that output takes every character.

    A file that a command opens would else become one of them, and what a library writes there be in it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest that is free. For input too: to read it is an error, and no empty file.
            os.open(os.devnull, os.O_WRONLY)
    # typeshed does not know of streams that were closed when Python began.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, _nowhere())
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def say(line: str) -> None:
    """Write a line to stderr; where nobody is there any more, what is under way goes on without."""
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except OSError:
        # What was not written would be tried again at the end of Python, for an exit code of its own.
        sys.stderr = _nowhere()


def flush_streams() -> None:
    """Write what stdout and stderr still hold, where somebody reads it."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()


def _nowhere() -> TextIO:
    return Path(os.devnull).open("w", encoding="utf-8")
