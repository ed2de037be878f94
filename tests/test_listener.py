"""Who listens at an address: real servers of each kind, and their first bytes cut anywhere."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

import pytest
import zmq
import zmq.asyncio
from aiohttp import web

import lmcache_stream as lms
from lmcache_stream._listener import Listener, Spoken, listener_at, same_listener, spoken
from lmcache_stream.cache.http import CacheHTTP

from .real.stack import free_port

GREETING = b"\xff\0\0\0\0\0\0\0\x01\x7f"


@pytest.mark.parametrize(
    ("first", "what"),
    [
        (b"", Spoken.SILENCE),
        (GREETING, Spoken.ZEROMQ),
        (GREETING + b"\x03\x01NULL", Spoken.ZEROMQ),
        (b"\xff\0\0\0\0\0\0\0\0\x7e", Spoken.OTHER),
        (b"HTTP/1.1 200 OK\r\n", Spoken.HTTP),
        (b"HTTP/1.0 404 Not Found\r\n", Spoken.HTTP),
        (b"HTTP/1.1 400 The plain HTTP request was sent to HTTPS port\r\n", Spoken.TLS),
        (b"\x15\x03\x01\x00\x02\x02F", Spoken.TLS),
        (b"SSH-2.0-OpenSSH_9.2\r\n", Spoken.OTHER),
        (b"-ERR wrong number of arguments\r\n", Spoken.OTHER),
        (b"\xff", Spoken.ZEROMQ),
    ],
)
def test_the_first_bytes_tell_the_protocol(first: bytes, what: Spoken) -> None:
    assert spoken(first) is what


def test_a_greeting_is_known_however_little_of_it_has_come() -> None:
    for length in range(1, len(GREETING) + 1):
        assert spoken(GREETING[:length]) is Spoken.ZEROMQ


@pytest.mark.parametrize(
    ("url", "other", "same"),
    [
        ("http://127.0.0.1:5555", "tcp://127.0.0.1:5555", True),
        ("http://localhost:5555/v1", "tcp://[::1]:5555", True),
        ("http://0.0.0.0:5555", "tcp://127.0.0.1:5555", True),
        ("http://gpu-1:5555", "tcp://GPU-1:5555", True),
        ("http://gpu-1", "tcp://gpu-1:80", True),
        ("https://gpu-1", "tcp://gpu-1:443", True),
        ("http://127.0.0.1:5555", "tcp://127.0.0.1:5556", False),
        ("http://gpu-1:5555", "tcp://gpu-2:5555", False),
        ("http://gpu-1:5555", "tcp://127.0.0.1:5555", False),
    ],
)
def test_the_same_listener_is_the_same_host_and_port(url: str, other: str, same: bool) -> None:
    assert same_listener(url, other) is same
    assert same_listener(other, url) is same


@asynccontextmanager
async def zeromq() -> AsyncIterator[str]:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        yield f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"


@asynccontextmanager
async def http() -> AsyncIterator[str]:
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def saying(words: bytes, *, at_once: bool) -> Callable[[], AbstractAsyncContextManager[str]]:
    """A server of plain sockets that says ``words``, when it is connected to or when it is spoken to."""

    @asynccontextmanager
    async def open_server() -> AsyncIterator[str]:
        left = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if not at_once:
                await reader.read(1)
            writer.write(words)
            # Until the other side is gone.
            with suppress(ConnectionError):
                await reader.read()
            writer.close()
            left.set()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.wait_for(left.wait(), 5)
        server.close()

    return open_server


@pytest.mark.parametrize(
    ("opened", "what"),
    [
        (zeromq, Spoken.ZEROMQ),
        (http, Spoken.HTTP),
        (saying(b"SSH-2.0-OpenSSH_9.2\r\n", at_once=True), Spoken.OTHER),
        (saying(b"\x15\x03\x03\x00\x02\x02\x32", at_once=False), Spoken.TLS),
        (saying(b"", at_once=True), Spoken.SILENCE),
    ],
    ids=["zeromq", "http", "ssh", "tls", "silence"],
)
async def test_a_server_is_told_by_what_it_says(
    opened: Callable[[], AbstractAsyncContextManager[str]], what: Spoken
) -> None:
    async with opened() as url:
        began = time.monotonic()
        assert await listener_at(url, deadline=1.5) == Listener(what)
        assert time.monotonic() - began < 5


async def test_who_greets_is_not_asked() -> None:
    heard = asyncio.get_running_loop().create_future()

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.05)
        writer.write(GREETING)
        try:
            heard.set_result(await reader.read())
        except ConnectionError:
            heard.set_result(b"")
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        url = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await listener_at(url, deadline=1.5) == Listener(Spoken.ZEROMQ)
        assert await heard == b""


async def test_who_resets_a_connection_is_there() -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        writer.transport.abort()

    async with await asyncio.start_server(reset, "127.0.0.1", 0) as server:
        url = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        assert await listener_at(url, deadline=1.5) == Listener(Spoken.SILENCE)


@pytest.mark.parametrize(
    ("url", "detail"),
    [
        (f"tcp://127.0.0.1:{free_port()}", "Connection refused"),
        ("http://no-such-host.invalid:8000", "not known"),
        # A label that no host name can have.
        (f"http://{'a' * 70}.invalid:8000", ""),
        ("http://127.0.0.1:0", ""),
    ],
    ids=["refused", "unknown host", "no host name", "no port"],
)
async def test_where_nobody_is_the_system_says_why(url: str, detail: str) -> None:
    found = await listener_at(url, deadline=5)
    assert found.spoken is Spoken.NOTHING
    assert found.detail
    assert detail in found.detail or "resolution" in found.detail


def test_ssl_alerts_have_the_record_header_that_is_looked_for() -> None:
    """Python's own TLS, asked in plain text, answers with the bytes that mean TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_side=True)
    incoming.write(b"\x16\x03\x01\x00\x05GET /")
    with pytest.raises(ssl.SSLError):
        tls.do_handshake()
    assert spoken(outgoing.read()) is Spoken.TLS


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_what_asks_a_zeromq_socket_by_mistake_sends_it_no_message(host: str) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        root = f"http://{host}:{router.bind_to_random_port('tcp://127.0.0.1')}"
        cache = CacheHTTP(root, deadline=1)
        with pytest.raises((lms.CacheConnectError, lms.CacheTimeoutError), match=root):
            await cache.status()
        await cache.aclose()
        with pytest.raises(
            lms.EngineConnectError, match="a ZeroMQ socket answers there, as at LMCache's --port"
        ):
            await lms.find_model(root, "m", api_key="k" * 200)
        # LMCache dies of a message that is not its own.
        assert not await router.poll(500)


async def test_the_requests_for_lmcache_s_status_are_shorter_than_the_first_frame() -> None:
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        cache = CacheHTTP(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", deadline=5)
        for ask in (cache.status, cache.config):
            with pytest.raises(lms.CacheError):
                await ask()
        await cache.aclose()
    assert [request.split(b" ")[1] for request in asked] == [b"/status", b"/config", b"/conf"]
    # "G" and the 71 bytes that it announces.
    assert max(map(len, asked)) <= 72


async def test_a_longer_request_would_be_a_message() -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        # What follows the 71 bytes is a frame of one byte, its flags, with nothing more to come.
        writer.write(b"GET /".ljust(72, b"x") + b"\x02\x00y")
        assert await router.poll(5000)
        writer.close()
        await writer.wait_closed()
