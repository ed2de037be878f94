"""The figure of latencies: which panels it has, which values are in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import lmcache_stream as lms
from lmcache_stream.batch import BatchReport, PhaseOutcome, StreamOutcome
from lmcache_stream.figures import latency_figure
from lmcache_stream.metrics import StreamPerfMetrics


def metrics(arrivals: Sequence[float]) -> StreamPerfMetrics:
    return StreamPerfMetrics.from_arrivals(
        started=0.0,
        ended=arrivals[-1] if arrivals else 1.0,
        arrivals=arrivals,
        input_tokens=10,
        cached_tokens=None,
        finish_reason="stop",
    )


def outcome(*passes: tuple[str, Sequence[float]], error: BaseException | None = None) -> StreamOutcome:
    phases = tuple(
        PhaseOutcome(name=name, began=0.0, seconds=1.0, attempts=1, metrics=metrics(arrivals))
        for name, arrivals in passes
    )
    return StreamOutcome(
        stream_id="s", token_ids=(), text="", error=error, phases=phases, queue_time=0.0, seconds=1.0
    )


OUTCOMES = [
    outcome(("prefill", [5.0]), ("decode", [0.1 * number, 0.1 * number + 0.02, 0.1 * number + 0.05]))
    for number in range(1, 11)
]


def counted(axes: Any) -> float:
    return float(sum(patch.get_height() for patch in axes.patches))


@pytest.mark.parametrize("is_report", [False, True], ids=["outcomes", "report"])
def test_each_panel_has_all_values_of_the_decoding_pass(is_report: bool) -> None:
    broken = outcome(("decode", [9.0]), error=RuntimeError())
    outcomes = [*OUTCOMES, broken]
    figure = latency_figure(BatchReport.of(outcomes, mode="run") if is_report else iter(outcomes))
    titles = {axes.get_title(loc="left"): axes for axes in figure.axes}
    assert list(titles) == ["TTFT, 10 streams", "ITL, 20 gaps", "TPOT, 10 streams", "E2E latency, 10 streams"]
    assert [counted(axes) for axes in figure.axes] == [10, 20, 10, 10]


def test_the_lines_are_the_percentiles_in_the_panels_unit() -> None:
    ttft, itl, *_ = latency_figure(OUTCOMES).axes
    seconds = np.arange(1, 11) / 10
    # p99 is 0.991 s, which is below one second: milliseconds.
    assert ttft.get_xlabel() == "ms"
    drawn = {line.get_label(): float(np.asarray(line.get_xdata())[0]) for line in ttft.lines}
    expected = [*np.percentile(seconds, [50, 90, 99]), seconds.mean()]
    assert list(drawn.values()) == pytest.approx([1000 * value for value in expected])
    assert list(drawn) == ["p50 550 ms", "p90 910 ms", "p99 991 ms", "mean 550 ms"]
    assert itl.get_ylabel() == "gaps"


def test_slow_streams_are_shown_in_seconds() -> None:
    slow = outcome(("decode", [2.0, 4.0]))
    assert {axes.get_xlabel() for axes in latency_figure([slow]).axes} == {"s"}


def test_a_stray_value_is_counted_and_not_shown() -> None:
    gaps = [0.01 * number for number in range(400)]
    ttft, itl, *_ = latency_figure([outcome(("decode", [*gaps, 60.0])), outcome(("decode", gaps))]).axes
    assert itl.get_xlabel() == "ms, 1 beyond the axis"
    assert counted(itl) == 2 * 399
    assert counted(ttft) == 2


def test_a_prefill_alone_has_no_panel_of_gaps() -> None:
    figure = latency_figure([outcome(("prefill", [0.5]))])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["TTFT, 1 stream", "E2E latency, 1 stream"]


@pytest.mark.parametrize("outcomes", [[], [outcome(("decode", []))]], ids=["none", "no token"])
def test_nothing_cannot_be_drawn(outcomes: list[StreamOutcome]) -> None:
    with pytest.raises(lms.InvalidRequestError, match="no stream of the batch came to its end with a token"):
        latency_figure(outcomes)
