"""One operation at a time on a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .errors import StreamBusyError


class Turns:
    """Refuses a second operation while a first is under way."""

    def __init__(self) -> None:
        self._under_way = ""

    def take(self, operation: str) -> Callable[[], None]:
        """Begin ``operation`` and return what ends it.

        Raises:
            StreamBusyError: another is under way.
        """
        if self._under_way:
            raise StreamBusyError(
                f"{operation} was begun while {self._under_way} is under way on this stream: one at a time"
            )
        self._under_way = operation

        def end() -> None:
            self._under_way = ""

        return end

    @contextmanager
    def during(self, operation: str) -> Iterator[None]:
        """Take the turn for the length of a block."""
        end = self.take(operation)
        try:
            yield
        finally:
            end()
