"""What listens at an address, by the first bytes that it says: for errors that tell a wrong port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from dataclasses import dataclass
from enum import Enum
from urllib.parse import urlsplit

from ._background import to_the_end
from ._checks import is_loopback

__all__ = ["QUIET", "Listener", "Spoken", "listener_at", "same_listener", "spoken"]

# A ZeroMQ socket greets at once; HTTP and TLS servers wait to be asked.
_GREETING_SECONDS = 0.5
_EXCERPT = 64
_QUESTION = b"GET / HTTP/1.0\r\n\r\n"
QUIET = ("Accept", "Accept-Encoding", "User-Agent")
"""Headers that aiohttp would add, and that a GET does without where a ZeroMQ socket might answer.

Such a socket takes what does not begin as its greeting for an old peer's frames, and "G" for the length of
the first, 71 bytes. Of a longer request a message can come out, and of one that is not its own the thread
dies that LMCache (0.5.6) answers in.
"""
_PORTS = {"http": 80, "https": 443}


class Spoken(Enum):
    """A protocol, as far as the first bytes tell."""

    NOTHING = "nothing listens there"
    SILENCE = "something listens there and says nothing"
    ZEROMQ = "a ZeroMQ socket answers there"
    HTTP = "an HTTP server answers there"
    TLS = "a TLS server answers there"
    OTHER = "something answers there in another protocol"


@dataclass(frozen=True, slots=True)
class Listener:
    """Who listens at an address.

    Attributes:
        spoken: what it speaks.
        detail: the reason of the operating system where nothing listens, else empty.
    """

    spoken: Spoken
    detail: str = ""

    @property
    def is_zeromq(self) -> bool:
        """Whether it is a ZeroMQ socket."""
        return self.spoken is Spoken.ZEROMQ


def spoken(first: bytes) -> Spoken:
    """Tell the protocol of a server whose first bytes these are.

    Source: ZMTP 3.1 (the signature of a greeting, whose middle eight bytes are of no account), RFC 9112
    (status line), RFC 8446 (an alert's record header).
    """
    if not first:
        return Spoken.SILENCE
    if first[0] == 0xFF and (len(first) < 10 or first[9] == 0x7F):
        return Spoken.ZEROMQ
    if first.startswith(b"HTTP/"):
        # How servers that are spoken to without TLS say so.
        return Spoken.TLS if b"HTTPS port" in first else Spoken.HTTP
    if first[:2] == b"\x15\x03":
        return Spoken.TLS
    return Spoken.OTHER


async def listener_at(url: str, *, deadline: float) -> Listener:
    """Connect to the host and port of ``url`` and tell who is there, within ``deadline`` seconds.

    Raises nothing: who cannot be reached is ``Spoken.NOTHING``.
    """
    host, port = _host_and_port(url)
    heard = bytearray()
    connected = False
    try:
        async with asyncio.timeout(deadline):
            reader, writer = await asyncio.open_connection(host, port)
            connected = True
            try:
                await _listen(reader, writer, heard)
            finally:
                await to_the_end(_close(writer))
    except TimeoutError:
        if not connected:
            return Listener(Spoken.NOTHING, f"no connection within {deadline:g} s")
    except (OSError, UnicodeError) as error:
        if not connected:
            return Listener(Spoken.NOTHING, _reason(error))
    return Listener(spoken(bytes(heard)))


def same_listener(url: str, other: str) -> bool:
    """Tell whether both addresses name one host and port; none is resolved, this machine's count as one."""
    (host, port), (other_host, other_port) = _host_and_port(url), _host_and_port(other)
    return port == other_port and (host == other_host or (is_loopback(host) and is_loopback(other_host)))


def _host_and_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 0)


def _reason(error: OSError | UnicodeError) -> str:
    # asyncio puts the address into the text of the system's reason, whose number stays.
    if isinstance(error, OSError) and not isinstance(error, socket.gaierror) and error.errno:
        return os.strerror(error.errno)
    return getattr(error, "strerror", None) or str(error)


async def _listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heard: bytearray) -> None:
    try:
        async with asyncio.timeout(_GREETING_SECONDS):
            heard += await reader.read(_EXCERPT)
        return
    except TimeoutError:
        pass
    writer.write(_QUESTION)
    await writer.drain()
    heard += await reader.read(_EXCERPT)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    # The reset is ours.
    with contextlib.suppress(OSError):
        await writer.wait_closed()
