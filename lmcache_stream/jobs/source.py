"""Where a job's rows come from: a file or standard input, line by line, each id once."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Callable, Iterable, Iterator
from enum import Enum

from ..errors import InvalidRequestError
from .prompts import BadRowError, PromptRow, parse_row, split_lines

__all__ = ["STDIN", "BadRow", "SeenIds", "Source"]

STDIN = "-"
_PIECE = 1 << 16
# Rows that are passed over before the caller is heard again.
_MOST_PASSED_OVER = 1000


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
        self._database.executemany("INSERT OR IGNORE INTO ids VALUES (?, 1)", keys)

    def see(self, row_id: str | int) -> Seen:
        """Take the id of a row and tell what was known of it."""
        key = (_key(row_id),)
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


def _key(row_id: str | int) -> str:
    return f"s{row_id}" if isinstance(row_id, str) else f"i{row_id}"


class Source:
    """The rows of a prompts' file. It blocks, and belongs to the thread that opens it.

    Args:
        path: the file, or ``-`` for standard input.
        done: gives the ids that are passed over.

    Attributes:
        size: bytes of the file; None where nobody knows.
        consumed: bytes that were read, as lines.
        passed_over: rows whose ids were among ``done``.
    """

    def __init__(self, path: str, done: Callable[[], Iterable[str | int]] = tuple) -> None:
        self._path, self._done = path, done
        self.size: int | None = None
        self.consumed = self.passed_over = 0
        self._file = -1
        self._lines: Iterator[tuple[int, bytes]] = iter(())
        self._ids: SeenIds | None = None

    def open(self) -> None:
        """Open the file and learn which ids are done.

        Raises:
            InvalidRequestError: the file cannot be read.
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
        self._lines = enumerate(split_lines(self._read), 1)
        self._ids = SeenIds()
        self._ids.mark_done(self._done())

    def _read(self) -> bytes:
        return os.read(self._file, _PIECE)

    def next(self) -> PromptRow | BadRow | bool:
        """Return the next row that is to be worked on, or what is wrong with one; False at the end.

        True where there was none among very many, so that the caller can ask again.
        """
        assert self._ids is not None
        for _ in range(_MOST_PASSED_OVER):
            line, text = next(self._lines, (0, b""))
            if not line:
                return False
            self.consumed += len(text) + 1
            try:
                row = parse_row(text, line)
            except BadRowError as error:
                return BadRow(line, str(error))
            if row is None:
                continue
            match self._ids.see(row.row_id):
                case Seen.NEW:
                    return row
                case Seen.DONE:
                    self.passed_over += 1
                case Seen.REPEATED:
                    return BadRow(line, f"id {row.row_id!r} was there before")
        return True

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._ids is not None:
            self._ids.close()
            self._ids = None
