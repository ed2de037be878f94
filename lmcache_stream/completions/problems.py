"""What an engine, or whatever answers in its place, says is wrong."""

from __future__ import annotations

import sys
import time
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

__all__ = ["hint", "problem", "retry_after"]

_LONGEST = 500


def problem(body: bytes) -> str:
    """Return the message in an error's ``body``: of JSON in the forms in use, else its text.

    vLLM sends ``{"error": {"message": ...}}``, older ones ``{"message": ...}``, and FastAPI
    ``{"detail": ...}``.
    """
    try:
        said: Any = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        said = body.decode("utf-8", "replace")
    for _ in range(3):
        if not isinstance(said, dict):
            break
        found = (said[key] for key in ("error", "message", "detail") if said.get(key))
        inner = next(found, None)
        if inner is None:
            break
        said = inner
    text = said if isinstance(said, str) else msgspec.json.encode(said).decode()
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def retry_after(value: str | None) -> float | None:
    """Return a ``Retry-After`` header in seconds from now; None where it says nothing."""
    if not value:
        return None
    if value.strip().isdecimal():
        # Of more than 308 digits float() makes infinity, which nobody can round.
        return min(float(value), sys.float_info.max)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def hint(status: int) -> str:
    """Return what to do about an HTTP ``status``."""
    if status < 400:
        return "redirects are not followed for a POST: give base_url= the final address"
    match status:
        case 401 | 403 | 407:
            return "check api_key= and headers="
        case 404:
            return "check base_url= and model=: GET /v1/models lists the served names"
        case 429 | 502 | 503 | 504:
            return "the engine is busy or starting: try again later, or send fewer requests at once"
        case _ if status < 500:
            return "the engine refused the request: change what it names"
        case _:
            return "the engine failed: see its log"
