"""Batches that are cancelled, left or stopped: nothing of them is left over."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

import lmcache_stream as lms

from ..cache.conftest import FAST, GEOMETRY
from ..cancelling import cancelled_at
from ..completions.scripted import Connection, serving
from ..fakes.engine import ScriptedEngine
from ..fakes.lmcache import FakeLMCache
from .conftest import Batch, MakeStream, batch_of, first_half, prompt_of


async def is_settled(server: FakeLMCache, engines: list[ScriptedEngine]) -> None:
    """Assert that no pass is open, and, within the time that background releases take, no lock is held."""
    assert [engine.closed for engine in engines] == [len(engine.requests) for engine in engines]
    deadline = time.monotonic() + 2
    while server.locked != (0, 0) and time.monotonic() < deadline:
        await asyncio.sleep(0.005)
    assert server.locked == (0, 0)


@pytest.mark.parametrize("edit", [lms.keep(range(8)), first_half], ids=["keep", "function"])
async def test_a_cancel_at_any_point_leaves_no_lock_and_no_open_stream(
    make: MakeStream, engines: list[ScriptedEngine], server: FakeLMCache, edit: Any
) -> None:
    cancelled = ended = 0
    ticks = 1
    while ended < 2:
        first = len(engines)
        batch = batch_of([make([1, 0.001, "length"], [7, 0.001, 8, "stop"]) for _ in range(3)], 2)
        task = asyncio.ensure_future(batch.run(edit, {"max_tokens": 5}))
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        try:
            await task
            ended += 1
        except asyncio.CancelledError:
            cancelled += 1
        await is_settled(server, engines)
        # Each stream is as usable as before.
        for engine in engines[first:]:
            engine.scripts = []
        outcomes = await batch.run(edit, {"max_tokens": 1})
        assert [outcome.error for outcome in outcomes] == [None] * 3
        ticks += max(1, ticks // 4)
    assert cancelled >= 10


async def test_a_loop_that_is_left_cancels_the_rest(
    make: MakeStream, engines: list[ScriptedEngine], server: FakeLMCache
) -> None:
    batch = batch_of([make(), make([30.0]), make([1, "length"], [7, 30.0, 8, "stop"])])
    async for outcome in batch.as_completed(first_half, {"max_tokens": 5}):
        assert outcome.stream_id == batch.stream_ids()[0]
        break
    # The loop has let go of the generator, and asyncio closes it in a task of its own.
    async with asyncio.timeout(5):
        while any(engine.closed < len(engine.requests) for engine in engines):
            await asyncio.sleep(0.001)
    await is_settled(server, engines)
    report = batch.get_perf_metrics("run")
    assert (report.streams, report.completed) == (1, 1)


async def test_a_loop_that_is_cancelled_again_and_again_waits_for_what_it_cancels(
    context: lms.AsyncLMCacheContext,
) -> None:
    begun, ended = asyncio.Event(), False

    async def engine(*_: Any) -> AsyncIterator[lms.TokenEvent]:
        nonlocal ended
        begun.set()
        try:
            await asyncio.sleep(30)
            yield lms.TokenEvent(7, "x")
        finally:
            await asyncio.sleep(0.1)
            ended = True

    async def loop() -> None:
        batch = batch_of([lms.create_request(context, engine, prompt_of(0))])
        async with contextlib.aclosing(batch.as_completed(first_half, {"max_tokens": 5})) as outcomes:
            async for _ in outcomes:
                pass

    task = asyncio.ensure_future(loop())
    await begun.wait()
    while not task.done():
        task.cancel()
        await asyncio.sleep(0.01)
    assert task.cancelled()
    assert ended


async def test_a_generator_that_is_closed_waits_for_what_it_cancels(
    make: MakeStream, engines: list[ScriptedEngine], server: FakeLMCache
) -> None:
    batch = batch_of([make(), make([30.0])])
    async with contextlib.aclosing(batch.as_completed(first_half, {"max_tokens": 5})) as outcomes:
        async for _ in outcomes:
            break
    await is_settled(server, engines)
    # The call is over, and its time with it.
    assert batch.get_perf_metrics("run") == batch.get_perf_metrics("run")
    unbegun = batch.as_completed(first_half, {"max_tokens": 5})
    await unbegun.aclose()
    assert len(engines[0].requests) == 2


async def test_a_consumer_that_is_cancelled_cancels_the_batch(
    make: MakeStream, engines: list[ScriptedEngine], server: FakeLMCache
) -> None:
    batch = batch_of([make([30.0]), make([30.0])])

    async def consume() -> None:
        async for _ in batch.as_completed(first_half, {"max_tokens": 5}):
            raise AssertionError("nothing comes")

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(consume(), 0.05)
    await is_settled(server, engines)


async def test_a_consumer_that_is_cancelled_at_any_point_leaves_nothing(
    make: MakeStream, engines: list[ScriptedEngine], server: FakeLMCache
) -> None:
    number = 1
    while True:
        batch = batch_of([make(), make()])

        async def consume(batch: Batch = batch) -> None:
            async with contextlib.aclosing(batch.as_completed(first_half, {"max_tokens": 5})) as outcomes:
                async for _ in outcomes:
                    await asyncio.sleep(0)

        if not await cancelled_at(consume(), number):
            break
        await is_settled(server, engines)
        number += 1
    assert number >= 4


async def test_an_engine_that_goes_down_stops_the_batch_and_keeps_what_there_is(
    make: MakeStream, engines: list[ScriptedEngine], server: FakeLMCache
) -> None:
    down = [lms.EngineConnectError("POST http://engine:8000/v1/completions: refused") for _ in range(9)]
    streams = [
        make(),
        make([1, "length"], *([error] for error in down)),
        make([1, 30.0, "length"]),
        *(make([30.0]) for _ in range(3)),
    ]
    batch = batch_of(streams, 3)
    with pytest.raises(
        lms.BatchStoppedError, match=r"engine is down.*http://engine:8000.*4 attempts"
    ) as caught:
        await batch.run(first_half, {"max_tokens": 5})
    stopped, ids = caught.value, batch.stream_ids()
    assert stopped.party == "engine"
    assert isinstance(stopped.__cause__, lms.EngineConnectError)
    assert [outcome.stream_id for outcome in stopped.outcomes] == list(ids[:2])
    assert stopped.outcomes[0].token_ids == (1, 7, 8)
    assert stopped.outcomes[1].is_outage
    assert stopped.outcomes[1].phases[-1].attempts == 4
    assert stopped.unfinished == ids[2:]
    await is_settled(server, engines)
    assert [outcome.stream_id for outcome in batch.get_perf_metrics("run").outcomes] == list(ids[:2])
    # It can go on with those.
    for engine in engines[2:]:
        engine.scripts = []
    resumed = await batch.run(first_half, {"max_tokens": 1}, stopped.unfinished)
    assert all(outcome.is_ok for outcome in resumed)


async def test_as_completed_raises_when_the_batch_is_stopped(make: MakeStream) -> None:
    down = lms.EngineTimeoutError("no connection within 5 s", connecting=True)
    batch = batch_of([make(), make(*([down] for _ in range(9)))], 1)
    seen = []
    with pytest.raises(lms.BatchStoppedError) as caught:
        async for outcome in batch.as_completed(first_half, {"max_tokens": 5}):
            seen.append(outcome)  # noqa: PERF401 - what came before the error
    assert tuple(seen) == caught.value.outcomes
    assert len(seen) == 2


async def test_a_cache_that_goes_down_stops_the_batch() -> None:
    async with FakeLMCache() as server:
        timeouts = lms.Timeouts(connect=0.1, lookup=0.5, retrieve=0.5, store=0.5)
        async with lms.connect(
            server.url, server.http_url, "model", geometry=GEOMETRY, timeouts=timeouts
        ) as context:
            engine = ScriptedEngine(server, GEOMETRY.kv_shape(1))
            batch = batch_of([lms.create_request(context, engine, prompt_of(n)) for n in range(3)], 1)
            await batch.prefill({})
            await server.stop()
            with pytest.raises(lms.BatchStoppedError, match=f"cache is down.*{server.url}") as caught:
                await batch.modify(first_half)
            assert caught.value.party == "cache"
            assert isinstance(caught.value.__cause__, lms.CacheConnectError)
            (outcome,) = caught.value.outcomes
            assert outcome.phases[-1].attempts == 4
            await server.start()
            report = await batch.prefill({})
            assert report.completed == 3


async def test_a_cache_that_is_away_for_a_moment_is_waited_for() -> None:
    async with FakeLMCache() as server:
        async with lms.connect(
            server.url, server.http_url, "model", geometry=GEOMETRY, timeouts=FAST
        ) as context:
            engine = ScriptedEngine(server, GEOMETRY.kv_shape(1))
            stream = lms.create_request(context, engine, prompt_of(0))
            batch = batch_of([stream])
            calls = 0

            async def edit(kv: Any, tokens: list[int]) -> Any:
                nonlocal calls
                calls += 1
                if calls == 1:
                    raise lms.CacheConnectError("away")
                return first_half(kv, tokens)

            (outcome,) = await batch.run(edit, {"max_tokens": 1})
            assert outcome.is_ok
            assert (outcome.attempts, outcome.retries) == (4, 1)
        assert server.locked == (0, 0)


async def test_a_cancelled_batch_leaves_at_once_and_the_engine_drains(
    context: lms.AsyncLMCacheContext,
) -> None:
    waiting = asyncio.Semaphore(0)
    stayed: list[bool] = []

    async def silent(connection: Connection) -> None:
        await connection.request()
        waiting.release()
        stayed.append(await connection.stays(0.2))
        await connection.lost()

    async with serving(silent) as engine_server:
        engine = lms.VLLMCompletions(engine_server.url, "m", timeouts=lms.CompletionTimeouts(drain=30))
        batch = batch_of([lms.create_request(context, engine, prompt_of(n)) for n in range(4)])
        task = asyncio.ensure_future(batch.run_streams({"max_tokens": 1}))
        for _ in range(4):
            await waiting.acquire()
        started = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        closing = asyncio.ensure_future(engine.aclose())
        await asyncio.sleep(0.3)
        # The batch is over; the connections are held until the engine answers, or a second cancel comes.
        assert stayed == [True] * 4
        assert not closing.done()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert time.monotonic() - started < 5
        await engine_server.finished()


async def test_more_streams_than_aiohttp_s_pool_wait_for_answers_together(
    context: lms.AsyncLMCacheContext,
) -> None:
    connected = 0
    everybody = asyncio.Event()

    async def answer_when_all_are_there(connection: Connection) -> None:
        nonlocal connected
        await connection.request()
        connected += 1
        if connected == 150:
            everybody.set()
        async with asyncio.timeout(30):
            await everybody.wait()
        chunk = b'{"choices": [{"index": 0, "text": "x", "token_ids": [7], "finish_reason": "length"}]}'
        await connection.answer(b"data: " + chunk + b"\n\n", b"data: [DONE]\n\n")

    async with (
        serving(answer_when_all_are_there) as engine_server,
        lms.VLLMCompletions(engine_server.url, "m") as engine,
    ):
        batch = batch_of([lms.create_request(context, engine, prompt_of(n)) for n in range(150)])
        report = await batch.decode({"max_tokens": 1})
        assert (report.completed, report.output_tokens) == (150, 150)
        assert connected == 150
