from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any, cast

from lmcache_stream._background import Background
from lmcache_stream._workers import Workers
from lmcache_stream.cache.messages import RegistrationReply
from lmcache_stream.embedded.cache.core import CacheCore
from lmcache_stream.embedded.cache.options import CacheOptions
from lmcache_stream.embedded.cache.pool import Pool
from lmcache_stream.embedded.cache.requests import Requests

from .clock import Clock

GET_CHUNK_SIZE = [b"identity", b"\x01", b"\x15"]


class Flood:
    """A socket that has always received something already, as under a flood of requests."""

    def __init__(self, messages: int) -> None:
        self.left = messages
        self.sent: list[Any] = []

    async def recv_multipart(self, *, copy: bool) -> list[Any]:
        if not self.left:
            await asyncio.Event().wait()
        self.left -= 1
        return [SimpleNamespace(buffer=memoryview(frame)) for frame in GET_CHUNK_SIZE]

    async def send_multipart(self, frames: list[Any], *, copy: bool) -> None:
        self.sent.append(frames)


async def test_a_flood_of_requests_gives_way_to_everything_else() -> None:
    pool = Pool(1 << 16, shared=False)
    core = CacheCore(CacheOptions(chunk_size=4), RegistrationReply(), pool.view, Clock(), {})
    flood = Flood(500)
    requests = Requests(core, cast(Any, flood), Background("unused"), Workers("unused"))
    task = asyncio.create_task(requests.serve())
    turns = 0
    while flood.left:
        await asyncio.sleep(0)
        turns += 1
    assert turns > 400
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert flood.sent == [[b"identity", b"\x01", b"\x15", b"\x04"]] * 500
    pool.close()
