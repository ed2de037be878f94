"""A report in some lines of text; pure."""

from __future__ import annotations

from collections.abc import Sequence

from ..batch.tables import Table
from ..metrics import Distribution
from .runs import Comparison, Run
from .statistics import Chart, charts_of

__all__ = ["summary_tables"]


def summary_tables(comparison: Comparison) -> list[Table]:
    """Return a table of all runs, and one of latencies for each of them."""
    tables = [_overview(comparison.runs)]
    charts = charts_of(comparison.runs)
    for number, run in enumerate(comparison.runs):
        name = f"ms, {run.label}" if len(comparison.runs) > 1 else "ms"
        table = Table.of_latencies(name, _latencies(charts, number))
        if table.rows:
            tables.append(table)
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


def _latencies(charts: Sequence[Chart], number: int) -> dict[str, Distribution]:
    return {
        chart.title: series.distribution
        for chart in charts
        for series in chart.series
        if chart.unit == "s" and series.run == number
    }
