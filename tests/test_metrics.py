"""The figures of a pass against tables computed by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

import lmcache_stream as lms


def figures(arrivals: list[float], *, ended: float = 20.0) -> lms.StreamPerfMetrics:
    return lms.StreamPerfMetrics.from_arrivals(
        started=10.0,
        ended=ended,
        arrivals=arrivals,
        input_tokens=100,
        cached_tokens=64,
        finish_reason="stop",
    )


@pytest.mark.parametrize(
    ("arrivals", "ttft", "tpot", "itl"),
    [
        ([], None, None, ()),
        ([11.0], 1.0, None, ()),
        ([11.0, 13.0], 1.0, 2.0, (2.0,)),
        # Events with 1, 4 and 3 ids: two gaps, and eight tokens, so that TPOT divides by seven.
        ([11.0, *[12.0] * 4, *[18.0] * 3], 1.0, 1.0, (1.0, 6.0)),
        ([11.0] * 5, 1.0, 0.0, ()),
    ],
)
def test_latencies_are_vllm_s(
    arrivals: list[float], ttft: float | None, tpot: float | None, itl: tuple[float, ...]
) -> None:
    metrics = figures(arrivals)
    assert (metrics.ttft, metrics.tpot, metrics.itl) == (ttft, tpot, itl)
    assert metrics.e2e_latency == (arrivals[-1] - 10.0 if arrivals else None)
    assert metrics.output_tokens == len(arrivals)
    assert metrics.output_tput == len(arrivals) / 10.0
    assert (metrics.duration, metrics.input_tput) == (10.0, 10.0)


def test_a_long_pass_and_a_long_edit_are_shown_in_a_line() -> None:
    assert len(repr(figures([11.0 + 0.1 * index for index in range(5000)]))) < 400
    report = lms.EditReport(
        tokens_before=9000,
        tokens_after=5000,
        recomputed_tokens=0,
        bytes_before=1,
        bytes_after=1,
        cache_salt="~",
        seconds=0.1,
        kept_indices=tuple(range(5000)),
    )
    assert len(repr(report)) < 400


def test_a_pass_of_no_duration_has_no_throughput() -> None:
    metrics = figures([], ended=10.0)
    assert (metrics.input_tput, metrics.output_tput) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("values", "mean", "p50", "p90", "p99"),
    [
        ([5.0], 5.0, 5.0, 5.0, 5.0),
        ([3.0, 1.0], 2.0, 2.0, 2.8, 2.98),
        (list(range(101)), 50.0, 50.0, 90.0, 99.0),
        # Equal to numpy.percentile([4, 1, 9, 2], [50, 90, 99]).
        ([4.0, 1.0, 9.0, 2.0], 4.0, 3.0, 7.5, 8.85),
    ],
)
def test_percentiles_interpolate_linearly(
    values: list[float], mean: float, p50: float, p90: float, p99: float
) -> None:
    spread = lms.Distribution.of(values)
    assert spread is not None
    assert spread.count == len(values)
    assert (spread.mean, spread.p50, spread.p90, spread.p99) == pytest.approx((mean, p50, p90, p99))


def test_no_values_have_no_distribution() -> None:
    assert lms.Distribution.of([]) is None


async def test_a_stream_measures_by_the_events_arrival() -> None:
    async def post(*_: Any) -> AsyncIterator[lms.TokenEvent | lms.FinishEvent]:
        for token, arrived in ((1, 100.5), (2, 101.0), (3, 101.0), (4, 104.0)):
            yield lms.TokenEvent(token, arrived=arrived)
        yield lms.FinishEvent("length", cached_tokens=3)

    from lmcache_stream._state import StreamState
    from lmcache_stream._turns import Turns

    no_cache: Any = None
    state = StreamState([7, 8, 9, 10], "")
    generation = lms.Generation(no_cache, post, state, {}, [], Turns())
    async with generation:
        async for _ in generation:
            pass
    metrics = generation.metrics
    assert metrics.itl == (0.5, 3.0)
    assert metrics.tpot == pytest.approx(3.5 / 3)
    assert (metrics.input_tokens, metrics.output_tokens, metrics.cached_tokens) == (4, 4, 3)
    assert metrics.finish_reason == "length"
