"""What is tried again, how often, and after how long."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

import lmcache_stream as lms
from lmcache_stream.batch.retries import RetryPolicy, is_connection_error
from lmcache_stream.completions.exchange import Exchange, Request

from ..completions.scripted import Connection, event, serving
from ..fakes.engine import ScriptedEngine
from .conftest import MakeStream, batch_of, first_half, prompt_of

REFUSED = lms.EngineConnectError("refused")


def busy(status: int, retry_after: float | None = None) -> lms.EngineStatusError:
    return lms.EngineStatusError("busy", status=status, detail="", retry_after=retry_after)


@pytest.mark.parametrize(
    ("error", "attempts", "pause"),
    [
        # Half of what the pause is drawn from: 0.5, 1, 2, 4, ... up to 30 s.
        (busy(429), 1, 0.25),
        (busy(503), 2, 0.5),
        (REFUSED, 3, 1.0),
        (lms.CacheConnectError("away"), 4, 2.0),
        (lms.EngineTimeoutError("no connection", connecting=True), 7, 15.0),
        (REFUSED, 9, 15.0),
        # Retry-After is waited for in full.
        (busy(429, 7.0), 1, 7.25),
        (busy(503, 0.0), 1, 0.25),
        (busy(503, 120.0), 1, 120.25),
        (busy(503, 121.0), 1, None),
        # What no engine of ours says, but a caller's may.
        (busy(503, -5.0), 1, 0.25),
        (busy(503, math.nan), 1, 0.25),
        (busy(503, math.inf), 1, None),
        # The last attempt, and what another attempt would not mend.
        (REFUSED, 10, None),
        (busy(500), 1, None),
        (busy(400, 1.0), 1, None),
        (lms.EngineTimeoutError("no token"), 1, None),
        (lms.TruncatedStreamError("cut"), 1, None),
        (lms.CacheTimeoutError("silence"), 1, None),
        (lms.KVNotReadyError("no", found=0, wanted=4), 1, None),
        (lms.CacheLostError("gone"), 1, None),
        (ValueError("of the caller's"), 1, None),
    ],
)
def test_the_pause_before_another_attempt(error: BaseException, attempts: int, pause: float | None) -> None:
    policy = RetryPolicy(max_attempts=10)
    assert policy.pause(error, attempts, lambda: 0.5) == pause


def test_any_number_of_attempts_has_a_pause() -> None:
    """The doubling leaves what a float holds at the 1025th."""
    policy = RetryPolicy(max_attempts=10**6)
    assert [policy.pause(REFUSED, attempts, lambda: 0.5) for attempts in (1024, 1025, 99_999)] == [15.0] * 3


def test_pauses_have_full_jitter() -> None:
    pauses = [RetryPolicy().pause(REFUSED, 2) for _ in range(200)]
    drawn = [pause for pause in pauses if pause is not None]
    assert len(drawn) == 200
    assert 0 <= min(drawn) < 0.1
    assert 0.9 < max(drawn) <= 1.0


def test_a_busy_engine_is_not_down() -> None:
    assert is_connection_error(REFUSED)
    assert not is_connection_error(busy(503))
    assert not is_connection_error(lms.EngineTimeoutError("no token"))


async def test_attempts_are_counted_for_each_phase_and_their_pauses_are_no_latency(
    make: MakeStream, engines: list[ScriptedEngine]
) -> None:
    stream = make([busy(503, 0.4)], [1, "length"], [REFUSED], [REFUSED], [7, 8, "stop"])
    batch = batch_of([stream, make()])
    started = time.perf_counter()
    outcome, other = await batch.run(first_half, {"max_tokens": 5})
    assert time.perf_counter() - started >= 0.4
    assert [phase.attempts for phase in outcome.phases] == [2, 1, 3]
    assert (outcome.attempts, outcome.retries, other.retries) == (6, 3, 0)
    assert outcome.token_ids == (1, 7, 8)
    assert outcome.phases[0].paused >= 0.4
    assert outcome.prefill is not None
    assert outcome.prefill.ttft is not None
    assert outcome.prefill.ttft < 0.4
    assert outcome.phases[0].seconds >= 0.4
    # Every attempt sent the same.
    assert engines[0].requests[0] == engines[0].requests[1]
    assert engines[0].requests[2] == engines[0].requests[3] == engines[0].requests[4]
    assert batch.get_perf_metrics("run").retries == 3


@pytest.mark.parametrize(
    ("scripts", "kind", "requests", "ids"),
    [
        ([[busy(429)]] * 9, lms.EngineStatusError, 4, ()),
        ([[busy(429, 1000.0)]] * 9, lms.EngineStatusError, 1, ()),
        ([[busy(400)]] * 9, lms.EngineStatusError, 1, ()),
        ([[lms.EngineStreamError("odd")]] * 9, lms.EngineStreamError, 1, ()),
        # Behind a token nothing is tried again, whatever the error.
        ([[7, REFUSED]] * 9, lms.EngineConnectError, 1, (7,)),
        ([[7, busy(503)]] * 9, lms.EngineStatusError, 1, (7,)),
    ],
)
async def test_what_stays_an_error_of_its_row(
    make: MakeStream,
    engines: list[ScriptedEngine],
    scripts: list[list[Any]],
    kind: type[Exception],
    requests: int,
    ids: tuple[int, ...],
) -> None:
    batch = batch_of([make(*scripts), make()])
    failed, other = await batch.run_streams({"max_tokens": 1})
    assert type(failed.error) is kind
    assert (failed.attempts, failed.token_ids) == (requests, ids)
    assert len(engines[0].requests) == requests
    assert not failed.is_outage
    assert other.is_ok


async def test_the_number_of_attempts_can_be_set(make: MakeStream, engines: list[ScriptedEngine]) -> None:
    await batch_of([make(*[[busy(429)]] * 9)], max_attempts=7).run_streams({})
    await batch_of([make(*[[busy(429)]] * 9)], max_attempts=1).run_streams({})
    assert [len(engine.requests) for engine in engines] == [7, 1]


async def test_retry_after_of_a_real_answer_is_honoured(context: lms.AsyncLMCacheContext) -> None:
    times: list[float] = []

    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            times.append(time.monotonic())
            if len(times) == 1:
                head = "HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\nretry-after: 1\r\n\r\n"
                await connection.raw(head.encode())
            else:
                await connection.answer(event([7], "x", "length"), b"data: [DONE]\n\n")

    async with serving(script) as server, lms.VLLMCompletions(server.url, "m") as engine:
        (outcome,) = await batch_of([lms.create_request(context, engine, prompt_of(0))]).run_streams({})
    assert outcome.is_ok
    assert (outcome.attempts, outcome.token_ids) == (2, (7,))
    assert 1.0 <= times[1] - times[0] < 3


async def test_a_real_engine_that_is_not_there_is_an_outage(context: lms.AsyncLMCacheContext) -> None:
    async with serving() as server:
        url = server.url
    async with lms.VLLMCompletions(url, "m") as engine:
        batch = batch_of([lms.create_request(context, engine, prompt_of(n)) for n in range(5)])
        with pytest.raises(lms.BatchStoppedError, match=f"engine is down.*{url}") as caught:
            await batch.decode({})
    assert caught.value.outcomes[0].attempts == 4


def test_a_deadline_of_the_connection_is_told_from_others() -> None:
    session: Any = None
    exchange = Exchange(session, Request("http://h/v1/completions", {}, 5.0))
    error = exchange.error(TimeoutError())
    assert isinstance(error, lms.EngineTimeoutError)
    assert error.connecting
