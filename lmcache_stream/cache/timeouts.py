"""Deadlines towards the cache server."""

from __future__ import annotations

from dataclasses import dataclass

from .._checks import checked_seconds
from ..errors import InvalidRequestError

__all__ = ["Timeouts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Deadlines towards the LMCache server, in seconds.

    Attributes:
        connect: for the connection to come up, and for each HTTP request.
        lookup: for a lookup with its prefetch.
        retrieve: for one retrieve.
        store: for one store.
    """

    connect: float = 5.0
    lookup: float = 10.0
    retrieve: float = 60.0
    store: float = 60.0

    def __post_init__(self) -> None:
        for name in ("connect", "lookup", "retrieve", "store"):
            value = getattr(self, name)
            if checked_seconds(value, f"timeouts: {name}") == 0:
                raise InvalidRequestError(f"timeouts: {name} must be a positive number of seconds")
