"""Locks by key, for what must not overlap with its like."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

__all__ = ["KeyedLocks"]


class KeyedLocks:
    """A lock for each key, which exists while somebody holds it or waits for it."""

    def __init__(self) -> None:
        self._locks: dict[Any, asyncio.Lock] = {}
        self._users: Counter[Any] = Counter()

    async def acquire(self, key: Any) -> Callable[[], None]:
        """Wait for the lock of ``key`` and return what releases it; further calls of that do nothing."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        self._users[key] += 1
        try:
            await lock.acquire()
        except BaseException:
            self._drop(key)
            raise

        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                lock.release()
                self._drop(key)

        return release

    def _drop(self, key: Any) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key], self._locks[key]
