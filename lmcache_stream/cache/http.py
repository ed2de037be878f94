"""The HTTP side of an LMCache server: its configuration and its status."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from .._checks import is_loopback
from .._listener import QUIET, Spoken, listener_at
from ..errors import CacheConnectError, CacheError, CacheTimeoutError, ClosedError

_EXCERPT = 80
# How long an error may take to find out who it is that answers in place of LMCache.
_LOOK_SECONDS = 2.0


class CacheHTTP:
    """Reads JSON from one LMCache server's HTTP port."""

    def __init__(self, http_url: str, *, deadline: float) -> None:
        self._url = http_url
        self._deadline = deadline
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=deadline),
            # At a wrong port a longer request ends LMCache; see `_listener.QUIET`.
            skip_auto_headers=QUIET,
            trust_env=not is_loopback(urlsplit(http_url).hostname or ""),
        )

    @property
    def url(self) -> str:
        return self._url

    async def config(self) -> dict[str, Any]:
        """Return the multiprocess section of ``/config``, or of ``/conf`` on older servers."""
        answer = await self._get("/config", missing_ok=True)
        if answer is None:
            answer = await self._get("/conf")
        section = answer.get("mp") if isinstance(answer, dict) else None
        if not isinstance(section, dict):
            raise CacheError(f"{self._url}/config has no section `mp`: is this LMCache in multiprocess mode?")
        return section

    async def status(self) -> dict[str, Any]:
        """Return ``/status``."""
        answer = await self._get("/status")
        if not isinstance(answer, dict):
            raise CacheError(
                f"GET {self._url}/status: the answer is no JSON object; is this LMCache's --http-port?"
            )
        return answer

    async def _get(self, path: str, *, missing_ok: bool = False) -> Any:
        url = self._url + path
        if self._session.closed:
            raise ClosedError(f"the connection to LMCache at {self._url} is closed")
        try:
            async with self._session.get(url) as response:
                body = await response.read()
                status = response.status
        except TimeoutError as error:
            raise CacheTimeoutError(
                f"GET {url}: no answer within {self._deadline:g} s; is this LMCache's --http-port?"
            ) from error
        except (aiohttp.ClientError, asyncio.IncompleteReadError, OSError) as error:
            raise CacheConnectError(f"GET {url}: {await self._reason(error)}") from error
        excerpt = body[:_EXCERPT].decode(errors="replace")
        if status == 404 and missing_ok:
            return None
        if status != 200:
            raise CacheError(f"GET {url}: HTTP {status}: {excerpt!r}; is this LMCache's --http-port?")
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise CacheError(
                f"GET {url}: the answer is no JSON but {excerpt!r}; is this LMCache's --http-port?"
            ) from error

    async def _reason(self, error: Exception) -> str:
        if not isinstance(error, aiohttp.ClientConnectorError):
            found = await listener_at(self._url, deadline=_LOOK_SECONDS)
            if found.spoken is Spoken.ZEROMQ:
                return (
                    f"{found.spoken.value}, as at LMCache's --port; http_url= is the port of its "
                    "--http-port option (not of --port)"
                )
        return (
            f"{type(error).__name__}: {error}. Is `lmcache server` running, and is this the port of its "
            "--http-port option (not of --port)?"
        )

    async def aclose(self) -> None:
        """Close the connections; idempotent."""
        await self._session.close()
