"""How the figures of runs spread, as one histogram a figure on an axis that all runs share; pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..metrics import Distribution
from .rows import Metrics, Row
from .runs import Run

__all__ = ["BINS", "Chart", "Series", "charts_of"]

BINS = 40


@dataclass(frozen=True, slots=True)
class Series:
    """One run's part of a chart.

    Attributes:
        run: position of the run; None for the baselines of all runs, answered from the whole KV.
        distribution: of all values.
        counts: how many values lie in each of the bins.
        above: how many lie beyond the last one.
    """

    run: int | None
    distribution: Distribution
    counts: tuple[int, ...]
    above: int


@dataclass(frozen=True, slots=True)
class Chart:
    """How one figure spreads in each run.

    Attributes:
        name: the figure's key.
        title: its name.
        about: what it is, in a sentence.
        unit: ``s`` or ``tokens/s``.
        counted: what is counted, in the plural.
        low: where the first bin begins.
        high: where the last one ends.
        series: those that have values.
    """

    name: str
    title: str
    about: str
    unit: str
    counted: str
    low: float
    high: float
    series: tuple[Series, ...]


def _timed(name: str) -> Callable[[Metrics], Iterable[float | None]]:
    return lambda metrics: (getattr(metrics, name),)


def _throughput(metrics: Metrics) -> Iterable[float | None]:
    if metrics.output_tokens and metrics.e2e_latency:
        throughput = metrics.output_tokens / metrics.e2e_latency
        # Of a time that no clock tells, a float does not hold it.
        yield throughput if math.isfinite(throughput) else None


_Figure = tuple[str, str, str, str, str, Callable[[Metrics], Iterable[float | None]]]
_FIGURES: tuple[_Figure, ...] = (
    ("ttft", "Time to first token (TTFT)", "From the decoding request to its first token.",
     "s", "rows", _timed("ttft")),
    ("itl", "Inter-token latency (ITL)", "Each gap between two events that carried tokens.",
     "s", "gaps", lambda metrics: metrics.itl or ()),
    ("tpot", "Time per output token (TPOT)", "A row's mean time per token behind its first one.",
     "s", "rows", _timed("tpot")),
    ("e2e_latency", "End-to-end latency (E2E)", "From the decoding request to its last token.",
     "s", "rows", _timed("e2e_latency")),
    ("throughput", "Output tokens per second", "A row's output tokens by its E2E latency.",
     "tokens/s", "rows", _throughput),
    ("prefill_ttft", "TTFT of the prefill", "From the request on the whole prompt to its first token.",
     "s", "rows", _timed("prefill_ttft")),
    ("edit_time", "Edit", "From the edit's call to the cache's confirmation.",
     "s", "rows", _timed("edit_time")),
    ("queue_time", "Waiting in the client", "For a row's turn and for memory.",
     "s", "rows", _timed("queue_time")),
)  # fmt: skip


def charts_of(runs: Sequence[Run]) -> tuple[Chart, ...]:
    """Return a chart for each figure that some row has; rows that failed are in none."""
    charts = []
    for name, title, about, unit, counted, values in _FIGURES:
        found: dict[int | None, list[float]] = {
            number: list(_values(run.good, values)) for number, run in enumerate(runs)
        }
        if name == "ttft":
            found[None] = [one for run in runs for one in _baseline_ttft(run.good)]
        found = {number: group for number, group in found.items() if group}
        if found:
            low, high = _range(list(found.values()))
            series = tuple(_series(number, group, low, high) for number, group in found.items())
            charts.append(Chart(name, title, about, unit, counted, low, high, series))
    return tuple(charts)


def _values(rows: Iterable[Row], of: Callable[[Metrics], Iterable[float | None]]) -> Iterator[float]:
    for row in rows:
        if row.metrics:
            yield from (value for value in of(row.metrics) if value is not None)


def _baseline_ttft(rows: Iterable[Row]) -> Iterator[float]:
    return (row.baseline.ttft for row in rows if row.baseline and row.baseline.ttft is not None)


def _range(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the axis: from 0 where that wastes little of it, to just above the highest p99, so that one
    stray value does not press all others into one bin."""
    low = min(map(min, groups))
    spreads = [spread for group in groups if (spread := Distribution.of(group))]
    high = max(spread.p99 for spread in spreads)
    high = min(max(map(max, groups)), high + 0.18 * (high - min(low, 0.0)))
    low = min(low, 0.0) if low < high / 2 else low
    if high - low <= 1e-9 * max(abs(high), abs(low)):
        half = abs(high) / 2 or 0.5
        low, high = high - half, high + half
    return low, high


def _series(run: int | None, values: Sequence[float], low: float, high: float) -> Series:
    spread = Distribution.of(values)
    assert spread is not None
    counts = [0] * BINS
    above = 0
    for value in values:
        if value > high:
            above += 1
        else:
            counts[min(BINS - 1, int((value - low) / (high - low) * BINS))] += 1
    return Series(run, spread, tuple(counts), above)
