"""Questions over HTTP, and who it is that answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from .._checks import is_loopback
from .results import one_line

__all__ = ["Answer", "NoAnswer", "Server", "get", "identify", "is_status"]

_LONGEST = 16 << 20
_EXCERPT = 80
_FOREIGN = (aiohttp.ClientError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer over HTTP."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Return the body as JSON; None where it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    @property
    def object(self) -> dict[str, Any]:
        """The body as a JSON object; empty where it is none, or the answer is no success."""
        found = self.json() if self.status == 200 else None
        return found if isinstance(found, dict) else {}

    def __str__(self) -> str:
        return f"HTTP {self.status}: {one_line(self.body[:_EXCERPT].decode(errors='replace'))!r}"


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """What came instead of an answer."""

    reason: str


class Server(Enum):
    """Who answers over HTTP."""

    LMCACHE = "LMCache's HTTP port"
    ENGINE = "an engine's API"
    UNKNOWN = "an HTTP server that is neither vLLM nor LMCache"


async def get(url: str, *, deadline: float, headers: Mapping[str, str] | None = None) -> Answer | NoAnswer:
    """Return the answer to one GET, on a connection of its own."""
    timeout = aiohttp.ClientTimeout(total=deadline)
    trust_env = not is_loopback(urlsplit(url).hostname or "")
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=trust_env) as session,
            session.get(url, headers=headers, allow_redirects=False) as response,
        ):
            body = bytearray()
            async for piece in response.content.iter_chunked(1 << 16):
                body += piece
                if len(body) > _LONGEST:
                    return NoAnswer(f"GET {url}: the answer does not end")
            return Answer(response.status, bytes(body))
    except TimeoutError:
        return NoAnswer(f"GET {url}: no answer within {deadline:g} s")
    except _FOREIGN as error:
        return NoAnswer(f"GET {url}: {type(error).__name__}: {error}")


async def identify(root: str, *, deadline: float) -> Server:
    """Find out who answers at ``root``."""
    status = await get(f"{root}/status", deadline=deadline)
    if isinstance(status, Answer) and is_status(status.object):
        return Server.LMCACHE
    models = await get(f"{root}/v1/models", deadline=deadline)
    if isinstance(models, Answer) and (models.status == 401 or "data" in models.object):
        return Server.ENGINE
    return Server.UNKNOWN


def is_status(found: Mapping[str, Any]) -> bool:
    """Tell whether a JSON object is an LMCache server's ``/status``."""
    return "is_healthy" in found and ("non_cuda_context_meta" in found or "cache_context_meta" in found)
