"""Lines of a prompts' file: what is a row, and what is wrong with the others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_stream.jobs.prompts import BadRowError, LineSplitter, PromptRow, check_tokens, parse_row

CHAT = [{"role": "user", "content": "Why?"}]


def line_of(**row: Any) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("text", "row"),
    [
        (line_of(id="a", prompt="ü\u2028"), PromptRow(7, "a", prompt="ü\u2028")),
        (line_of(id=3, prompt=""), PromptRow(7, 3, prompt="")),
        (line_of(id="a", messages=CHAT), PromptRow(7, "a", messages=tuple(CHAT))),
        (line_of(id="a", prompt_token_ids=[1, 2]), PromptRow(7, "a", token_ids=(1, 2))),
        (
            line_of(id="a", prompt="x", messages=None, expected=[1], more={"y": None}),
            PromptRow(7, "a", prompt="x", extra={"expected": [1], "more": {"y": None}}),
        ),
        (b"  " + line_of(id=2**70, prompt="x") + b"\t", PromptRow(7, 2**70, prompt="x")),
        (b"", None),
        (b" \t\r", None),
    ],
)
def test_a_row_is_read(text: bytes, row: PromptRow | None) -> None:
    assert parse_row(text, 7) == row


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{", "no JSON"),
        (b'{"id": "a", "prompt": NaN}', "no JSON"),
        (b'{"id": "a", "prompt": "\\ud800"}', "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b'{"id": "a", "prompt": "\xff"}', "no UTF-8: invalid start byte at byte 24"),
        (b"[1]", "a list, no object"),
        (b"1", "a number, no object"),
        (line_of(prompt="x"), "no id"),
        (line_of(id=None, prompt="x"), "no id"),
        (line_of(id=True, prompt="x"), "id=True is neither"),
        (line_of(id=1.5, prompt="x"), "id=1.5 is neither"),
        (line_of(id="a"), "none of prompt, messages, prompt_token_ids"),
        (line_of(id="a", prompt=None), "none of prompt"),
        (line_of(id="a", prompt="x", messages=CHAT), "prompt and messages: a row has one prompt"),
        (line_of(id="a", prompt=[1]), "prompt is a list, no text"),
        (line_of(id="a", messages="x"), "messages is no list"),
        (line_of(id="a", messages=[]), "messages is no list"),
        (line_of(id="a", messages=[*CHAT, {"content": "x"}]), "message 2 has no role"),
        (line_of(id="a", prompt_token_ids="12"), "prompt_token_ids is a string, no list"),
        (line_of(id="a", prompt_token_ids=[1, -1]), "prompt_token_ids[1] is -1"),
        (line_of(id="a", prompt_token_ids=[True]), "a bool is no token id"),
        (line_of(id="a", prompt_token_ids=[1.5]), "a flat sequence of integers"),
    ],
)
def test_what_is_wrong_with_a_row_is_told(text: bytes, reason: str) -> None:
    with pytest.raises(BadRowError) as caught:
        parse_row(text, 7)
    assert reason in str(caught.value)


def test_a_row_is_no_deeper_than_every_thread_can_write_and_read_it() -> None:
    """What json's recursion leaves room for differs by the stack that it begins on."""

    def nested(depth: int) -> bytes:
        return b'{"id": 1, "prompt": "x", "more": ' + b"[" * depth + b"]" * depth + b"}"

    row = parse_row(nested(499), 7)
    assert row is not None
    assert json.dumps(row.extra["more"]) == "[" * 499 + "]" * 499
    wide = line_of(id=1, prompt="x", more=[[{}]] * 5000)
    assert parse_row(wide, 7) == PromptRow(7, 1, prompt="x", extra={"more": [[{}]] * 5000})
    for depth in (500, 700):
        with pytest.raises(BadRowError, match="nested more than 500 deep"):
            parse_row(nested(depth), 7)


def test_a_byte_order_mark_is_at_the_beginning_alone() -> None:
    text = b"\xef\xbb\xbf" + line_of(id="a", prompt="x")
    assert parse_row(text, 1) == PromptRow(1, "a", prompt="x")
    with pytest.raises(BadRowError, match="no JSON"):
        parse_row(text, 2)


@given(st.lists(st.sampled_from([b"a", b"\xc2\x85", b"\r", b"\n"]), max_size=40).map(b"".join), st.data())
def test_lines_are_the_same_in_whatever_pieces_they_come(data: bytes, draw: st.DataObject) -> None:
    splitter = LineSplitter()
    found, left = [], data
    while left:
        count = draw.draw(st.integers(1, len(left)))
        found += splitter.feed(left[:count])
        left = left[count:]
    found += splitter.finish()
    lines = data.split(b"\n")
    *whole, last = lines
    assert found == [line.removesuffix(b"\r") for line in whole] + [last] * bool(last)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([], "the prompt is empty"),
        ([1] * 10, "the prompt has 10 tokens: there is no room for an answer in the model's 10"),
        ([1, 99, 7], "token id 99 is beyond the model's vocabulary of 99"),
    ],
)
def test_a_prompt_that_the_model_cannot_take_is_bad(ids: list[int], reason: str) -> None:
    with pytest.raises(BadRowError, match=reason):
        check_tokens(ids, vocab_size=99, max_model_len=10)
    if ids:
        check_tokens(ids, vocab_size=None, max_model_len=None)
        check_tokens([98] * 9, vocab_size=99, max_model_len=10)
