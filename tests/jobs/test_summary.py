"""What a job says at its end."""

from __future__ import annotations

import json
from dataclasses import replace

import lmcache_stream as lms
from lmcache_stream.jobs import Counts
from lmcache_stream.jobs.summary import as_json, as_lines
from lmcache_stream.metrics import Distribution

EMPTY = lms.BatchReport.of([], mode="run", duration=2.0)
COUNTS = Counts(done=3, failed=1, bad=2, skipped=4)


def spread(p50: float) -> Distribution:
    return Distribution(count=3, mean=9.0, p50=p50, p90=9.0, p99=9.0)


def test_the_lines_say_rows_medians_bytes_and_failures() -> None:
    report = replace(
        EMPTY,
        output_tput=12.34,
        ttft=spread(0.0125),
        edit_time=spread(1.5),
        kv_bytes_before=4000,
        kv_bytes_after=1000,
        failures={"EngineStatusError": 1},
    )
    assert as_lines(COUNTS, report) == [
        "rows: 3 done, 1 failed, 4 skipped, 2 bad; 2.0 s, 12.3 output tokens/s",
        "medians: TTFT 12.5 ms, edit 1500.0 ms",
        "KV: 4,000 bytes before the edits, 1,000 after (25%)",
        "failures: 1 EngineStatusError; --retry-failed runs these rows again",
    ]
    assert as_lines(Counts(), EMPTY) == [
        "rows: 0 done, 0 failed, 0 skipped, 0 bad; 2.0 s, 0.0 output tokens/s"
    ]


def test_the_same_as_json() -> None:
    figures = json.loads(as_json(COUNTS, EMPTY))
    assert figures.pop("rows") == {"done": 3, "failed": 1, "skipped": 4, "bad": 2}
    assert figures == json.loads(EMPTY.to_json())
