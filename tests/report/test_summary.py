"""A report in lines of text."""

from __future__ import annotations

from lmcache_stream.report import compare
from lmcache_stream.report.summary import summary_tables

from .making import SNAPKV, row
from .test_runs import job


def test_the_tables_say_what_was_kept_and_how_times_spread() -> None:
    kv = {"tokens_before": 40, "tokens_after": 10}
    gaps = [0.001 * number for number in range(1, 1102)]
    one = job("a", row("x", kv=kv, metrics={"itl": gaps, "ttft": 0.25}))
    other = job("b", row("x", policy="P()", kv=None, baseline=None, metrics=None))
    runs, latencies = summary_tables(compare([one, other]))
    assert runs.columns == ("rows", "failed", "retried", "as baseline", "KV kept", "output tokens")
    assert runs.rows == (
        (SNAPKV, "1", "0", "0", "1 of 1", "25.0%", "0"),
        ("P()", "1", "0", "0", "-", "-", "0"),
    )
    assert (latencies.title, latencies.columns) == (f"ms, {SNAPKV}", ("count", "mean", "p50", "p90", "p99"))
    assert [(name.partition("(")[2], *figures) for name, *figures in latencies.rows] == [
        ("TTFT)", "1", "250.00", "250.00", "250.00", "250.00"),
        # At ranks 550, 990 and 1089 of 0 to 1100.
        ("ITL)", "1,101", "551.00", "551.00", "991.00", "1,090.00"),
    ]
