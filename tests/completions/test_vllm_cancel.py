"""Leaving a pass: the caller at once, the connection not before the engine has begun to answer.

Closing it earlier can end the engine for everybody (LMCache#4938). So each test looks at both ends
afterwards, and at what is left on the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import anyio
import pytest

from lmcache_stream.completions import CompletionTimeouts, TokenEvent, VLLMCompletions
from lmcache_stream.errors import ClosedError, EngineTimeoutError

from .scripted import DONE, Connection, event, playing, serving, usage

FIRST = event([5], "a", prompt_token_ids=[1, 2, 3])
ANSWER = (FIRST, event([6], "b", "length"), usage(3, 2), DONE)


@pytest.fixture(autouse=True)
async def no_task_is_left() -> AsyncIterator[None]:
    yield
    await asyncio.sleep(0)
    assert [task for task in asyncio.all_tasks() if "lmcache-stream" in task.get_name()] == []


async def run(engine: VLLMCompletions, reached: asyncio.Event | None = None) -> list[int]:
    ids = []
    async with aclosing(engine([1, 2, 3], {}, "")) as source:
        async for one in source:
            if isinstance(one, TokenEvent):
                ids.append(one.token_id)
                if reached is not None:
                    reached.set()
    return ids


Leave = Callable[[Awaitable[Any], asyncio.Event], Awaitable[None]]


async def by_task_cancel(work: Awaitable[Any], when: asyncio.Event) -> None:
    task = asyncio.ensure_future(work)
    await when.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_asyncio_timeout(work: Awaitable[Any], when: asyncio.Event) -> None:
    async def expire(timeout: asyncio.Timeout) -> None:
        await when.wait()
        timeout.reschedule(asyncio.get_running_loop().time())

    async def limited() -> None:
        async with asyncio.timeout(None) as timeout:
            expiring.append(asyncio.ensure_future(expire(timeout)))
            await work

    expiring: list[asyncio.Future[None]] = []
    with pytest.raises(TimeoutError):
        await limited()
    await expiring[0]


async def by_wait_for(work: Awaitable[Any], when: asyncio.Event) -> None:
    # The deadline is that of a caller who cannot know what the server does.
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(work, 0.2)
    assert when.is_set()


async def by_anyio_scope(work: Awaitable[Any], when: asyncio.Event) -> None:
    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as scope:

            async def cancel() -> None:
                await when.wait()
                scope.cancel()

            group.start_soon(cancel)
            await work
        assert scope.cancelled_caught


async def by_anyio_group(work: Awaitable[Any], when: asyncio.Event) -> None:
    async def worker() -> None:
        await work

    async with anyio.create_task_group() as group:
        group.start_soon(worker)
        await when.wait()
        group.cancel_scope.cancel()


LEAVES = [by_task_cancel, by_asyncio_timeout, by_wait_for, by_anyio_scope, by_anyio_group]


@pytest.mark.parametrize("leave", LEAVES)
@pytest.mark.parametrize("phase", ["request", "head", "comment", "byte"])
async def test_before_the_engine_answers_the_connection_is_held(leave: Leave, phase: str) -> None:
    """``phase`` is what the server has sent when the caller leaves: nothing, and so on."""
    reached, left = asyncio.Event(), asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        if phase != "request":
            await connection.head()
        if phase == "comment":
            await connection.send(b": keep-alive\n\n")
        if phase == "byte":
            await connection.send(FIRST[:1])
        await asyncio.sleep(0.02)
        reached.set()
        if phase == "byte":
            # The engine has begun to answer: the connection is closed without another byte.
            await connection.lost()
            return
        await left.wait()
        assert await connection.stays()
        if phase == "request":
            await connection.head()
            assert await connection.stays()
        await connection.send(b": keep-alive\n\n")
        assert await connection.stays()
        await connection.send(FIRST[:1])
        await connection.lost()

    async with serving(script, playing(*ANSWER)) as server, VLLMCompletions(server.url, "m") as engine:
        # It returns although the server has sent nothing: that is what "at once" means.
        await leave(run(engine), reached)
        left.set()
        await server.finished()
        # The connection was not put back, and the next pass does not notice.
        assert await run(engine) == [5, 6]
        assert server.connections == 2


@pytest.mark.parametrize("leave", LEAVES)
async def test_after_the_first_token_the_connection_is_closed_at_once(leave: Leave) -> None:
    reached = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.head()
        await connection.send(FIRST)
        await connection.lost()

    async with serving(script, playing(*ANSWER)) as server, VLLMCompletions(server.url, "m") as engine:
        await leave(run(engine, reached), reached)
        await server.finished()
        assert await run(engine) == [5, 6]
        assert server.connections == 2


@pytest.mark.parametrize("how", ["aclosing", "aclose", "forgotten"])
async def test_a_caller_that_breaks_off_closes_the_connection(how: str) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.head()
        await connection.send(FIRST)
        await connection.lost()

    async with serving(script) as server, VLLMCompletions(server.url, "m") as engine:
        source = engine([1], {}, "")
        if how == "aclosing":
            async with aclosing(source):
                async for _ in source:
                    break
        else:
            async for _ in source:
                break
            if how == "aclose":
                await source.aclose()
        del source
        await server.finished()


async def test_a_pass_that_was_not_begun_is_not_sent() -> None:
    async with serving(playing(*ANSWER)) as server, VLLMCompletions(server.url, "m") as engine:
        source = engine([1], {}, "")
        await source.aclose()
        await asyncio.sleep(0.02)
        assert server.connections == 0


@pytest.mark.parametrize("begun", [True, False])
async def test_a_caller_that_leaves_while_the_connection_is_made_ends_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, begun: bool
) -> None:
    """Nothing was sent, so that nothing need be waited for."""
    looked_up = asyncio.Event()

    async def never(*_: Any, **__: Any) -> None:
        looked_up.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", never)
    monkeypatch.setenv("no_proxy", "*")
    timeouts = CompletionTimeouts(connect=None, drain=60)
    engine = VLLMCompletions("http://engine.example", "m", timeouts=timeouts)
    if not begun:
        looked_up.set()
    await by_task_cancel(run(engine), looked_up)
    await asyncio.wait_for(engine.aclose(), 5)
    assert not caplog.records


async def test_a_stale_connection_is_not_replaced_for_a_caller_that_has_left() -> None:
    reached, left = asyncio.Event(), asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.answer(*ANSWER)
        await connection.request()
        reached.set()
        await left.wait()

    async with serving(script) as server:
        async with VLLMCompletions(server.url, "m") as engine:
            assert await run(engine) == [5, 6]
            await by_task_cancel(run(engine), reached)
            left.set()
        await server.finished()
        assert server.connections == 1


async def test_a_prompt_that_is_still_being_sent() -> None:
    begun, left = asyncio.Event(), asyncio.Event()
    prompt = list(range(3_000_000, 3_300_000))

    async def script(connection: Connection) -> None:
        begun.set()
        await left.wait()
        assert (await connection.request()).json["prompt"] == prompt
        assert await connection.stays()
        await connection.head()
        await connection.send(FIRST)
        await connection.lost()

    async with serving(script) as server, VLLMCompletions(server.url, "m") as engine:
        source = engine(prompt, {}, "")
        await by_task_cancel(anext(source), begun)
        left.set()
        await server.finished()


async def test_closing_waits_for_the_engines_first_byte(caplog: pytest.LogCaptureFixture) -> None:
    reached, answered = asyncio.Event(), asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        reached.set()
        assert await connection.stays(0.3)
        answered.set()
        await connection.head()
        await connection.send(FIRST)
        await connection.lost()

    async with serving(script) as server, VLLMCompletions(server.url, "m") as engine:
        await by_task_cancel(run(engine), reached)
        await engine.aclose()
        assert answered.is_set()
        await server.finished()
    assert not caplog.records


@pytest.mark.parametrize("drain", [0, 0.1])
@pytest.mark.parametrize("head", [False, True])
async def test_closing_waits_no_longer_than_drain_and_says_so(
    drain: float, head: bool, caplog: pytest.LogCaptureFixture
) -> None:
    reached = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        if head:
            await connection.head()
        await asyncio.sleep(0.02)
        reached.set()
        await connection.lost()

    timeouts = CompletionTimeouts(drain=drain)
    async with serving(script) as server:
        async with VLLMCompletions(server.url, "m", timeouts=timeouts) as engine:
            await by_task_cancel(run(engine), reached)
        await server.finished()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "LMCache#4938" in record.message
    assert server.connections == 1


@pytest.mark.parametrize("leave", LEAVES)
async def test_closing_that_is_cancelled_closes_all_the_same(leave: Leave) -> None:
    """A cancellation of asyncio's own ends the wait; anyio's is held off until ``drain`` is over."""
    reached, closing = asyncio.Event(), asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        reached.set()
        await connection.lost()

    anyios = leave in (by_anyio_scope, by_anyio_group)
    async with serving(script) as server:
        timeouts = CompletionTimeouts(drain=0.3 if anyios else 60)
        engine = VLLMCompletions(server.url, "m", timeouts=timeouts)
        await by_task_cancel(run(engine), reached)
        asyncio.get_running_loop().call_later(0.05, closing.set)
        await asyncio.wait_for(leave(engine.aclose(), closing), 10)
        await server.finished()


async def test_closing_ends_passes_under_way() -> None:
    """Those that stream at once; those that wait for the engine once it has begun to answer."""
    streaming, waiting, gate = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def streams(connection: Connection) -> None:
        await connection.request()
        await connection.head()
        await connection.send(FIRST)
        await connection.lost()

    async def waits(connection: Connection) -> None:
        await connection.request()
        waiting.set()
        await gate.wait()
        assert await connection.stays()
        await connection.head()
        await connection.send(FIRST)
        await connection.lost()

    async with serving(streams, waits) as server:
        engine = VLLMCompletions(server.url, "m")
        one = asyncio.ensure_future(run(engine, streaming))
        await streaming.wait()
        other = asyncio.ensure_future(run(engine))
        await waiting.wait()
        closing = asyncio.ensure_future(engine.aclose())
        with pytest.raises(ClosedError, match="in the middle of a pass, after 1 tokens"):
            await one
        assert not closing.done()
        gate.set()
        with pytest.raises(ClosedError, match="before the engine answered"):
            await other
        await closing
        await server.finished()


@pytest.mark.parametrize("ending", ["close", "reset", "status", "html", "garbage", "end", "error"])
async def test_whatever_the_engine_does_after_the_caller_has_left_is_no_news(
    ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    reached, left = asyncio.Event(), asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        reached.set()
        await left.wait()
        match ending:
            case "close":
                connection.close()
            case "reset":
                connection.reset()
            case "status":
                await connection.reply("503 Busy", b'{"error": {"message": "busy"}}')
                await connection.lost()
            case "html":
                await connection.reply("200 OK", b"<html>", "text/html")
                await connection.lost()
            case "garbage":
                await connection.raw(b"\0\1\2\3 this is no HTTP\r\n\r\n")
                await connection.lost()
            case "end":
                await connection.answer()
                await connection.lost()
            case "error":
                await connection.answer(b'data: {"error": {"message": "no"}}\n\n', DONE)
                await connection.lost()

    async with serving(script) as server:
        async with VLLMCompletions(server.url, "m") as engine:
            await by_task_cancel(run(engine), reached)
            left.set()
            if ending in ("status", "html", "end"):
                # These connections can be used again, and go when the client does.
                await asyncio.sleep(0.1)
        await server.finished()
        assert server.connections == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_pass_whose_deadline_has_passed_is_held_as_well() -> None:
    left = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await left.wait()
        assert await connection.stays()
        await connection.head()
        await connection.send(FIRST)
        await connection.lost()

    timeouts = CompletionTimeouts(first_token=0.05)
    async with serving(script) as server, VLLMCompletions(server.url, "m", timeouts=timeouts) as engine:
        with pytest.raises(EngineTimeoutError):
            await run(engine)
        left.set()
        await server.finished()


async def test_many_at_once() -> None:
    number = 40
    reached, left = asyncio.Semaphore(0), asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        reached.release()
        await left.wait()
        assert await connection.stays()
        await connection.head()
        await connection.send(FIRST)
        await connection.lost()

    async with serving(script) as server, VLLMCompletions(server.url, "m") as engine:
        tasks = [asyncio.ensure_future(run(engine)) for _ in range(number)]
        for _ in range(number):
            await reached.acquire()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        left.set()
        await server.finished()
        assert server.connections == number
