"""Rows sorted into runs and by id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmcache_stream.report import Comparison, JobFile, compare
from lmcache_stream.report.rows import parse_job

from .making import SNAPKV, failed_row, row


def job(name: str, *rows: dict[str, Any]) -> JobFile:
    found, broken = parse_job(json.dumps(each).encode() for each in rows)
    assert broken == []
    return JobFile(Path(name), 0.0, tuple(found))


def without(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in names}


def table(comparison: Comparison) -> dict[Any, list[str | None]]:
    return {entry.id: [one.text if one else None for one in entry.rows] for entry in comparison.entries}


def test_the_same_id_stands_side_by_side() -> None:
    first = job("a.jsonl", row("x", text="ax"), row("y", text="ay"))
    second = job("b.jsonl", row("z", text="bz", policy="KNorm()"), row("x", text="bx", policy="KNorm()"))
    found = compare([first, second])
    assert [(run.label, run.file) for run in found.runs] == [(SNAPKV, 0), ("KNorm()", 1)]
    assert table(found) == {"x": ["ax", "bx"], "y": ["ay", None], "z": [None, "bz"]}


def test_a_number_and_its_digits_are_two_ids() -> None:
    found = compare([job("a.jsonl", row(1, text="number"), row("1", text="text"))])
    assert [(entry.id, entry.rows[0].text) for entry in found.entries if entry.rows[0]] == [
        (1, "number"),
        ("1", "text"),
    ]


def test_a_later_row_takes_the_place_of_an_earlier_one_and_is_counted() -> None:
    found = compare([job("a.jsonl", failed_row("x"), row("y"), row("x", text="again"))])
    (run,) = found.runs
    assert (run.replaced, len(run.rows), run.failures) == (1, 2, {})
    assert [one.id for one in run.rows] == ["y", "x"]
    assert table(found)["x"] == ["again"]


def test_policies_in_one_file_are_runs_of_their_own() -> None:
    found = compare([job("a.jsonl", row("x"), row("x", policy=None, kv=None))])
    assert [(run.label, run.policy) for run in found.runs] == [(SNAPKV, SNAPKV), ("nothing dropped", None)]
    assert len(found.entries) == 1


def test_a_row_that_failed_early_belongs_to_the_only_run_of_its_file() -> None:
    early = without(failed_row("y", "prefill"), "policy", "model")
    (run,) = compare([job("a.jsonl", early, row("x"))]).runs
    assert (run.policy, run.model, len(run.rows)) == (SNAPKV, "qwen3", 2)


@pytest.mark.parametrize(
    ("files", "labels"),
    [
        ([("a.jsonl", "P()", "m"), ("b.jsonl", "Q()", "n")], ["P()", "Q()"]),
        ([("a.jsonl", "P()", "m"), ("b.jsonl", "P()", "n")], ["P() · a.jsonl", "P() · b.jsonl"]),
        ([("x/a.jsonl", "P()", "m"), ("y/a.jsonl", "P()", "m")], ["P() · x/a.jsonl", "P() · y/a.jsonl"]),
        ([("a", None, "m"), ("b", None, "m")], ["nothing dropped · a", "nothing dropped · b"]),
    ],
)  # fmt: skip
def test_labels_tell_runs_apart(files: list[tuple[str, str | None, str]], labels: list[str]) -> None:
    found = compare([job(name, row("x", policy=policy, model=model)) for name, policy, model in files])
    assert [run.label for run in found.runs] == labels


def test_models_tell_runs_of_one_file_apart() -> None:
    found = compare([job("a.jsonl", row("x", model="m"), row("x", model="n"))])
    assert [run.label for run in found.runs] == [f"{SNAPKV} · m", f"{SNAPKV} · n"]


def test_totals_count_what_came_to_its_end() -> None:
    retried = row("c", text="other", metrics=row("c")["metrics"] | {"attempts": 5})
    failures = [
        failed_row("d", kv=row("d")["kv"]),
        failed_row("e", error={"type": "CacheLostError"}),
        failed_row("f"),
    ]
    (run,) = compare([job("a.jsonl", row("a"), row("b", baseline=None), retried, *failures)]).runs
    assert run.totals == {
        "rows": 6, "failed": 3, "retried": 1, "retries": 2, "compared": 2, "same": 1,
        "prompt_tokens": 120, "output_tokens": 9, "tokens_before": 96, "tokens_after": 48,
        "recomputed_tokens": 9, "bytes_before": 9600, "bytes_after": 4800,
    }  # fmt: skip
    assert list(run.failures.items()) == [("EngineStatusError", 2), ("CacheLostError", 1)]


def test_the_line_is_that_of_the_first_row_that_knows_it() -> None:
    found = compare([job("a.jsonl", row("x", line=None)), job("b.jsonl", row("x", line=9, policy="P()"))])
    assert [entry.line for entry in found.entries] == [9]
