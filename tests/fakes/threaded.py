"""The scripted server on a loop of its own, for tests whose own thread blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from .lmcache import FakeLMCache


@contextmanager
def serving(server: FakeLMCache | None = None) -> Iterator[FakeLMCache]:
    """Run a server in a thread until the block ends."""
    fake = FakeLMCache() if server is None else server
    ready, stop = threading.Event(), threading.Event()

    async def main() -> None:
        async with fake:
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.005)

    thread = threading.Thread(target=asyncio.run, args=(main(),), name="fake server")
    thread.start()
    assert ready.wait(10)
    try:
        yield fake
    finally:
        stop.set()
        thread.join(10)
    assert fake.violations == []
