"""What a page's script is given: plain data, each prompt's text once; pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from ..metrics import Distribution
from .rows import JobFile, Metrics, Row
from .runs import Comparison, Run
from .statistics import charts_of

__all__ = ["page_data"]

# Line numbers that the page names of those that it could not read.
_MOST_LINES = 20


def page_data(comparison: Comparison) -> dict[str, Any]:
    """Return all that the page shows; times in seconds, lengths of text in UTF-16 code units, as a browser
    counts them."""
    texts: dict[str, int] = {}
    orders = [{id(row): place for place, row in enumerate(run.rows, 1)} for run in comparison.runs]
    entries = [
        {
            "id": str(entry.id),
            "line": entry.line,
            "rows": [
                row and {**_row(row, texts), "order": order[id(row)]}
                for row, order in zip(entry.rows, orders, strict=True)
            ],
        }
        for entry in comparison.entries
    ]
    return {
        "files": [_file(file) for file in comparison.files],
        "runs": [_run(run) for run in comparison.runs],
        "charts": [asdict(chart) for chart in charts_of(comparison.runs)],
        "texts": list(texts),
        "entries": entries,
    }


def _file(file: JobFile) -> dict[str, Any]:
    return {
        "name": str(file.path),
        "modified": file.modified,
        "rows": len(file.rows),
        "broken": len(file.broken),
        "broken_lines": [asdict(each) for each in file.broken[:_MOST_LINES]],
    }


def _run(run: Run) -> dict[str, Any]:
    return {
        "label": run.label,
        "policy": run.policy,
        "model": run.model,
        "file": run.file,
        "replaced": run.replaced,
        "failures": dict(run.failures),
        **run.totals,
    }


def _row(row: Row, texts: dict[str, int]) -> dict[str, Any]:
    data: dict[str, Any] = {
        "text": row.text or "",
        "finish": row.finish_reason,
        "same": row.is_same,
        "retries": row.retries,
        "prompt_tokens": row.prompt_tokens,
    }
    if row.error:
        data["error"] = {"type": row.error.type, "message": row.error.message, "phase": row.error.phase}
    if row.metrics:
        data["metrics"] = _metrics(row.metrics)
    if row.kv:
        names = ("tokens_before", "tokens_after", "bytes_before", "bytes_after", "recomputed_tokens")
        data["kv"] = {name: getattr(row.kv, name) for name in names}
    if row.pieces is not None:
        whole = "".join(text for text, _ in row.pieces)
        data["prompt"] = texts.setdefault(whole, len(texts))
        data["pieces"] = [[_length(text), int(is_kept)] for text, is_kept in row.pieces if text]
    if row.baseline:
        baseline = row.baseline
        data["baseline"] = {
            "text": baseline.text, "finish": baseline.finish_reason, "ttft": baseline.ttft,
            "tokens": None if baseline.token_ids is None else len(baseline.token_ids),
        }  # fmt: skip
    if row.extra:
        data["extra"] = [[name, _shown(value)] for name, value in row.extra.items()]
    return data


def _metrics(metrics: Metrics) -> dict[str, Any]:
    names = (
        "ttft", "tpot", "e2e_latency", "input_tokens", "output_tokens", "cached_tokens", "prefill_ttft",
        "edit_time", "queue_time", "seconds", "attempts",
    )  # fmt: skip
    found = {name: value for name in names if (value := getattr(metrics, name)) is not None}
    # A row's gaps, thousands in a long answer, as what is shown of them.
    spread = Distribution.of(metrics.itl or ())
    return found | ({"itl": [spread.mean, spread.p50, spread.p90, spread.p99]} if spread else {})


def _shown(value: Any) -> str:
    """Return text as it is and all else as JSON, since a browser's numbers are not as exact."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _length(text: str) -> int:
    return len(text) + sum(character > "\uffff" for character in text)
