"""Lines of a job's output: rows, broken lines, and files that are something else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import lmcache_stream as lms
from lmcache_stream.report import read_job
from lmcache_stream.report.rows import Broken, parse_job

from .making import SNAPKV, failed_row, row, write_job


def parsed(*lines: dict[str, Any] | bytes) -> Any:
    return parse_job(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines)


def test_a_row_is_read_as_it_was_written() -> None:
    (one,), broken = parsed(row("a", line=7, extra={"expected": [1]}))
    assert broken == []
    assert (one.id, one.line, one.policy, one.model, one.text) == ("a", 7, SNAPKV, "qwen3", "an answer")
    assert one.pieces == (("kept text ", True), ("dropped text ", False), ("kept again", True))
    assert (one.kv.tokens_before, one.kv.tokens_after, one.kv.bytes_after) == (32, 16, 1600)
    assert (one.metrics.ttft, one.metrics.itl, one.baseline.ttft) == (0.1, (0.01, 0.01), 0.2)
    assert one.extra == {"expected": [1]}
    assert one.is_ok


def test_a_failed_row_may_know_no_more_than_its_error() -> None:
    (one,), _ = parsed({"id": 1, "error": {"type": "CacheLostError", "message": "gone", "phase": "decode"}})
    assert not one.is_ok
    assert (one.error.type, one.error.message, one.error.phase) == ("CacheLostError", "gone", "decode")
    assert one.is_same is None


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"id": "a", "error": null, "text": "half', "truncated"),
        (b"not json", "malformed"),
        (b"[1, 2]", "Expected `object`"),
        (b'{"id": "a", "prompt": "a row of prompts"}', "missing required field `error`"),
        (b'{"id": null, "error": null}', r"\$.id"),
        (b'{"id": 1.5, "error": null}', r"\$.id"),
        (b'{"id": 1, "error": null, "pieces": [["text", 1]]}', r"\$.pieces"),
        (b'{"id": 1, "error": null, "metrics": {"ttft": NaN}}', "malformed"),
        (b'{"id": "\xff", "error": null}', ""),
        (b'{"id": "\\ud800", "error": null}', ""),
        (b'{"id": 1, "error": null, "extra": {"a": ' + b"[" * 100_000, ""),
    ],
)
def test_a_line_that_is_no_row_is_told_and_the_others_stay(line: bytes, reason: str) -> None:
    rows, broken = parsed(row("a"), line, row("b"))
    assert [one.id for one in rows] == ["a", "b"]
    ((number, why),) = [(each.line, each.reason) for each in broken]
    assert number == 2
    assert re.search(reason, why)


def test_empty_lines_and_a_byte_order_mark_are_nothing() -> None:
    rows, broken = parsed(b"\xef\xbb\xbf" + json.dumps(row("a")).encode() + b"\r\n", b"\n", b"  \r\n")
    assert [one.id for one in rows] == ["a"]
    assert broken == []


@pytest.mark.parametrize(
    ("changes", "is_same"),
    [
        ({}, True),
        ({"text": "an answer "}, False),
        ({"baseline": None}, None),
        ({"text": None}, None),
        ({"error": {"type": "E"}}, None),
    ],
)
def test_an_answer_is_compared_with_the_baseline_where_both_are_whole(
    changes: dict[str, Any], is_same: bool | None
) -> None:
    (one,), _ = parsed(row("a", **changes))
    assert one.is_same is is_same


def no_policy(attempts: int, **metrics: Any) -> dict[str, Any]:
    return row("a", policy=None, kv=None, metrics={"attempts": attempts, **metrics})


@pytest.mark.parametrize(
    ("given", "retries"),
    [
        (row("a"), 0),
        (row("a", metrics=row("a")["metrics"] | {"attempts": 5}), 2),
        (row("a", metrics=None), 0),
        (row("a", metrics={"attempts": 1}), 0),
        (no_policy(1), 0),
        (no_policy(2, prefill_ttft=1.0), 0),
        (no_policy(3, prefill_ttft=1.0), 1),
        (failed_row("a", "prefill"), 0),
        (failed_row("a", "edit", metrics={"attempts": 4}), 2),
        (failed_row("a", "decode", kv=row("a")["kv"]), 0),
    ],
)
def test_the_first_attempt_of_each_phase_is_no_retry(given: dict[str, Any], retries: int) -> None:
    (one,), _ = parsed(given)
    assert one.retries == retries


def test_a_job_is_read_with_its_broken_lines(tmp_path: Path) -> None:
    path = write_job(tmp_path / "out.jsonl", [row("a"), "nonsense", row("ü")])
    job = read_job(path)
    assert [one.id for one in job.rows] == ["a", "ü"]
    assert job.broken == (Broken(2, job.broken[0].reason),)
    assert job.modified == path.stat().st_mtime


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "it is empty"),
        ("\n\n", "it is empty"),
        ('{"id": 1, "prompt": "hello"}\n', "line 1: .*`error`"),
        ("# a readme\n", "line 1"),
    ],
)
def test_a_file_of_something_else_is_an_error_in_one_line(tmp_path: Path, content: str, why: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(content)
    with pytest.raises(lms.InvalidRequestError, match=f"other.jsonl is not the output of .*{why}") as caught:
        read_job(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(lms.InvalidRequestError, match=r"none\.jsonl: No such file"):
        read_job(tmp_path / "none.jsonl")
    with pytest.raises(lms.InvalidRequestError, match="Is a directory"):
        read_job(tmp_path)
