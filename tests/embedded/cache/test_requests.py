from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lmcache_stream._background import Background
from lmcache_stream._workers import Workers
from lmcache_stream.cache.messages import RegistrationReply
from lmcache_stream.embedded.cache.core import CacheCore
from lmcache_stream.embedded.cache.options import CacheOptions
from lmcache_stream.embedded.cache.pool import Pool
from lmcache_stream.embedded.cache.requests import Requests
from lmcache_stream.embedded.cache.wire import Request

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


def serving(flood: Flood, core: Any) -> asyncio.Task[None]:
    requests = Requests(core, cast(Any, flood), Background("unused"), Workers("unused"))
    return asyncio.create_task(requests.serve())


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_flood_of_requests_gives_way_to_everything_else() -> None:
    pool = Pool(1 << 16, shared=False)
    core = CacheCore(CacheOptions(chunk_size=4), RegistrationReply(), pool.view, Clock(), {})
    flood = Flood(500)
    task = serving(flood, core)
    turns = 0
    while flood.left:
        await asyncio.sleep(0)
        turns += 1
    assert turns > 400
    await ended(task)
    assert flood.sent == [[b"identity", b"\x01", b"\x15", b"\x04"]] * 500
    pool.close()


@pytest.mark.parametrize("error", [MemoryError, RecursionError, ValueError, AssertionError])
async def test_no_error_of_an_operation_stops_the_others(error: type[Exception]) -> None:
    class Core:
        failures = 3

        def answer(self, request: Request) -> int:
            if self.failures:
                self.failures -= 1
                raise error
            return 4

    flood = Flood(5)
    task = serving(flood, Core())
    while len(flood.sent) < 2:
        assert not task.done()
        await asyncio.sleep(0)
    await ended(task)
