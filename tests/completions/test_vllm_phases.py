"""The client where a connection does not come to stand, breaks, or a deadline passes."""

from __future__ import annotations

import asyncio
import errno
import socket
import time
from contextlib import aclosing
from typing import Any

import aiohttp
import pytest

from lmcache_stream.completions import CompletionTimeouts, FinishEvent, TokenEvent, VLLMCompletions
from lmcache_stream.completions.exchange import Exchange, Request
from lmcache_stream.errors import (
    EngineConnectError,
    EngineStatusError,
    EngineTimeoutError,
    TruncatedStreamError,
)

from .scripted import DONE, Connection, Script, event, playing, serving, usage

ANSWER = (event([5], "a"), event([6], "b", "length"), usage(3, 2), DONE)


async def ids_of(engine: VLLMCompletions, into: list[int] | None = None) -> list[int]:
    """Run a pass and return its ids; ``into`` has them even where it raises."""
    ids = [] if into is None else into
    async with aclosing(engine([1, 2, 3], {}, "")) as source:
        async for one in source:
            if isinstance(one, TokenEvent):
                ids.append(one.token_id)
            else:
                assert isinstance(one, FinishEvent)
    return ids


async def test_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        async with VLLMCompletions(url, "m") as engine:
            with pytest.raises(EngineConnectError, match="vllm serve") as caught:
                await ids_of(engine)
    assert f"POST {url}/v1/completions" in str(caught.value)
    assert isinstance(caught.value.__cause__, aiohttp.ClientError)


async def test_a_host_that_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unknown(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", unknown)
    monkeypatch.setenv("no_proxy", "*")
    async with VLLMCompletions("http://no-such-host.example:8000", "m") as engine:
        with pytest.raises(EngineConnectError, match=r"no-such-host.example.*base_url"):
            await ids_of(engine)


async def test_a_connection_that_does_not_come_to_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", never)
    monkeypatch.setenv("no_proxy", "*")
    timeouts = CompletionTimeouts(connect=0.05)
    async with VLLMCompletions("http://slow.example:8000", "m", timeouts=timeouts) as engine:
        with pytest.raises(EngineTimeoutError, match=r"no connection within 0\.05 s") as caught:
            await ids_of(engine)
    assert caught.value.token_ids == ()


@pytest.mark.parametrize("ending", ["close", "reset"])
@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\ncontent-type: te"])
async def test_a_fresh_connection_that_breaks_before_the_answer_is_not_tried_again(
    said: bytes, ending: str
) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.raw(said)
        await asyncio.sleep(0.02)
        connection.reset() if ending == "reset" else connection.close()

    async with serving(script) as server, VLLMCompletions(server.url, "m") as engine:
        with pytest.raises(EngineConnectError, match="before it answered"):
            await ids_of(engine)
        assert server.connections == 1


@pytest.mark.parametrize("ending", ["close", "reset"])
async def test_a_break_between_head_and_body_is_a_truncation(ending: str) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.head()
        await asyncio.sleep(0.02)
        connection.reset() if ending == "reset" else connection.close()

    async with serving(script) as server, VLLMCompletions(server.url, "m") as engine:
        with pytest.raises(TruncatedStreamError, match="after 0 tokens"):
            await ids_of(engine)
        assert server.connections == 1


@pytest.mark.parametrize("ending", ["close", "reset"])
async def test_a_stale_connection_is_replaced_once(ending: str) -> None:
    async def grows_stale(connection: Connection) -> None:
        await connection.request()
        await connection.answer(*ANSWER)
        await connection.request()
        connection.reset() if ending == "reset" else connection.close()

    async with serving(grows_stale, playing(*ANSWER)) as server, VLLMCompletions(server.url, "m") as engine:
        for _ in range(3):
            assert await ids_of(engine) == [5, 6]
        assert server.connections == 2

    async def breaks(connection: Connection) -> None:
        await connection.request()

    async with serving(grows_stale, breaks) as server, VLLMCompletions(server.url, "m") as engine:
        assert await ids_of(engine) == [5, 6]
        with pytest.raises(EngineConnectError):
            await ids_of(engine)
        assert server.connections == 2


@pytest.mark.parametrize("said", [b"HTTP/1.1 200 OK\r\ncontent-ty", b"HTTP/1.1 200 OK\r\n\r\n"])
async def test_a_used_connection_that_has_begun_to_answer_is_not_stale(said: bytes) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.answer(*ANSWER)
        await connection.request()
        await connection.raw(said)

    async with serving(script) as server, VLLMCompletions(server.url, "m") as engine:
        assert await ids_of(engine) == [5, 6]
        with pytest.raises(Exception, match="POST"):
            await ids_of(engine)
        assert server.connections == 1


async def test_what_listens_is_no_http_server() -> None:
    async def zmq(connection: Connection) -> None:
        await connection.raw(b"\xff\0\0\0\0\0\0\0\x01\x7f" + b"\x03\0NULL" + b"\0" * 48)
        await connection.lost()

    async with serving(zmq) as server, VLLMCompletions(server.url, "m") as engine:
        with pytest.raises(EngineConnectError, match="base_url"):
            await ids_of(engine)


async def test_a_redirect_is_not_followed() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.raw(b"HTTP/1.1 307 Moved\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n")
        assert await connection.stays()

    async with serving(script) as server, VLLMCompletions(server.url, "m") as engine:
        with pytest.raises(EngineStatusError, match="/elsewhere") as caught:
            await ids_of(engine)
        assert caught.value.status == 307
        await server.finished()


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.EMFILE, "ulimit -n"), (errno.ECONNREFUSED, "vllm serve")]
)
async def test_advice_for_errors_of_the_system(number: int, advice: str) -> None:
    async with aiohttp.ClientSession() as session:
        exchange = Exchange(session, Request("http://engine/v1/completions", {}, 5))
        key: Any = type("Key", (), {"host": "engine", "port": 80, "ssl": True})()
        error = exchange.error(aiohttp.ClientConnectorError(key, OSError(number, "no")))
    assert isinstance(error, EngineConnectError)
    assert advice in str(error)


