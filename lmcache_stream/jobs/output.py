"""A job's output: rows are only ever appended whole, by one job at a time, and a cut one is taken away.

It blocks, and is used by one thread at a time.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ..errors import InvalidRequestError
from .records import Head, is_beginning, read_head

__all__ = ["Output", "OutputState"]

_ANOTHER = "name another file with --output"


@dataclass(slots=True)
class OutputState:
    """What was in an output when it was opened.

    Attributes:
        rows: rows in it, without those that were taken out.
        failed: of these, rows that failed.
        retried: failed rows that were taken out, to be run again.
        cut: bytes of a row that a job had not written to its end, and that were taken away.
        last: its last row; None without one.
    """

    rows: int = 0
    failed: int = 0
    retried: int = 0
    cut: int = 0
    last: Head | None = None


class Output:
    """An output file, locked from ``open`` to ``close``.

    Args:
        path: the file; made where there is none.
        resume: whether to go on with rows that are in it.
    """

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        # A link would be replaced, and not the file that it leads to. Path.resolve() raises a RuntimeError of
        # links that lead to each other, on which the system has a word of its own.
        self.path = Path(os.path.realpath(path))
        self.state = OutputState()
        self._resume = resume
        self._file = -1
        self._end = 0

    def open(self) -> None:
        """Lock the file and look at what is in it.

        Raises:
            InvalidRequestError: it has rows and ``resume`` was not wanted, it is not a job's output, or
                another job has locked it.
            OSError: it cannot be written.
        """
        self._file = _open_locked(self.path)
        self.state = self._look()
        self._end = os.lseek(self._file, 0, os.SEEK_END)

    def _look(self) -> OutputState:
        if os.fstat(self._file).st_size and not self._resume:
            # Before anything is changed, and also where it is not a job's.
            raise InvalidRequestError(
                f"{self.path} has something in it: --resume goes on with a job, or {_ANOTHER}"
            )
        state, whole = OutputState(), 0
        for number, line in enumerate(self._lines(), 1):
            head = read_head(line)
            if head is None:
                if line.endswith(b"\n") or not is_beginning(line):
                    raise InvalidRequestError(
                        f"{self.path}, line {number}, is no row of a job's output: {_ANOTHER}"
                    )
                state.cut = len(line)
                os.ftruncate(self._file, whole)
                break
            whole += len(line)
            state.rows += 1
            state.failed += head.is_failed
            state.last = head
            if not line.endswith(b"\n"):
                # It is all there but for its end.
                _write(self._file, b"\n")
                break
        return state

    def _lines(self) -> Iterator[bytes]:
        """Yield the lines with their ends, through a position of their own."""
        with self._reader() as file:
            yield from file

    def _reader(self) -> BinaryIO:
        # The same file, also where the path has come to lead to another.
        return Path(f"/proc/self/fd/{self._file}").open("rb")

    def done_ids(self) -> Iterator[str | int]:
        """Yield the ids of the rows that were in it, whole, when it was opened."""
        left = self.state.rows
        for line in self._lines():
            if not left:
                return
            left -= 1
            yield self._head(line).id

    def _head(self, line: bytes) -> Head:
        head = read_head(line)
        if head is None:
            raise InvalidRequestError(f"{self.path}: a row was changed while a job had it open: {_ANOTHER}")
        return head

    def take_failed_out(self) -> None:
        """Take rows that failed out, to be run again: all at once, or not at all.

        Another file is put in the place of this one; ``check`` comes first.

        Raises:
            OSError: it cannot be written; then all rows are still there.
        """
        if not self.state.failed:
            return
        partial = self.path.with_name(f".{self.path.name}.retry")
        file = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            # Before it has the name under which another job would lock it.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(file, stat.S_IMODE(os.fstat(self._file).st_mode))
            last = None
            for line in self._lines():
                head = self._head(line)
                if not head.is_failed:
                    _write(file, line)
                    last = head
            os.fsync(file)
            partial.replace(self.path)
        except BaseException:
            os.close(file)
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file = file
        state = self.state
        state.rows, state.retried, state.failed, state.last = state.rows - state.failed, state.failed, 0, last
        self._end = os.lseek(file, 0, os.SEEK_END)

    def check(self, *, policy: str | None, model: str) -> None:
        """Raise InvalidRequestError where the rows in it are of another policy or model."""
        last = self.state.last
        if last is None:
            return
        for name, before, now in (("policy", last.policy, policy), ("model", last.model, model)):
            if before != now:
                raise InvalidRequestError(
                    f"the rows in {self.path} are of the {name} {before or 'none'}, this job's would be of "
                    f"{now or 'none'}: {_ANOTHER}"
                )

    def append(self, line: bytes) -> None:
        """Write a row, with its end, in one write.

        Raises:
            OSError: it cannot be written; then nothing of it is left.
        """
        try:
            self._end += _write(self._file, line)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise OSError(
                error.errno, f"{error.strerror}: a row could not be written", str(self.path)
            ) from error

    def close(self) -> None:
        """Let the file go; idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _open_locked(path: Path) -> int:
    while True:
        # Not cut, before it is known whose it is.
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise InvalidRequestError(
                    f"{path} is no regular file, with which a job could go on: {_ANOTHER}"
                )
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A job that took rows out has put another file there, since this one was opened.
            if path.exists() and os.path.samestat(os.fstat(file), path.stat()):
                return file
        except BlockingIOError:
            os.close(file)
            raise InvalidRequestError(
                f"another job writes to {path}: wait for its end, or {_ANOTHER}"
            ) from None
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _write(file: int, data: bytes) -> int:
    """Write all of ``data`` at the end of a file, and return its length.

    One call of the system does it, unless a disk is full or a signal comes between.
    """
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
    return len(data)
