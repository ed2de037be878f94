"""The batch: one outcome a stream, in order, each stream at its own pace."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import resource
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

import lmcache_stream as lms

from ..fakes.engine import ScriptedEngine
from .conftest import BYTES, Batch, MakeStream, batch_of, first_half, number_of, prompt_of


async def test_run_takes_each_stream_through_prefill_edit_and_decoding(
    make: MakeStream, engines: list[ScriptedEngine]
) -> None:
    streams = [make(), make([2, "length"], [9, "length"])]
    batch = batch_of(streams)
    first, second = await batch.run(first_half, {"max_tokens": 5, "min_tokens": 2})
    assert (first.stream_id, second.stream_id) == batch.stream_ids()
    assert (first.token_ids, first.text) == ((1, 7, 8), "<1><7><8>")
    assert second.token_ids == (2, 9)
    for number, outcome in enumerate((first, second)):
        assert outcome.is_ok
        assert [phase.name for phase in outcome.phases] == ["prefill", "edit", "decode"]
        assert (outcome.attempts, outcome.retries, outcome.failed_phase) == (3, 0, None)
        assert outcome.prefill is not None
        assert outcome.prefill.input_tokens == 18
        assert outcome.edit == streams[number].edits[-1]
        assert outcome.decode is not None
        assert outcome.decode.cached_tokens == 8
        prompt = prompt_of(number)
        (sent, params, salt), (edited, decoding, fork) = engines[number].requests
        assert (sent, params, salt) == (prompt, {"max_tokens": 1, "min_tokens": 1}, "")
        assert edited == [*prompt[:8], *prompt[16:], outcome.token_ids[0]]
        assert decoding == {"max_tokens": 5, "min_tokens": 2}
        assert fork == streams[number].cache_salt
    times = [(phase.began, phase.began + phase.seconds) for phase in first.phases]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(times))
    assert 0 < sum(phase.seconds for phase in first.phases) <= first.seconds


async def test_no_stream_waits_for_another(make: MakeStream, engines: list[ScriptedEngine]) -> None:
    make()
    slow = make()
    decoded = asyncio.Event()

    async def fast(*arguments: Any) -> AsyncIterator[lms.TokenEvent | lms.FinishEvent]:
        async for event in engines[0](*arguments):
            yield event
        if len(engines[0].requests) == 2:
            decoded.set()

    async def held_back(*arguments: Any) -> AsyncIterator[lms.TokenEvent | lms.FinishEvent]:
        await asyncio.wait_for(decoded.wait(), 5)
        async for event in engines[1](*arguments):
            yield event

    fast_stream = lms.create_request(slow._context, fast, prompt_of(0))
    slow_stream = lms.create_request(slow._context, held_back, prompt_of(1))
    batch = batch_of([slow_stream, fast_stream])
    order = [outcome.stream_id async for outcome in batch.as_completed(first_half, {"max_tokens": 5})]
    # As they come here; in the order of adding everywhere else.
    assert order == [fast_stream.stream_id(), slow_stream.stream_id()]
    report = batch.get_perf_metrics("run")
    assert [outcome.stream_id for outcome in report.outcomes] == [*batch.stream_ids()]
    assert (report.completed, report.failed) == (2, 0)


async def test_a_stream_that_fails_takes_nothing_from_the_others(make: MakeStream) -> None:
    refusal = lms.EngineStatusError("no", status=400, detail="no")
    streams = [
        make([refusal]),
        make(),
        make([1, "length"], [7, lms.TruncatedStreamError("cut", token_ids=[7])]),
        *(make() for _ in range(6)),
    ]

    def edit(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
        if number_of(tokens) == 1:
            raise ZeroDivisionError("of this row")
        return first_half(kv, tokens)

    batch = batch_of(streams)
    outcomes = await batch.run(edit, {"max_tokens": 5})
    assert tuple(outcome.stream_id for outcome in outcomes) == batch.stream_ids()
    assert [type(outcome.error) for outcome in outcomes[:3]] == [
        lms.EngineStatusError,
        ZeroDivisionError,
        lms.TruncatedStreamError,
    ]
    assert [outcome.failed_phase for outcome in outcomes[:3]] == ["prefill", "edit", "decode"]
    assert [outcome.token_ids for outcome in outcomes[:3]] == [(), (1,), (1, 7)]
    assert [outcome.attempts for outcome in outcomes[:3]] == [1, 2, 3]
    assert all(outcome.token_ids == (1, 7, 8) for outcome in outcomes[3:])
    assert "of this row" in outcomes[1].traceback
    assert "in edit" in outcomes[1].traceback
    assert streams[1].edits == ()
    report = batch.get_perf_metrics("run")
    assert (report.completed, report.failed) == (6, 3)
    assert report.failures == {"EngineStatusError": 1, "ZeroDivisionError": 1, "TruncatedStreamError": 1}
    # The failed ones' prefills and edits, which came to their ends, are in no other figure.
    assert (report.input_tokens, report.output_tokens) == (6 * (18 + 11), 6 * 3)
    assert report.kv_bytes_before == 6 * BYTES
    assert report.prefill_ttft is not None
    assert report.prefill_ttft.count == 6


@pytest.mark.parametrize("how", ["alone", "with a cause", "with a context", "in a group"])
async def test_a_failed_edit_keeps_no_kv_in_memory(make: MakeStream, how: str) -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def break_down(kv: torch.Tensor) -> None:
        raise ValueError(f"within {kv.shape}")

    def edit(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
        seen.append(weakref.ref(kv))
        if how == "alone":
            raise RuntimeError("fails")
        errors: list[Exception] = []
        try:
            break_down(kv)
        except ValueError as error:
            if how == "with a context":
                raise RuntimeError("fails")  # noqa: B904 - the context is what is looked at
            if how == "with a cause":
                raise RuntimeError("fails") from error
            errors.append(error)
        raise ExceptionGroup("fails", errors)

    batch = batch_of([make(), make()])
    outcomes = await batch.run(edit, {"max_tokens": 5})
    assert [str(outcome.error)[:5] for outcome in outcomes] == ["fails", "fails"]
    gc.collect()
    assert [each() for each in seen] == [None, None]


async def test_one_phase_at_a_time_with_a_report_of_each(
    make: MakeStream, engines: list[ScriptedEngine]
) -> None:
    batch = batch_of([make() for _ in range(3)])
    prefilled = await batch.prefill({"temperature": 0})
    assert (prefilled.mode, prefilled.completed, prefilled.input_tokens) == ("prefill", 3, 54)
    assert [engine.requests[0][1] for engine in engines] == [{"temperature": 0, "max_tokens": 1}] * 3
    edited = await batch.modify(lms.keep(range(8)))
    assert (edited.mode, edited.kv_bytes_before, edited.kv_bytes_after) == (
        "modify",
        3 * BYTES,
        3 * BYTES // 2,
    )
    decoded = await batch.decode({"max_tokens": 5})
    assert (decoded.mode, decoded.output_tokens, decoded.cached_tokens) == ("decode", 6, 24)
    assert [(outcome.token_ids, outcome.text) for outcome in decoded.outcomes] == [((7, 8), "<7><8>")] * 3
    # A report can be had again, also of some of the streams.
    assert batch.get_perf_metrics(mode="prefill") == prefilled
    last = batch.stream_ids()[2]
    part = batch.get_perf_metrics("decode", [last])
    assert (part.streams, part.output_tokens) == (1, 2)
    assert part.outcomes == decoded.outcomes[2:]


async def test_some_of_the_streams_in_the_order_of_adding(
    make: MakeStream, engines: list[ScriptedEngine]
) -> None:
    streams = [make() for _ in range(3)]
    batch = batch_of(streams)
    first, _, last = batch.stream_ids()
    outcomes = await batch.run_streams({"max_tokens": 1}, [last, first])
    assert [outcome.stream_id for outcome in outcomes] == [first, last]
    assert [len(engine.requests) for engine in engines] == [1, 0, 1]
    (edited,) = await batch.modify_stream(first_half, [last], timeout=5, poll_interval=0.01)
    assert edited.edit == streams[2].edits[-1]
    assert [len(stream.edits) for stream in streams] == [0, 0, 1]
    assert await batch.run_streams({}, []) == []
    assert await Batch().run(first_half, {}) == []
    assert len(batch) == 3
    assert batch.get_stream(last) is streams[2]


async def test_what_cannot_be_right_is_refused_before_anything_is_sent(
    make: MakeStream, engines: list[ScriptedEngine]
) -> None:
    stream = make()
    batch = batch_of([stream])
    twice, params = [stream.stream_id()] * 2, {"max_tokens": 1}
    wrong: Any = 5
    odd_ids: list[Any] = [iter(twice), [5, []], [[]]]
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: batch.add(stream), "already"),
        (lambda: batch.add(wrong), "AsyncLMCacheStream"),
        (lambda: batch.get_stream("x"), "no stream 'x'"),
        (lambda: batch.get_perf_metrics("decode"), "nothing to report"),
        (lambda: batch.get_perf_metrics(wrong), "mode=5"),
        (lambda: batch.as_completed(wrong, {}), "modify_kv takes"),
        (lambda: Batch(0), "max_concurrency"),
        (lambda: Batch(max_attempts=True), "max_attempts"),
        (lambda: Batch(max_edit_bytes=0), "max_edit_bytes"),
    ]
    for call, reason in refused:
        with pytest.raises(lms.InvalidRequestError, match=reason):
            call()
    awaited = [
        (batch.run_streams(params, ["x"]), "no stream 'x'"),
        (batch.run_streams(params, "x"), "not one id"),
        (batch.run_streams(params, twice), "twice"),
        (batch.run_streams(params, odd_ids[0]), "twice"),
        (batch.run_streams(params, wrong), "a sequence of ids: 'int'"),
        (batch.run_streams(params, odd_ids[1]), "no stream 5"),
        (batch.run_streams(params, odd_ids[2]), "a sequence of ids: unhashable"),
        (batch.run_streams(wrong), "mapping"),
        (batch.prefill(params, ["x"]), "no stream 'x'"),
        (batch.modify_stream(wrong), "modify_kv takes"),
        (batch.modify_stream(first_half, timeout=-1), "timeout"),
        (batch.modify(first_half, poll_interval=0), "poll_interval"),
        (batch.run(first_half, wrong), "mapping"),
        (batch.run(first_half, {}, queries=lambda kv, tokens: kv), "queries="),
    ]
    for coroutine, reason in awaited:
        with pytest.raises(lms.InvalidRequestError, match=reason):
            await coroutine
    assert engines[0].requests == []


class Counting:
    """Counts the passes that run at once."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def __call__(self, *_: Any) -> AsyncIterator[lms.TokenEvent | lms.FinishEvent]:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.01)
        self.now -= 1
        yield lms.TokenEvent(1)
        yield lms.FinishEvent("length")


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (3, 3), (20, 8), (None, 8)])
async def test_no_more_run_at_once_than_may(
    context: lms.AsyncLMCacheContext, limit: int | None, most: int
) -> None:
    engine = Counting()
    batch = batch_of([lms.create_request(context, engine, prompt_of(n)) for n in range(8)], limit)
    outcomes = await batch.run_streams({"max_tokens": 1})
    assert all(outcome.is_ok for outcome in outcomes)
    assert engine.most == most
    if limit == 1:
        queued = [outcome.queue_time for outcome in outcomes]
        assert queued == sorted(queued)
        assert queued[-1] >= 0.07


