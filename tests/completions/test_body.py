"""The lighter body reader beside aiohttp's own: the same bytes, ends, failures and back pressure."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
import pytest
from aiohttp.client_proto import ResponseHandler

from lmcache_stream.completions.body import lighten

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Pipe(asyncio.Transport):
    """A transport without a socket, which knows whether it is to be read from."""

    def __init__(self) -> None:
        super().__init__()
        self._reading = True

    def is_reading(self) -> bool:
        return self._reading

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True

    def close(self) -> None:
        pass


async def body(light: bool, beginning: bytes = b"") -> tuple[ResponseHandler, Pipe, aiohttp.StreamReader]:
    protocol = ResponseHandler(asyncio.get_running_loop())
    pipe = Pipe()
    protocol.connection_made(pipe)
    protocol.set_response_params(read_until_eof=True)
    protocol.data_received(HEAD + beginning)
    _, content = await protocol.read()
    if light:
        lighten(content)
        assert type(content) is not aiohttp.StreamReader
    return protocol, pipe, content


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces)


@pytest.mark.parametrize("light", [False, True])
@pytest.mark.parametrize(
    ("beginning", "packets"),
    [
        (b"", [chunked(b"a", b"b"), chunked(b"c"), b"0\r\n\r\n"]),
        (chunked(b"a"), [chunked(b"b", b"c") + b"0\r\n\r\n"]),
        (b"5\r\nab", [b"cde\r\n", b"0\r\n\r\n"]),
        (b"", [bytes([byte]) for byte in chunked(b"abc", b"de") + b"0\r\n\r\n"]),
    ],
)
async def test_bytes_and_the_end(light: bool, beginning: bytes, packets: Sequence[bytes]) -> None:
    protocol, _, content = await body(light, beginning)
    received = [content.read_nowait()] if beginning else []

    async def feed() -> None:
        for packet in packets:
            protocol.data_received(packet)
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        group.create_task(feed())
        while piece := await content.readany():
            received.append(piece)
    assert b"".join(received) in (b"abc", b"abcde")
    assert content.at_eof()


@pytest.mark.parametrize("light", [False, True])
async def test_a_read_takes_all_that_is_there(light: bool) -> None:
    protocol, _, content = await body(light)
    protocol.data_received(chunked(*[b"x"] * 100))
    assert await content.readany() == b"x" * 100
    protocol.data_received(chunked(b"y"))
    assert await content.readany() == b"y"
    assert await content.read(0) == b""


@pytest.mark.parametrize("light", [False, True])
async def test_a_full_buffer_holds_the_sender_back_until_it_is_read(light: bool) -> None:
    protocol, pipe, content = await body(light)
    sent = 0
    while pipe.is_reading():
        protocol.data_received(chunked(b"x" * 65536))
        sent += 65536
        assert sent < 2**26
    received = 0
    while received < sent:
        received += len(await content.readany())
    assert pipe.is_reading()
    protocol.data_received(chunked(b"y"))
    assert await content.readany() == b"y"


@pytest.mark.parametrize("light", [False, True])
async def test_a_body_that_is_read_as_it_comes_never_holds_the_sender_back(light: bool) -> None:
    protocol, pipe, content = await body(light)
    _, high = content.get_read_buffer_limits()
    for _ in range(high // 50_000 + 2):
        protocol.data_received(chunked(b"x" * 50_000))
        assert pipe.is_reading()
        assert len(await content.readany()) == 50_000


@pytest.mark.parametrize("light", [False, True])
async def test_a_connection_that_breaks_wakes_the_reader(light: bool) -> None:
    protocol, _, content = await body(light)
    reading = asyncio.ensure_future(content.readany())
    await asyncio.sleep(0)
    protocol.connection_lost(ConnectionResetError(104, "reset"))
    with pytest.raises(aiohttp.ClientError):
        await reading


async def test_another_reader_is_left_alone() -> None:
    class Other(aiohttp.StreamReader):
        __slots__ = ()

    _, _, content = await body(False)
    content.__class__ = Other
    lighten(content)
    assert type(content) is Other
