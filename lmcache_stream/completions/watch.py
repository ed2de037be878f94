"""A deadline that moves with every event and costs next to nothing while it holds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Watch"]


class Watch:
    """Calls ``expire`` when a wait has lasted ``limit`` seconds.

    One timer serves a whole stream: it looks when the wait began, and goes on where that is not long
    ago. Time in which nobody waits does not count.

    Attributes:
        since: the loop's time at which the wait began; None while nobody waits.
        expired: whether the limit was passed.
    """

    __slots__ = ("_expire", "_limit", "_loop", "_timer", "expired", "since")

    def __init__(self, expire: Callable[[], None]) -> None:
        self.expired = False
        self._expire = expire
        self._loop = asyncio.get_running_loop()
        self._limit: float | None = None
        self.since: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def restart(self, limit: float | None) -> None:
        """Set a new limit, None for none; the next wait begins anew."""
        self.stop()
        self._limit = limit
        if limit is not None:
            self._timer = self._loop.call_later(limit, self._look)

    def stop(self) -> None:
        """Forget the wait and the limit."""
        self.since = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        assert self._limit is not None
        left = self._limit
        if self.since is not None:
            left -= self._loop.time() - self.since
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self._timer = None
            self.expired = True
            self._expire()