async def test_file_descriptors_are_the_limit_where_none_is_given(
    context: lms.AsyncLMCacheContext, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Counting()
    batch = batch_of([lms.create_request(context, engine, prompt_of(n)) for n in range(8)])
    in_use = len(os.listdir("/proc/self/fd")) - 1  # noqa: PTH208 - nothing that blocks
    for free, most in ((8, 4), (1, 1), (-5, 1)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=in_use + free: (soft, soft))
        engine.most = 0
        with caplog.at_level(logging.WARNING):
            report = await batch.decode({"max_tokens": 1})
        assert engine.most == most
        assert report.configuration["max_concurrency"] == most
        assert f"{most} of 8 streams run at once" in caplog.text


async def test_edits_share_the_memory_that_they_may_take(
    make: MakeStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = [make() for _ in range(6)]
    now, most = 0, 0

    async def edit(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.02)
        now -= 1
        return first_half(kv, tokens)

    # Two prefixes fit; then none does, so that each is edited alone.
    for limit, wanted in ((2 * BYTES + 1, 2), (1, 1)):
        most = 0
        batch = batch_of(streams, max_edit_bytes=limit)
        await batch.prefill({})
        report = await batch.modify(edit)
        assert report.completed == 6
        assert most == wanted
        assert report.queue_time is not None
        assert max(outcome.queue_time for outcome in report.outcomes) >= 0.02


async def test_a_stream_says_how_much_an_edit_of_it_takes(make: MakeStream) -> None:
    stream = make()
    assert stream.prefix_bytes == BYTES
    await stream.generate({"max_tokens": 1})
    await stream.modify_kv(first_half)
    assert stream.prefix_bytes == BYTES // 2
    await stream.generate({"max_tokens": 2})
    # Of the prompt that was sent, 8 edited tokens and 3 behind them, two chunks are whole.
    assert stream.prefix_bytes == BYTES // 2


async def test_a_cancellation_that_nobody_asked_for_is_an_error_of_its_row(make: MakeStream) -> None:
    async def edit(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
        if number_of(tokens) == 0:
            raise asyncio.CancelledError
        return first_half(kv, tokens)

    outcomes = await batch_of([make(), make()], 1).run(edit, {"max_tokens": 5})
    assert isinstance(outcomes[0].error, asyncio.CancelledError)
    assert outcomes[1].token_ids == (1, 7, 8)


class PanicException(BaseException):
    """What a library of Rust raises where it fails: no ``Exception``."""


@pytest.mark.parametrize("in_thread", [True, False])
async def test_a_panic_of_an_edit_is_an_error_of_its_row(make: MakeStream, in_thread: bool) -> None:
    def edit(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
        if number_of(tokens) == 0:
            raise PanicException("index out of bounds")
        return first_half(kv, tokens)

    async def on_the_loop(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
        return edit(kv, tokens)

    batch = batch_of([make(), make()])
    outcomes = await batch.run(edit if in_thread else on_the_loop, {"max_tokens": 5})
    assert isinstance(outcomes[0].error, PanicException)
    assert "in edit" in outcomes[0].traceback
    assert outcomes[1].token_ids == (1, 7, 8)


async def test_ids_can_come_from_anything_that_has_them(make: MakeStream) -> None:
    batch = batch_of([make(), make(), make()])
    ids = batch.stream_ids()
    for some in (iter(ids[1:]), set(ids[1:]), dict.fromkeys(ids[1:])):
        given: Any = some
        outcomes = await batch.run_streams({"max_tokens": 1}, given)
        assert [outcome.stream_id for outcome in outcomes] == list(ids[1:])
