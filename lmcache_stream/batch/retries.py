"""Which failures are tried again, and after how long; pure."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import CacheConnectError, EngineConnectError, EngineStatusError, EngineTimeoutError

__all__ = ["RetryPolicy", "is_connection_error"]

_BUSY = (429, 503)


def is_connection_error(error: BaseException) -> bool:
    """Tell whether engine or cache could not be reached: nothing that a row of a batch can be blamed for."""
    if isinstance(error, EngineTimeoutError):
        return error.connecting
    return isinstance(error, EngineConnectError | CacheConnectError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Pauses that double and are drawn with full jitter, so that streams that failed together do not come
    back together.

    Attributes:
        max_attempts: attempts of a phase at most, the first among them.
        first: seconds; the first pause is drawn from none to this.
        longest: seconds; no pause is drawn from more than this.
        patience: seconds; a longer ``Retry-After`` is not waited for but is the end of the stream.
    """

    max_attempts: int = 4
    first: float = 0.5
    longest: float = 30.0
    patience: float = 120.0

    def pause(
        self, error: BaseException, attempts: int, draw: Callable[[], float] = random.random
    ) -> float | None:
        """Return the seconds to wait before another attempt; None where there shall be none.

        A ``Retry-After`` is waited for in full, and the jitter comes on top of it.

        Args:
            error: what ended the last attempt, before any token came.
            attempts: how many there were.
            draw: gives a random number from 0 to 1.
        """
        if attempts >= self.max_attempts:
            return None
        wished = 0.0
        if isinstance(error, EngineStatusError) and error.status in _BUSY:
            # An engine of the caller's own can wish for anything.
            wished = max(0.0, error.retry_after or 0.0)
        elif not is_connection_error(error):
            return None
        if wished > self.patience:
            return None
        try:
            doubled = math.ldexp(self.first, attempts - 1)
        except OverflowError:
            doubled = math.inf
        return wished + draw() * min(self.longest, doubled)
