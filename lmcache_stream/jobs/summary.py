"""What a job says at its end; pure."""

from __future__ import annotations

import json
from typing import Any

from ..batch.report import BatchReport
from ..metrics import Distribution
from .plan import Counts

__all__ = ["as_json", "as_lines"]

_SHOWN = {
    "ttft": "TTFT",
    "itl": "ITL",
    "e2e_latency": "E2E latency",
    "prefill_ttft": "prefill",
    "edit_time": "edit",
}


def as_lines(counts: Counts, report: BatchReport) -> list[str]:
    """Return what there is to say in a few lines."""
    rows = f"{counts.done} done, {counts.failed} failed, {counts.skipped} skipped, {counts.bad} bad"
    lines = [f"rows: {rows}; {report.duration:.1f} s, {report.output_tput:.1f} output tokens/s"]
    found: dict[str, Distribution | None] = {text: getattr(report, name) for name, text in _SHOWN.items()}
    times = [f"{text} {1e3 * one.p50:.1f} ms" for text, one in found.items() if one is not None]
    if times:
        lines.append(f"medians: {', '.join(times)}")
    if report.kv_bytes_before:
        before, after = report.kv_bytes_before, report.kv_bytes_after
        lines.append(f"KV: {before:,} bytes before the edits, {after:,} after ({after / before:.0%})")
    if report.failures:
        counted = ", ".join(f"{count} {name}" for name, count in report.failures.items())
        lines.append(f"failures: {counted}; --retry-failed runs these rows again")
    if counts.first_failure is not None:
        lines.append(f"first failure: {counts.first_failure}")
    return lines


def as_json(counts: Counts, report: BatchReport) -> str:
    """Return the figures and the counts of rows as JSON."""
    rows: dict[str, Any] = {name: getattr(counts, name) for name in ("done", "failed", "skipped", "bad")}
    return json.dumps({"rows": rows, **report.to_dict()}, indent=2, default=str) + "\n"
