"""Locks that end by themselves."""

from __future__ import annotations

from dataclasses import dataclass

# LMCache takes no more at once, whatever a client says.
_MOST_AT_ONCE = 128


@dataclass(slots=True)
class TimedLock:
    """A count of holders that is void ``ttl`` seconds after the last of them came.

    Attributes:
        ttl: seconds.
        count: holders, void or not.
        until: the time at which they are void.
    """

    ttl: float
    count: int = 0
    until: float = 0.0

    def is_held(self, now: float) -> bool:
        return self.count > 0 and now < self.until

    def acquire(self, now: float, times: int = 1) -> None:
        """Add holders, and time for all; the void ones do not count any more."""
        if not self.is_held(now):
            self.count = 0
        self.count += at_once(times)
        self.until = now + self.ttl

    def release(self, times: int = 1) -> None:
        """Take holders away, whoever's they are."""
        self.count = max(0, self.count - at_once(times))


def at_once(times: int) -> int:
    return min(times, _MOST_AT_ONCE)
