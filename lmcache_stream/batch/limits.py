"""How much of a machine a batch takes: file descriptors, and memory for edits."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

__all__ = ["ByteLimiter", "descriptor_limit", "memory_limit"]

_DESCRIPTORS = Path("/proc/self/fd")


def descriptor_limit() -> int:
    """Return how many streams may run at once: a connection each, in half of the file descriptors that the
    soft limit leaves to this process now; at least 1."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    # The listing has a descriptor of its own.
    in_use = sum(1 for _ in _DESCRIPTORS.iterdir()) - 1
    return max(1, (soft - in_use) // 2)


def memory_limit() -> int:
    """Return how many bytes of KV may be edited at once: a quarter of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


class ByteLimiter:
    """Lets holders of bytes in as long as all that they hold together is within ``limit``.

    First come, first served, so that a large one is not starved by small ones; one that is larger than
    the limit runs alone.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def reserve(self, count: int) -> AsyncIterator[float]:
        """Hold ``count`` bytes for the length of a block; gives the seconds that were waited for them."""
        count = min(count, self.limit)
        started = time.perf_counter()
        await self._take(count)
        try:
            yield time.perf_counter() - started
        finally:
            self._give(count)

    async def _take(self, count: int) -> None:
        if not self._waiting and self._used + count <= self.limit:
            self._used += count
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (count, turn)
        self._waiting.append(entry)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                # The turn and the cancellation came together.
                self._give(count)
            else:
                with contextlib.suppress(ValueError):
                    self._waiting.remove(entry)
                self._admit()
            raise

    def _give(self, count: int) -> None:
        self._used -= count
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            count, turn = self._waiting[0]
            if not turn.done():
                if self._used + count > self.limit:
                    return
                self._used += count
                turn.set_result(None)
            self._waiting.popleft()