def first_token_scripts(gate: asyncio.Event) -> dict[str, Script]:
    async def rest(connection: Connection) -> None:
        await gate.wait()
        await connection.send(*ANSWER)
        await connection.lost()

    async def no_head(connection: Connection) -> None:
        await connection.request()
        assert await connection.stays(0.2)
        await gate.wait()
        await connection.head()
        await rest(connection)

    async def no_body(connection: Connection) -> None:
        await connection.request()
        await connection.head()
        assert await connection.stays(0.2)
        await rest(connection)

    async def comments(connection: Connection) -> None:
        await connection.request()
        await connection.head()
        for _ in range(20):
            await connection.send(b": keep-alive\n\n")
            assert await connection.stays(0.02)
        await rest(connection)

    async def no_ids(connection: Connection) -> None:
        await connection.request()
        await connection.head()
        await connection.send(event([], ""))
        await connection.lost()

    async def half_an_event(connection: Connection) -> None:
        await connection.request()
        await connection.head()
        await connection.send(ANSWER[0][:-1])
        await connection.lost()

    return {
        "no head": no_head,
        "no body": no_body,
        "comments": comments,
        "no ids": no_ids,
        "half an event": half_an_event,
    }


@pytest.mark.parametrize("kind", ["no head", "no body", "comments", "no ids", "half an event"])
async def test_the_first_tokens_deadline(kind: str) -> None:
    """The caller goes at once; the connection stays where the engine has not begun to answer."""
    gate = asyncio.Event()
    timeouts = CompletionTimeouts(first_token=0.1)
    async with (
        serving(first_token_scripts(gate)[kind]) as server,
        VLLMCompletions(server.url, "m", timeouts=timeouts) as engine,
    ):
        began = time.monotonic()
        with pytest.raises(EngineTimeoutError, match=r"no token within 0\.1 s") as caught:
            await ids_of(engine)
        assert time.monotonic() - began > 0.09
        assert caught.value.token_ids == ()
        await asyncio.sleep(0.5 if kind in ("no head", "no body", "comments") else 0)
        gate.set()
        await server.finished()


@pytest.mark.parametrize("between", [None, b": keep-alive\n\n", b"data: half"], ids=str)
async def test_the_deadline_between_two_events(between: bytes | None) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.head()
        await connection.send(event([5], "a"), event([6], "b"))
        while between and await connection.stays(0.02):
            await connection.send(between)
        await connection.lost()

    got: list[int] = []
    timeouts = CompletionTimeouts(idle=0.2)
    async with serving(script) as server, VLLMCompletions(server.url, "m", timeouts=timeouts) as engine:
        with pytest.raises(EngineTimeoutError, match=r"no event for 0\.2 s after 2 tokens") as caught:
            await ids_of(engine, got)
        await server.finished()
    assert got == [5, 6]
    assert caught.value.token_ids == (5, 6)


@pytest.mark.parametrize(("first_token", "idle"), [(30, 0.1), (0.1, 30)])
async def test_each_phase_has_its_own_deadline(first_token: float, idle: float) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.head()
        await connection.send(event([5], "a"))
        await asyncio.sleep(0.3)
        if not await connection.stays(0.05):
            return
        await connection.answer_body(event([6], "b", "length"), usage(3, 2), DONE)

    timeouts = CompletionTimeouts(first_token=first_token, idle=idle)
    async with serving(script) as server, VLLMCompletions(server.url, "m", timeouts=timeouts) as engine:
        if idle < first_token:
            with pytest.raises(EngineTimeoutError, match=r"no event for 0\.1 s after 1 tokens"):
                await ids_of(engine)
        else:
            assert await ids_of(engine) == [5, 6]


async def test_without_a_first_token_deadline_only_events_are_counted_as_idle() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await asyncio.sleep(0.15)
        await connection.head()
        await asyncio.sleep(0.15)
        await connection.answer_body(*ANSWER)

    timeouts = CompletionTimeouts(idle=0.1)
    async with serving(script) as server, VLLMCompletions(server.url, "m", timeouts=timeouts) as engine:
        assert await ids_of(engine) == [5, 6]


async def test_a_long_answer_has_no_deadline_as_a_whole_and_a_slow_caller_none_at_all() -> None:
    number = 10

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.head()
        for one in range(number):
            await connection.send(event([one], "a"))
            await asyncio.sleep(0.04)
        await connection.answer_body(event([99], "", "stop"), usage(3, number + 1), DONE)

    timeouts = CompletionTimeouts(connect=0.1, first_token=0.1, idle=0.1)
    async with serving(script) as server, VLLMCompletions(server.url, "m", timeouts=timeouts) as engine:
        assert await ids_of(engine) == [*range(number), 99]
        ids = []
        async for one in engine([1], {}, ""):
            if isinstance(one, TokenEvent):
                ids.append(one.token_id)
            if len(ids) in (1, 5):
                await asyncio.sleep(0.3)
        assert ids == [*range(number), 99]
