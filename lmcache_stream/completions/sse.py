"""Server-sent events, decoded from bytes as the WHATWG standard parses them.

https://html.spec.whatwg.org/multipage/server-sent-events.html#event-stream-interpretation
"""

from __future__ import annotations

import msgspec

__all__ = ["SSEDecoder", "ServerSentEvent"]

_LF = 0x0A
_BOM = b"\xef\xbb\xbf"
_LINE_ENDS = (b"\n", b"\r")


class ServerSentEvent(msgspec.Struct, frozen=True, gc=False):
    """One event.

    Attributes:
        data: its data lines joined by LF, as the bytes that were sent.
        event: its type.
        last_event_id: the last id that the stream had given by then.
    """

    data: bytes
    event: str = "message"
    last_event_id: str = ""


class SSEDecoder:
    """Bytes in, events out; how the bytes are cut into reads makes no difference.

    A line may be of any length, and the cost is linear in the bytes however small the reads are.
    An event that has no blank line after it is not given, as the standard has it.

    Attributes:
        retry: the reconnection time that the stream asked for, in milliseconds, or None.
    """

    def __init__(self) -> None:
        self.retry: int | None = None
        self._last_event_id = ""
        self._event = ""
        self._data: list[bytes] = []
        self._line: list[bytes] = []
        self._after_cr = False
        # Bytes that may be the beginning of a byte order mark; None once that is decided.
        self._start: bytes | None = b""
        # The next bytes begin an event, and nothing that came before belongs to it.
        self._between = False

    @property
    def inside_data(self) -> bool:
        """Whether a data field has begun whose event is not complete yet."""
        return bool(self._data) or bool(self._line and self._line[0].startswith(b"d"))

    def feed(self, chunk: bytes) -> list[ServerSentEvent]:
        """Take what was read and return the events that it completes."""
        if self._between and chunk.startswith(b"data: "):
            # Whole events of one data line each: what engines send, most often one in a read.
            if chunk.find(b"\n") == len(chunk) - 2 and chunk[-1] == _LF and b"\r" not in chunk:
                return [ServerSentEvent(chunk[6:-2], "message", self._last_event_id)]
            if chunk.endswith(b"\n\n") and b"\r" not in chunk:
                blocks = chunk[6:-2].split(b"\n\ndata: ")
                if chunk.count(b"\n") == 2 * len(blocks):
                    last_id = self._last_event_id
                    return [ServerSentEvent(block, "message", last_id) for block in blocks]
        events = self._feed_lines(chunk)
        self._between = not (self._line or self._data or self._event or self._after_cr or self._start)
        return events

    def _feed_lines(self, chunk: bytes) -> list[ServerSentEvent]:
        if self._start is not None:
            chunk = self._start + chunk
            if len(chunk) < len(_BOM) and _BOM.startswith(chunk):
                self._start = chunk
                return []
            self._start = None
            chunk = chunk.removeprefix(_BOM)
        if self._after_cr and chunk:
            # The CR ended its line when it came; an LF after it belongs to the same end.
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        if not chunk:
            return []
        self._after_cr = chunk.endswith(b"\r")
        lines = chunk.splitlines()
        rest = b"" if chunk.endswith(_LINE_ENDS) else lines.pop()
        events: list[ServerSentEvent] = []
        if lines:
            if self._line:
                self._line.append(lines[0])
                lines[0] = b"".join(self._line)
                self._line.clear()
            for line in lines:
                if line:
                    self._field(line)
                else:
                    self._dispatch(events)
        if rest:
            self._line.append(rest)
        return events

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"data":
                self._data.append(value)
            case b"event":
                self._event = value.decode("utf-8", "replace")
            case b"id" if b"\0" not in value:
                self._last_event_id = value.decode("utf-8", "replace")
            case b"retry" if value.isdigit() and len(value) < 19:
                self.retry = int(value)
            case _:
                # A comment has an empty name; fields that are not known are passed over.
                pass

    def _dispatch(self, events: list[ServerSentEvent]) -> None:
        if self._data:
            data = b"\n".join(self._data)
            events.append(ServerSentEvent(data, self._event or "message", self._last_event_id))
            self._data.clear()
        self._event = ""
