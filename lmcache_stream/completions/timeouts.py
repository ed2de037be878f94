"""The deadlines of a pass."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import InvalidRequestError

__all__ = ["CompletionTimeouts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionTimeouts:
    """Deadlines in seconds, one a phase; None is none. A pass as a whole has none.

    Attributes:
        connect: until the connection stands.
        first_token: from the POST to the first token.
        idle: between two events.
        drain: how long ``aclose`` waits for engines that have not begun to answer.
    """

    connect: float | None = 5.0
    first_token: float | None = None
    idle: float | None = 60.0
    drain: float = 30.0

    def __post_init__(self) -> None:
        for name in ("connect", "first_token", "idle"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and value > 0):
                raise InvalidRequestError(f"timeouts: {name}={value!r}: give seconds, or None")
        if not (_is_number(self.drain) and self.drain >= 0):
            raise InvalidRequestError(f"timeouts: drain={self.drain!r}: give seconds")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
