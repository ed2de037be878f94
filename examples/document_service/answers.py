"""One answer on its way to its client: events, and heartbeats while there are none."""

from __future__ import annotations

from typing import Any, Self

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream

from .requests import Problem

__all__ = ["HEARTBEAT", "SSE_HEADERS", "Answer", "Event", "frame"]

# The last one is for nginx, which would collect events.
SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
}
HEARTBEAT = b": still at work\n\n"
"""A comment, which clients skip; writing it shows whether the client is there."""


class Event(msgspec.Struct, frozen=True):
    """An event: ``token``, ``edit``, ``done`` or ``error``, and its data."""

    name: str
    data: dict[str, Any]


def frame(event: Event) -> bytes:
    """Return an event as a server-sent event; JSON has no line ends, so that its data is one line."""
    return b"event: %s\ndata: %s\n\n" % (event.name.encode(), msgspec.json.encode(event.data))


class Answer:
    """The frames of one answer, to iterate over after ``begin``; made by ``DocumentService.answer``.

    Attributes:
        outcome: what became of it so far, under the names of the metrics.
    """

    def __init__(self, events: MemoryObjectReceiveStream[Event | Problem], heartbeat: float) -> None:
        self._events = events
        self._heartbeat = heartbeat
        self._first: Event | None = None
        # Until the last frame was taken and the one behind it asked for.
        self.outcome = "left"
        self._in_the_end = "failed"

    async def begin(self) -> None:
        """Wait for the first event, or for one heartbeat: then the status can be sent.

        Raises:
            Problem: there is no answer.
        """
        with anyio.move_on_after(self._heartbeat):
            first = await self._events.receive()
            if isinstance(first, Problem):
                self.outcome = first.outcome
                raise first
            self._first = first

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        event: Event | Problem
        if self._first is not None:
            event, self._first = self._first, None
            return self._frame(event)
        try:
            with anyio.move_on_after(self._heartbeat):
                event = await self._events.receive()
                return self._frame(event)
        except anyio.EndOfStream:
            self.outcome = self._in_the_end
            raise StopAsyncIteration from None
        return HEARTBEAT

    def _frame(self, event: Event | Problem) -> bytes:
        if isinstance(event, Problem):
            self._in_the_end = event.outcome
            return frame(Event("error", event.data))
        if event.name == "done":
            self._in_the_end = "answered"
        return frame(event)
