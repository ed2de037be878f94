"""The command line in processes of its own, which are forked where everything is imported already."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

__all__ = ["Command", "forking", "run_command"]


def run_command(arguments: Sequence[str], errors: str, file: str | None) -> None:
    """Be the command line, with stderr to ``errors`` and standard input from ``file``."""
    # A test run in the background has SIGINT ignored, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    target = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(target, 2)
    if file is not None:
        os.dup2(os.open(file, os.O_RDONLY), 0)
    from lmcache_stream.cli import main

    code = main(arguments)
    sys.stderr.flush()
    # As the interpreter's end, with its hooks, but for multiprocessing's own.
    sys.exit(code)


class Command:
    """A running command line.

    Attributes:
        errors: file of its stderr.
    """

    def __init__(
        self, context: ForkServerContext, arguments: Sequence[str], errors: Path, file: str | None = None
    ) -> None:
        self.errors = errors
        self._process: ForkServerProcess = context.Process(
            target=run_command, args=(list(arguments), str(errors), file)
        )
        self._process.start()

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self, seconds: float = 60.0) -> int:
        """Wait for the end and return the exit code; of a signal, its negative number."""
        self._process.join(seconds)
        assert self._process.exitcode is not None, f"it runs still: {self.errors.read_text()}"
        return self._process.exitcode

    @property
    def is_running(self) -> bool:
        """Whether it runs."""
        return self._process.is_alive()

    def until_lines(self, path: Path, count: int, seconds: float = 60.0) -> None:
        """Wait until ``path`` has ``count`` lines, or the command has ended."""
        end, seen, offset = time.monotonic() + seconds, 0, 0
        while self.is_running and time.monotonic() < end:
            if path.exists():
                with path.open("rb") as file:
                    file.seek(offset)
                    new = file.read()
                offset += len(new)
                seen += new.count(b"\n")
            if seen >= count:
                return
            time.sleep(0.005)
        assert time.monotonic() < end, self.errors.read_text()

    def close(self) -> None:
        """Kill it where it still runs."""
        self._process.kill()
        self._process.join()
        self._process.close()


@contextlib.contextmanager
def forking() -> Iterator[ForkServerContext]:
    """Give what makes processes; its server ends with this process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.jobs.preloaded"])
    yield context
