"""Rows of an output, for tests."""

from __future__ import annotations

from typing import Any

from lmcache_stream.jobs.records import encode_row

POLICY = "KeyDiff(ratio=0.5, sinks=4, window=32)"


def row(row_id: str | int, *, failed: bool = False, **further: Any) -> bytes:
    """Return a row's line, with characters of one to four bytes."""
    error = {"type": "EngineStatusError", "message": "no", "phase": "decode"} if failed else None
    fields = {"id": row_id, "line": 1, "policy": POLICY, "model": "m"}
    return encode_row({**fields, "text": "aü三🙂", "token_ids": [1, 2], "error": error, **further})
