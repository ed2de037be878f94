"""Histograms and percentiles of runs, against numpy."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from lmcache_stream.report import compare
from lmcache_stream.report.statistics import BINS, Chart, charts_of

from .making import failed_row, night, row
from .test_runs import job


def charts(*jobs: list[dict[str, Any]]) -> dict[str, Chart]:
    found = compare([job(f"{number}.jsonl", *rows) for number, rows in enumerate(jobs)])
    return {chart.name: chart for chart in charts_of(found.runs)}


def timed(values: list[float], **changes: Any) -> list[dict[str, Any]]:
    return [
        row(number, metrics={"ttft": value}, baseline=None, **changes) for number, value in enumerate(values)
    ]


def test_the_figures_are_numpys() -> None:
    rows = night(120)
    found = charts(rows)
    good = [each for each in rows if not each["error"]]
    assert 0 < len(good) < 120
    metrics = [each["metrics"] for each in good]
    expected = {
        "ttft": [one["ttft"] for one in metrics],
        "itl": [gap for one in metrics for gap in one["itl"]],
        "tpot": [one["tpot"] for one in metrics],
        "e2e_latency": [one["e2e_latency"] for one in metrics],
        "throughput": [one["output_tokens"] / one["e2e_latency"] for one in metrics],
        "prefill_ttft": [one["prefill_ttft"] for one in metrics],
        "edit_time": [one["edit_time"] for one in metrics],
        "queue_time": [one["queue_time"] for one in metrics],
    }
    assert list(found) == list(expected)
    for name, values in expected.items():
        chart = found[name]
        series = chart.series[0]
        spread = series.distribution
        assert spread.count == len(values)
        assert [spread.mean, spread.p50, spread.p90, spread.p99] == pytest.approx(
            [np.mean(values), *np.percentile(values, [50, 90, 99])]
        )
        counts, _ = np.histogram(values, bins=BINS, range=(chart.low, chart.high))
        # A value at the border of two bins may lie in either.
        assert np.abs(np.cumsum(counts) - np.cumsum(series.counts)).max() <= 1
        assert sum(series.counts) + series.above == len(values)


def test_baselines_of_all_runs_are_one_series_of_ttft() -> None:
    first = [row("a"), failed_row("b", baseline={"text": "", "ttft": 9.0})]
    second = [
        row("a", policy="P()", baseline={"text": "", "ttft": 0.4}),
        row("c", policy="P()", baseline=None),
    ]
    found = charts(first, second)
    assert [(one.run, one.distribution.count) for one in found["ttft"].series] == [(0, 1), (1, 2), (None, 2)]
    assert found["ttft"].series[2].distribution.mean == pytest.approx(0.3)
    assert [one.run for one in found["tpot"].series] == [0, 1]


def test_what_no_row_has_is_no_chart() -> None:
    found = charts([row("a", kv=None, baseline=None, metrics={"ttft": 0.1, "edit_time": None})])
    assert list(found) == ["ttft"]
    assert charts([failed_row("a")]) == {}


def test_a_stray_value_does_not_press_the_others_into_one_bin() -> None:
    values = [random.Random(number).uniform(0.1, 0.2) for number in range(300)]
    (chart,) = charts(timed([*values, 60.0])).values()
    (series,) = chart.series
    assert chart.high < 0.3
    assert series.above == 1
    assert sum(number > 0 for number in series.counts) > 10
    assert series.distribution.count == 301


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ([0.5], 0.25, 0.75),
        ([0.0], -0.5, 0.5),
        ([0.0, 0.0], -0.5, 0.5),
        ([1.0, 4.0], 0.0, 4.0),
        ([10.0, 11.0], 10.0, 11.0),
    ],
)
def test_the_axis_holds_all_values(values: list[float], low: float, high: float) -> None:
    (chart,) = charts(timed(values)).values()
    assert [chart.low, chart.high] == pytest.approx([low, high])
    assert sum(chart.series[0].counts) == len(values)


def test_runs_share_their_axis() -> None:
    slow = timed([1.0, 2.0, 3.0], policy="P()")
    (chart,) = charts(timed([0.1, 0.2]), slow).values()
    assert (chart.low, chart.high) == (0.0, 3.0)
    assert [sum(series.counts) for series in chart.series] == [2, 3]
    assert max(place for place, number in enumerate(chart.series[0].counts) if number) < BINS / 10
