"""The HTTP side of the server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from .core import CacheCore

_LARGEST_BODY = 1 << 16
_TIERS = ("l1", "l2", "all")


def application(
    core: CacheCore, status: Callable[[], dict[str, Any]], config: Callable[[], dict[str, Any]]
) -> web.Application:
    """Return the routes over ``core``; ``status`` and ``config`` make the bodies of theirs."""

    async def root(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "service": "LMCache HTTP API"})

    async def healthcheck(_: web.Request) -> web.Response:
        return web.json_response({"status": "healthy"})

    async def get_status(_: web.Request) -> web.Response:
        return web.json_response(status())

    async def get_config(_: web.Request) -> web.Response:
        return web.json_response(config())

    async def clear(request: web.Request) -> web.Response:
        try:
            force = _force_of(await request.read())
        except _BadBodyError as error:
            return web.json_response({"detail": str(error)}, status=error.status)
        core.store.clear(force=force)
        return web.json_response({"status": "ok", "cleared": {"tier": "l1"}})

    app = web.Application(client_max_size=_LARGEST_BODY)
    app.router.add_get("/", root)
    app.router.add_get("/healthcheck", healthcheck)
    app.router.add_get("/status", get_status)
    app.router.add_get("/config", get_config)
    # Of older servers.
    app.router.add_get("/conf", get_config)
    app.router.add_post("/cache/clear", clear)
    return app


class _BadBodyError(ValueError):
    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class _Clear(msgspec.Struct):
    tier: str = "l1"
    force: bool = False


def _force_of(body: bytes) -> bool:
    """Return whether a ``POST /cache/clear`` with that body is to spare nothing."""
    try:
        wanted = msgspec.json.decode(body, type=_Clear | None, strict=False) if body else None
    except (msgspec.DecodeError, RecursionError) as error:
        raise _BadBodyError(str(error), status=422) from error
    wanted = wanted or _Clear()
    if wanted.tier not in _TIERS:
        raise _BadBodyError(f"tier {wanted.tier!r} is none of {', '.join(_TIERS)}", status=422)
    if wanted.tier != "l1":
        raise _BadBodyError(f"tier {wanted.tier!r} not supported; only 'l1'", status=400)
    return wanted.force
