"""Where a job's rows come from: a file or standard input, line by line, each id once."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum

from ..errors import InvalidRequestError
from .prompts import BadRowError, LineSplitter, PromptRow, parse_row

__all__ = ["STDIN", "BadRow", "SeenIds", "Source"]

STDIN = "-"
_PIECE = 1 << 16


class BadRow:
    """A row that cannot be read.

    Attributes:
        line: its line, counted from 1.
        reason: what is wrong.
    """

    def __init__(self, line: int, reason: str) -> None:
        self.line = line
        self.reason = reason


class Seen(Enum):
    """What is known of an id."""

    NEW = 0
    DONE = 1
    REPEATED = 2


class SeenIds:
    """Any number of ids, in a temporary file that SQLite makes as soon as they are many.

    It belongs to the thread that made it.
    """

    def __init__(self) -> None:
        self._database = sqlite3.connect("", isolation_level=None)
        for pragma in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -2048"):
            self._database.execute(f"PRAGMA {pragma}")
        self._database.execute("CREATE TABLE ids (id PRIMARY KEY, is_done) WITHOUT ROWID")

    def mark_done(self, ids: Iterable[str | int]) -> None:
        """Take ids that are in the output."""
        keys = ((_key(one),) for one in ids)
        with _told():
            self._database.executemany("INSERT OR IGNORE INTO ids VALUES (?, 1)", keys)

    def see(self, row_id: str | int) -> Seen:
        """Take the id of a row and tell what was known of it."""
        with _told():
            return self._see((_key(row_id),))

    def _see(self, key: tuple[str]) -> Seen:
        found = self._database.execute("SELECT is_done FROM ids WHERE id = ?", key).fetchone()
        if found is None:
            self._database.execute("INSERT INTO ids VALUES (?, 0)", key)
            return Seen.NEW
        if not found[0]:
            return Seen.REPEATED
        self._database.execute("UPDATE ids SET is_done = 0 WHERE id = ?", key)
        return Seen.DONE

    def close(self) -> None:
        """Remove all of it."""
        self._database.close()


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise OSError(
            f"the temporary file of ids cannot be written: {error}; SQLITE_TMPDIR names another folder for it"
        ) from error


def _key(row_id: str | int) -> str:
    return f"s{row_id}" if isinstance(row_id, str) else f"i{row_id}"


class Source:
    """The rows of a prompts' file. It blocks, and belongs to the thread that opens it.

    Args:
        path: the file, or ``-`` for standard input.
        done: gives the ids that are passed over.

    Attributes:
        size: bytes of the file; None where nobody knows.
        passed_bytes: bytes of the lines that were not given out as rows.
        passed_over: rows whose ids were among ``done``.
    """

    def __init__(self, path: str, done: Callable[[], Iterable[str | int]] = tuple) -> None:
        self._path, self._done = path, done
        self.size: int | None = None
        self.passed_bytes = self.passed_over = 0
        self._file = -1
        self._lines = LineSplitter()
        self._number = 0
        self._is_over = False
        self._ids: SeenIds | None = None

    def open(self) -> None:
        """Open the file and learn which ids are done.

        Raises:
            InvalidRequestError: the file cannot be read.
            OSError: the temporary file of ids cannot be written.
        """
        try:
            # No buffer of Python's: a thread that waits for input would hold its lock when Python ends.
            self._file = os.dup(0) if self._path == STDIN else os.open(self._path, os.O_RDONLY)
            found = os.fstat(self._file)
        except OSError as error:
            raise InvalidRequestError(f"--prompts {self._path}: {error.strerror}") from error
        if stat.S_ISDIR(found.st_mode):
            raise InvalidRequestError(f"--prompts {self._path}: it is a folder")
        self.size = found.st_size if stat.S_ISREG(found.st_mode) else None
        self._ids = SeenIds()
        self._ids.mark_done(self._done())

    def read(self) -> list[PromptRow | BadRow] | None:
        """Wait for input and return what it has: rows to be worked on, and what cannot be read.

        None at the end.

        Raises:
            OSError: the input cannot be read, or the temporary file of ids not be written.
        """
        if self._is_over:
            return None
        piece = os.read(self._file, _PIECE)
        self._is_over = not piece
        lines = self._lines.feed(piece) if piece else self._lines.finish()
        rows = []
        for line in lines:
            row = self._row(line)
            if not isinstance(row, PromptRow):
                self.passed_bytes += len(line) + 1
            if row is not None:
                rows.append(row)
        return rows

    def _row(self, text: bytes) -> PromptRow | BadRow | None:
        """Read a line; None where there is nothing to do."""
        assert self._ids is not None
        self._number += 1
        try:
            row = parse_row(text, self._number)
        except BadRowError as error:
            return BadRow(self._number, str(error))
        if row is None:
            return None
        seen = self._ids.see(row.row_id)
        if seen is Seen.REPEATED:
            return BadRow(self._number, f"id {row.row_id!r} was there before")
        self.passed_over += seen is Seen.DONE
        return row if seen is Seen.NEW else None

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._ids is not None:
            self._ids.close()
            self._ids = None
