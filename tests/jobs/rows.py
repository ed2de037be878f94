"""Rows of an output, and the files that are open, for tests."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from lmcache_stream.jobs.records import encode_row

POLICY = "KeyDiff(ratio=0.5, sinks=4, window=32)"


def row(row_id: str | int, *, failed: bool = False, **further: Any) -> bytes:
    """Return a row's line, with characters of one to four bytes."""
    error = {"type": "EngineStatusError", "message": "no", "phase": "decode"} if failed else None
    fields = {"id": row_id, "line": 1, "policy": POLICY, "model": "m"}
    return encode_row({**fields, "text": "aü三🙂", "token_ids": [1, 2], "error": error, **further})


def open_files(folder: Path) -> list[str]:
    """Return the paths of what this process has open in ``folder``."""
    found: list[str] = []
    for entry in Path("/proc/self/fd").iterdir():
        # The listing's own is gone by then.
        with suppress(FileNotFoundError):
            found.append(str(entry.readlink()))
    return sorted(path for path in found if path.startswith(f"{folder}/"))
