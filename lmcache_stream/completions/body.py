"""aiohttp's body reader, less what a stream of small chunks pays for and never uses.

An engine sends each token in an HTTP chunk of its own. For each, aiohttp keeps the bounds that only
``readchunk`` asks for, and (3.14) lets its parser run once more after every read, paused or not. That and
the way through its helpers is a third of the time of a stream that is read as it comes. Which bytes
arrive, how a body ends and when its sender is held back stays as it is.
"""

from __future__ import annotations

import aiohttp

__all__ = ["lighten"]

_INSIDE = {"_buffer", "_buffer_offset", "_cursor", "_eof", "_exception", "_high_water", "_loop"}
_INSIDE |= {"_protocol", "_size", "_waiter"}


class _Body(aiohttp.StreamReader):
    __slots__ = ()

    def begin_http_chunk_receiving(self) -> None:
        pass

    def end_http_chunk_receiving(self) -> None:
        pass

    def feed_data(self, data: bytes, size: int = 0) -> bool:
        if data:
            self._buffer.append(data)
            self._size += len(data)
            waiter = self._waiter
            if waiter is not None:
                self._waiter = None
                if not waiter.done():
                    waiter.set_result(None)
            if self._size > self._high_water:
                self._protocol.pause_reading()
        return False

    async def readany(self) -> bytes:
        if self._exception is not None:
            raise self._exception
        while not self._buffer and not self._eof:
            waiter = self._waiter = self._loop.create_future()
            try:
                await waiter
            finally:
                self._waiter = None
        return self._read_nowait(-1)

    def _read_nowait(self, n: int) -> bytes:
        if n >= 0 or self._buffer_offset or self._protocol._reading_paused:
            return super()._read_nowait(n)
        pieces = self._buffer
        data = pieces.popleft() if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._cursor += len(data)
        self._size = 0
        return data


def lighten(content: aiohttp.StreamReader) -> None:
    """Make ``content`` cheaper to read, where it is the reader that is known here."""
    if type(content) is aiohttp.StreamReader and _INSIDE.issubset(aiohttp.StreamReader.__slots__):
        content.__class__ = _Body
