"""Rows of the output: every field from what the stream came to, and the prompt in runs."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lmcache_stream as lms
from lmcache_stream.dropping import RKV, Chain, KeyDiff, Policy, RandomDrop, SnapKV
from lmcache_stream.jobs.prompts import PromptRow
from lmcache_stream.jobs.records import described, encode_row, is_beginning, read_head, row_of
from lmcache_stream.jobs.tokens import TextModel

METRICS = lms.StreamPerfMetrics(
    duration=2.0,
    ttft=0.5,
    tpot=0.25,
    e2e_latency=1.0,
    itl=(0.25, 0.25),
    input_tokens=5,
    output_tokens=3,
    cached_tokens=4,
    input_tput=2.5,
    output_tput=1.5,
    finish_reason="stop",
)
EDIT = lms.EditReport(
    tokens_before=8,
    tokens_after=4,
    recomputed_tokens=0,
    bytes_before=800,
    bytes_after=400,
    cache_salt="x",
    seconds=0.125,
    kept_indices=(0, 1, 4, 7),
)
OUTCOME = lms.StreamOutcome(
    stream_id="s",
    token_ids=(1, 2, 3),
    text="ü\u2028",
    error=None,
    phases=(
        lms.PhaseOutcome(name="prefill", began=0, seconds=2, attempts=2, metrics=replace(METRICS, ttft=1.5)),
        lms.PhaseOutcome(name="edit", began=2, seconds=1, attempts=1, edit=EDIT),
        lms.PhaseOutcome(name="decode", began=3, seconds=2, attempts=1, metrics=METRICS),
    ),
    queue_time=0.0,
    seconds=5.0,
)
IDS = list(range(ord("a"), ord("a") + 10))


class Letters:
    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(map(chr, ids))


ROW = PromptRow(18, "doc-17")
LETTERS = TextModel(Letters())


def made(
    outcome: lms.StreamOutcome = OUTCOME,
    baseline: lms.StreamOutcome | None = None,
    *,
    row: PromptRow = ROW,
    text_model: TextModel | None = LETTERS,
) -> dict[str, Any]:
    answer = row_of(row, IDS, outcome, baseline, policy="P", model="m", text_model=text_model)
    decoded: dict[str, Any] = json.loads(encode_row(answer))
    return decoded


def test_a_row_has_every_field() -> None:
    assert made() == {
        "id": "doc-17",
        "line": 18,
        "policy": "P",
        "model": "m",
        "prompt_tokens": 10,
        "text": "ü\u2028",
        "token_ids": [1, 2, 3],
        "finish_reason": "stop",
        "error": None,
        "kv": {
            "tokens_before": 8,
            "tokens_after": 4,
            "bytes_before": 800,
            "bytes_after": 400,
            "seconds": 0.125,
            "recomputed_tokens": 0,
        },
        # What lies behind the whole chunks counts as kept.
        "pieces": [["ab", True], ["cd", False], ["e", True], ["fg", False], ["hij", True]],
        "metrics": {
            "ttft": 0.5,
            "tpot": 0.25,
            "e2e_latency": 1.0,
            "itl": [0.25, 0.25],
            "input_tokens": 5,
            "output_tokens": 3,
            "cached_tokens": 4,
            "prefill_ttft": 1.5,
            "edit_time": 0.125,
            "queue_time": 0.0,
            "seconds": 5.0,
            "attempts": 4,
        },
        "baseline": None,
    }


def test_a_row_is_one_line_of_plain_utf_8() -> None:
    line = encode_row({"id": "ü", "text": "a\nb\u2028三"})
    assert line == '{"id":"ü","text":"a\\nb\u2028三"}\n'.encode()


def test_what_the_row_had_besides_is_passed_through() -> None:
    row = PromptRow(18, "doc-17", extra={"expected": ["x", 1.5, None], "n": 2**70})
    assert made(row=row)["extra"] == {"expected": ["x", 1.5, None], "n": 2**70}
    assert "extra" not in made()


def test_without_a_tokenizer_there_are_no_pieces() -> None:
    assert made(text_model=None)["pieces"] is None


def test_a_row_without_an_edit_is_one_piece() -> None:
    (_, _, decode) = OUTCOME.phases
    answer = made(replace(OUTCOME, phases=(decode,)))
    assert answer["pieces"] == [["abcdefghij", True]]
    assert answer["kv"] is None
    assert answer["metrics"]["prefill_ttft"] is answer["metrics"]["edit_time"] is None


def test_a_row_that_failed_says_where_and_keeps_what_came() -> None:
    failing = lms.EngineStatusError("POST x:\n HTTP 400", status=400, detail="no")
    phases = (*OUTCOME.phases[:2], replace(OUTCOME.phases[2], metrics=None))
    answer = made(replace(OUTCOME, error=failing, phases=phases, token_ids=(1,), text="a"))
    assert answer["error"] == {
        "type": "EngineStatusError",
        "message": "POST x: HTTP 400",
        "phase": "decode",
    }
    assert (answer["text"], answer["token_ids"], answer["finish_reason"]) == ("a", [1], None)
    assert answer["metrics"]["ttft"] is answer["metrics"]["itl"] is None
    assert answer["kv"]["tokens_after"] == 4


def test_the_baseline_is_beside_the_answer() -> None:
    whole = replace(OUTCOME, phases=OUTCOME.phases[2:], text="whole", token_ids=(9,))
    answer = made(baseline=whole)
    assert answer["baseline"] == {"text": "whole", "token_ids": [9], "finish_reason": "stop", "ttft": 0.5}
    failed = made(baseline=replace(whole, error=lms.TruncatedStreamError("cut")))
    assert failed["error"] == {"type": "TruncatedStreamError", "message": "cut", "phase": "baseline"}
    assert failed["token_ids"] == [1, 2, 3]


@given(st.text(st.sampled_from("a ü三🙂"), min_size=1, max_size=20), st.data())
def test_pieces_are_in_turn_and_joined_they_are_the_prompt(text: str, data: st.DataObject) -> None:
    class Bytes:
        def decode(self, ids: list[int], **_: Any) -> str:
            return bytes(ids).decode(errors="replace")

    ids = list(text.encode())
    before = data.draw(st.integers(0, len(ids)))
    kept = tuple(sorted(data.draw(st.sets(st.integers(0, before - 1))) if before else ()))
    edit = replace(EDIT, tokens_before=before, kept_indices=kept)
    outcome = replace(OUTCOME, phases=(replace(OUTCOME.phases[1], edit=edit),))
    row = PromptRow(1, "a")
    pieces = row_of(row, ids, outcome, None, policy="P", model="m", text_model=TextModel(Bytes()))["pieces"]
    assert "".join(piece for piece, _ in pieces) == text
    flags = [flag for _, flag in pieces]
    assert all(one != other for one, other in itertools.pairwise(flags))
    assert all(piece for piece, _ in pieces)
    # A character belongs to the run in which its last byte is.
    ends = list(itertools.accumulate(len(char.encode()) for char in text))
    shown = [flag for piece, flag in pieces for _ in piece]
    assert shown == [end - 1 in kept or end - 1 >= before for end in ends]


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (None, None),
        (SnapKV(ratio=0.5), "SnapKV(ratio=0.5, sinks=4, window=32)"),
        (KeyDiff(budget=64, sinks=0, window=1), "KeyDiff(budget=64, sinks=0, window=1)"),
        (RandomDrop(ratio=0.25, seed=7), "RandomDrop(ratio=0.25, sinks=4, window=32, seed=7)"),
        (RKV(ratio=0.5, lam=0.2), "RKV(ratio=0.5, sinks=4, window=32, lam=0.2)"),
    ],
)
def test_a_policy_is_told_by_what_was_chosen(policy: Policy | None, text: str | None) -> None:
    assert described(policy) == text


def test_policies_of_policies_are_told_in_full() -> None:
    policy = Chain([KeyDiff(ratio=0.5)])
    assert described(policy) == repr(policy)


def test_what_was_written_is_read_again() -> None:
    for outcome, failed in ((OUTCOME, False), (replace(OUTCOME, error=ValueError("x")), True)):
        answer = row_of(PromptRow(1, 2**70), IDS, outcome, None, policy=None, model="m", text_model=None)
        line = encode_row(answer)
        head = read_head(line)
        assert head is not None
        assert (head.id, head.line, head.policy, head.model) == (2**70, 1, None, "m")
        assert head.is_failed is failed
        assert all(is_beginning(line[:length]) for length in range(len(line)))
        assert read_head(line[:-2]) is None
    assert not is_beginning(b'{"ID":')
    assert read_head(b'{"id":1}') is None
