"""The request client against a ROUTER of which each test decides every answer."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from lmcache_stream.cache.messages import (
    COMMIT_STORE,
    END_SESSION,
    GET_CHUNK_SIZE,
    LOOKUP,
    QUERY_PREFETCH_STATUS,
    TRANSFERS,
)
from lmcache_stream.cache.requests import RequestClient
from lmcache_stream.errors import CacheConnectError, CacheError, CacheTimeoutError, ClosedError

encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode
CONNECT = 0.5


@dataclass
class Request:
    identity: bytes
    uid: int
    operation: int
    payloads: list[Any]


class Router:
    """A ROUTER that answers nothing by itself."""

    def __init__(self, port: int = 0) -> None:
        self._context = zmq.asyncio.Context()
        self._socket: zmq.asyncio.Socket | None = None
        self.port = port

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def open(self) -> None:
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        if not self.port:
            self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
            return
        for _ in range(30):
            # ZeroMQ closes the socket before a little after it was told to.
            with contextlib.suppress(zmq.ZMQError):
                self._socket.bind(self.url)
                return
            time.sleep(0.01)
        raise OSError(f"{self.url} stays in use")

    def stop(self) -> None:
        """End as a killed process does: without a word."""
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None

    async def receive(self) -> Request:
        assert self._socket is not None
        with anyio.fail_after(10):
            identity, *frames = await self._socket.recv_multipart()
        uid, operation, *payloads = map(decode, frames)
        return Request(identity, uid, operation, payloads)

    async def send(self, request: Request, frames: Sequence[bytes]) -> None:
        assert self._socket is not None
        await self._socket.send_multipart([request.identity, *frames])

    async def reply(self, request: Request, *result: Any) -> None:
        await self.send(request, [encode(part) for part in (request.uid, request.operation, *result)])

    def close(self) -> None:
        self.stop()
        self._context.term()


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    opened = Router()
    opened.open()
    yield opened
    opened.close()


@contextlib.asynccontextmanager
async def connected(url: str, *, connect_timeout: float = 10) -> AsyncIterator[RequestClient]:
    client = RequestClient(url, connect_timeout=connect_timeout)
    await client.start()
    try:
        yield client
    finally:
        await client.aclose()
        assert client._waiting == {}


@pytest.fixture
async def client(router: Router) -> AsyncIterator[RequestClient]:
    async with connected(router.url) as opened:
        yield opened


@pytest.fixture(autouse=True)
def no_io_thread_is_left() -> Iterator[None]:
    before = zmq_threads()
    yield
    deadline = time.monotonic() + 2
    while zmq_threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert zmq_threads() <= before


def zmq_threads() -> int:
    count = 0
    for path in Path("/proc/self/task").glob("*/comm"):
        # A thread that was there a moment ago may be gone.
        with contextlib.suppress(OSError):
            count += "ZMQ" in path.read_text()
    return count


async def until_up(client: RequestClient, wanted: bool = True) -> None:
    with anyio.fail_after(10):
        while client.is_up is not wanted:
            await asyncio.sleep(0.005)


async def ask(client: RequestClient, name: str = "r", *, deadline: float = 10) -> int | None:
    return await client.call(QUERY_PREFETCH_STATUS, name, deadline=deadline)


async def test_replies_out_of_order_find_their_requests(client: RequestClient, router: Router) -> None:
    calls = [asyncio.create_task(ask(client, str(number))) for number in range(30)]
    requests = [await router.receive() for _ in calls]
    assert len({request.uid for request in requests}) == 30
    random.Random(0).shuffle(requests)
    for request in requests:
        await router.reply(request, int(request.payloads[0]))
    assert await asyncio.gather(*calls) == list(range(30))


async def test_a_reply_without_a_result_is_none(client: RequestClient, router: Router) -> None:
    call = asyncio.create_task(client.call(END_SESSION, "r", deadline=10))
    request = await router.receive()
    assert (request.operation, request.payloads) == (END_SESSION.number, ["r"])
    await router.reply(request)
    assert await call is None  # type: ignore[func-returns-value]


async def test_silence_until_the_deadline_is_a_timeout_that_says_what_was_asked_where(
    client: RequestClient, router: Router
) -> None:
    await until_up(client)
    began = time.monotonic()
    with pytest.raises(CacheTimeoutError, match="query_prefetch_status") as caught:
        await ask(client, deadline=0.1)
    assert 0.09 < time.monotonic() - began < 10
    assert isinstance(caught.value, TimeoutError)
    assert router.url in str(caught.value)
    assert "0.1 s" in str(caught.value)


async def test_a_late_reply_is_dropped(client: RequestClient, router: Router) -> None:
    with pytest.raises(CacheTimeoutError):
        await ask(client, "late", deadline=0.1)
    late = await router.receive()
    call = asyncio.create_task(ask(client, "next"))
    following = await router.receive()
    assert following.uid != late.uid
    await router.reply(late, 1)
    await router.reply(following, 2)
    assert await call == 2


async def test_a_second_reply_is_dropped(client: RequestClient, router: Router) -> None:
    for number in (1, 2):
        call = asyncio.create_task(ask(client))
        request = await router.receive()
        await router.reply(request, number)
        await router.reply(request, 77)
        assert await call == number


async def test_what_is_no_reply_is_ignored(client: RequestClient, router: Router) -> None:
    call = asyncio.create_task(ask(client))
    request = await router.receive()
    garbage = [
        [b""],
        [b"", b"", b""],
        [b"\xc1", b"\xc1"],
        [b"HTTP/1.1 400 Bad Request\r\n\r\n"],
        [encode(request.uid + 1000), encode(9), encode(5)],
        [encode(-request.uid), encode(9), encode(5)],
        [encode(str(request.uid)), encode(9), encode(5)],
        [encode([request.uid]), encode(9), encode(5)],
        [b"\x91" * 100_000],
    ]
    for frames in garbage:
        await router.send(request, frames)
    await asyncio.sleep(0.05)
    assert not call.done()
    await router.reply(request, 5)
    assert await call == 5


@pytest.mark.parametrize("result", [b"\xc1", b"", encode("five"), encode(-5)])
async def test_a_malformed_result_is_an_error_and_not_silence(
    client: RequestClient, router: Router, result: bytes
) -> None:
    call = asyncio.create_task(ask(client))
    request = await router.receive()
    await router.send(request, [encode(request.uid), encode(9), result])
    with pytest.raises(CacheError, match="query_prefetch_status") as caught:
        await call
    assert not isinstance(caught.value, CacheTimeoutError | CacheConnectError)
    again = asyncio.create_task(ask(client))
    await router.reply(await router.receive(), 5)
    assert await again == 5


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def test_where_nothing_listens_the_connect_timeout_ends_it() -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    async with connected(url, connect_timeout=CONNECT) as client:
        began = time.monotonic()
        with pytest.raises(CacheConnectError, match=r"within 0.5 s\. Is `lmcache server`.*--port") as caught:
            await ask(client, deadline=60)
        assert CONNECT - 0.05 < time.monotonic() - began < 10
        assert url in str(caught.value)
        assert not client.is_up
        assert client.connections == 0


async def test_a_server_that_comes_while_it_is_waited_for_is_taken() -> None:
    router = Router(free_port())
    async with connected(router.url) as client:
        call = asyncio.create_task(ask(client))
        await asyncio.sleep(0.3)
        router.open()
        await router.reply(await router.receive(), 5)
        assert await call == 5
        assert client.connections == 1
    router.close()


async def test_an_http_server_there_is_told_apart() -> None:
    runner = web.AppRunner(web.Application())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"tcp://127.0.0.1:{runner.addresses[0][1]}"
    async with connected(url, connect_timeout=CONNECT) as client:
        with pytest.raises(CacheConnectError, match="does not speak ZeroMQ"):
            await ask(client, deadline=60)
    await runner.cleanup()


async def test_a_port_that_accepts_and_says_nothing_is_no_server() -> None:
    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(2)
        writer.close()

    silent = await asyncio.start_server(accept, "127.0.0.1", 0)
    url = f"tcp://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
    async with connected(url, connect_timeout=CONNECT) as client:
        began = time.monotonic()
        with pytest.raises(CacheConnectError, match="no LMCache server"):
            await ask(client, deadline=60)
        assert time.monotonic() - began < 10
    silent.close()
    await asyncio.sleep(2)


@pytest.mark.parametrize("url", ["tcp://localhost", "tcp://*:5555", "tcp://localhost:5555/x", "udp://a:1"])
async def test_an_address_that_zeromq_refuses_is_a_typed_error(url: str) -> None:
    client = RequestClient(url, connect_timeout=CONNECT)
    with pytest.raises(CacheConnectError, match="cannot open a socket to LMCache at"):
        await client.start()
    with pytest.raises(ClosedError):
        await ask(client)


async def test_a_server_that_dies_fails_what_waits_at_once(client: RequestClient, router: Router) -> None:
    calls = [asyncio.create_task(ask(client, deadline=60)) for _ in range(5)]
    for _ in calls:
        await router.receive()
    began = time.monotonic()
    router.stop()
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert time.monotonic() - began < 10
    for error in found:
        assert isinstance(error, CacheConnectError)
        assert "broke during query_prefetch_status" in str(error)
        assert router.url in str(error)


async def test_a_call_just_after_the_server_died_fails_at_once(client: RequestClient, router: Router) -> None:
    await until_up(client)
    router.stop()
    # The loop has not heard of it yet, the socket has.
    time.sleep(0.15)  # noqa: ASYNC251 - the loop is held on purpose
    assert client.is_up
    began = time.monotonic()
    with pytest.raises(CacheConnectError, match="broke during"):
        await ask(client, deadline=60)
    assert time.monotonic() - began < 10


async def test_what_failed_is_not_sent_to_the_next_server(client: RequestClient, router: Router) -> None:
    await until_up(client)
    router.stop()
    time.sleep(0.15)  # noqa: ASYNC251 - the loop is held on purpose
    with pytest.raises(CacheConnectError):
        await ask(client, "before", deadline=60)
    router.open()
    await until_up(client)
    call = asyncio.create_task(ask(client, "after"))
    request = await router.receive()
    assert request.payloads == ["after"]
    await router.reply(request, 5)
    assert await call == 5


async def test_each_connection_is_counted_and_serves(client: RequestClient, router: Router) -> None:
    for number in (1, 2, 3):
        call = asyncio.create_task(ask(client))
        await router.reply(await router.receive(), number)
        assert await call == number
        assert client.connections == number
        router.stop()
        await until_up(client, False)
        router.open()
        await until_up(client)


async def test_a_cancel_at_any_turn_leaves_nothing_waiting(client: RequestClient, router: Router) -> None:
    await until_up(client)
    for turns in range(12):
        task = asyncio.create_task(ask(client, f"{turns}"))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client._waiting == {}
    call = asyncio.create_task(ask(client, "last"))
    while (request := await router.receive()).payloads != ["last"]:
        await router.reply(request, 77)
    await router.reply(request, 5)
    assert await call == 5


async def test_giving_up_touches_only_the_named_operations(client: RequestClient, router: Router) -> None:
    kept = asyncio.create_task(ask(client))
    request = await router.receive()
    given_up = asyncio.create_task(client.call(COMMIT_STORE, "key", 7, b"", deadline=60))
    await router.receive()
    client.give_up(TRANSFERS)
    with pytest.raises(CacheConnectError, match="commit_store"):
        await given_up
    await router.reply(request, 5)
    assert await kept == 5


async def test_closing_fails_what_waits_for_a_reply(client: RequestClient, router: Router) -> None:
    call = asyncio.create_task(ask(client, deadline=60))
    await router.receive()
    await client.aclose()
    with anyio.fail_after(10), pytest.raises(ClosedError, match="query_prefetch_status"):
        await call


async def test_closing_fails_what_waits_for_a_connection() -> None:
    async with connected(f"tcp://127.0.0.1:{free_port()}", connect_timeout=60) as client:
        call = asyncio.create_task(ask(client, deadline=60))
        await asyncio.sleep(0.05)
        await client.aclose()
        with anyio.fail_after(10), pytest.raises(ClosedError):
            await call
        assert not client.is_up


async def test_closing_fails_what_waits_to_be_sent(client: RequestClient, router: Router) -> None:
    await until_up(client)
    router.stop()
    time.sleep(0.15)  # noqa: ASYNC251 - the loop is held on purpose
    call = asyncio.create_task(ask(client, deadline=60))
    await asyncio.sleep(0)
    await client.aclose()
    with anyio.fail_after(10), pytest.raises((ClosedError, CacheConnectError)):
        await call


async def test_closing_twice_is_closing_once(client: RequestClient, router: Router) -> None:
    await until_up(client)
    await asyncio.gather(client.aclose(), client.aclose())
    await client.aclose()
    assert not client.is_up
    with pytest.raises(ClosedError, match=router.url):
        await ask(client)


async def test_a_client_that_was_not_started_says_so() -> None:
    client = RequestClient("tcp://127.0.0.1:1", connect_timeout=CONNECT)
    with pytest.raises(ClosedError):
        await client.call(LOOKUP, "key", 1, deadline=1)
    await client.aclose()


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancel_at_any_turn_of_starting_leaves_what_can_be_closed(router: Router, turns: int) -> None:
    client = RequestClient(router.url, connect_timeout=CONNECT)
    task = asyncio.create_task(client.start())
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    await client.aclose()


async def test_a_dead_network_is_noticed_by_heartbeats(client: RequestClient) -> None:
    # What the socket was told, since waiting for it takes 20 s.
    opened = client._open_socket()
    assert opened.getsockopt(zmq.LINGER) == 0
    assert opened.getsockopt(zmq.IMMEDIATE) == 1
    assert 0 < int(opened.getsockopt(zmq.HEARTBEAT_IVL)) <= 10_000
    assert 0 < int(opened.getsockopt(zmq.HEARTBEAT_TIMEOUT)) <= 30_000
    assert opened.getsockopt(zmq.TCP_KEEPALIVE) == 1


async def test_the_size_of_a_chunk_is_asked_without_payload(client: RequestClient, router: Router) -> None:
    call = asyncio.create_task(client.call(GET_CHUNK_SIZE, deadline=10))
    request = await router.receive()
    assert (request.operation, request.payloads) == (21, [])
    await router.reply(request, 256)
    assert await call == 256
