"""A report in some lines of text; pure."""

from __future__ import annotations

from ..batch.tables import Table
from ..metrics import Distribution
from .runs import Comparison, Run
from .statistics import Chart, charts_of

__all__ = ["summary_tables"]

_MILLISECONDS = 1e3


def summary_tables(comparison: Comparison) -> list[Table]:
    """Return a table of all runs, and one of latencies for each of them."""
    tables = [_overview(comparison.runs)]
    charts = charts_of(comparison.runs)
    for number, run in enumerate(comparison.runs):
        rows = tuple(row for chart in charts for row in _latencies(chart, number))
        if rows:
            name = f"ms, {run.label}" if len(comparison.runs) > 1 else "ms"
            tables.append(Table(name, ("count", "mean", "p50", "p90", "p99"), rows))
    return tables


def _overview(runs: tuple[Run, ...]) -> Table:
    columns = ("rows", "failed", "retried", "as baseline", "KV kept", "output tokens")
    return Table("Run", columns, tuple((run.label, *_counts(run)) for run in runs))


def _counts(run: Run) -> tuple[str, ...]:
    totals = run.totals
    before, compared = totals["tokens_before"], totals["compared"]
    return (
        f"{totals['rows']:,}",
        f"{totals['failed']:,}",
        f"{totals['retried']:,}",
        f"{totals['same']:,} of {compared:,}" if compared else "-",
        f"{totals['tokens_after'] / before:.1%}" if before else "-",
        f"{totals['output_tokens']:,}",
    )


def _latencies(chart: Chart, number: int) -> list[tuple[str, ...]]:
    if chart.unit != "s":
        return []
    return [
        (
            chart.title,
            f"{series.distribution.count:,}",
            *(f"{_MILLISECONDS * value:,.2f}" for value in _spread(series.distribution)),
        )
        for series in chart.series
        if series.run == number
    ]


def _spread(one: Distribution) -> tuple[float, ...]:
    return one.mean, one.p50, one.p90, one.p99
