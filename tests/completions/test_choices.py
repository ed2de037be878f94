"""What becomes of each kind of chunk that vLLM's completions API sends, and of what it should not send."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from lmcache_stream.completions import FinishEvent, TokenEvent
from lmcache_stream.completions.choices import ChoiceDecoder
from lmcache_stream.errors import EngineStreamError, TruncatedStreamError

DONE = b"[DONE]"


def chunk(
    ids: Sequence[int] | None = None, text: str = "", reason: str | None = None, **further: Any
) -> bytes:
    choice = {
        "index": 0,
        "text": text,
        "logprobs": None,
        "finish_reason": reason,
        "stop_reason": None,
        "prompt_token_ids": None,
        "token_ids": ids,
        **further,
    }
    return json.dumps({"id": "cmpl-1", "object": "text_completion", "choices": [choice]}).encode()


def usage(completion: int | None, **further: Any) -> bytes:
    counts = {"prompt_tokens": 7, "total_tokens": 9, "completion_tokens": completion, **further}
    return json.dumps({"id": "cmpl-1", "choices": [], "usage": counts}).encode()


def older(tokens: list[str], text: str = "", reason: str | None = None) -> bytes:
    logprobs = {"tokens": tokens, "token_logprobs": [-0.5] * len(tokens), "top_logprobs": None}
    choice = {"index": 0, "text": text, "finish_reason": reason, "logprobs": logprobs}
    return json.dumps({"choices": [choice]}).encode()


def decode(*data: bytes) -> tuple[list[TokenEvent], FinishEvent]:
    decoder = ChoiceDecoder("POST http://engine")
    tokens = [token for one in data for token in decoder.feed(one, 1.5)]
    return tokens, decoder.finish()


def token(token_id: int, text: str = "") -> TokenEvent:
    return TokenEvent(token_id, text, 1.5)


def test_one_token_an_event() -> None:
    tokens, finish = decode(
        chunk([5], "a", prompt_token_ids=[1, 2, 3]),
        chunk([6], "b"),
        chunk([2], "", "stop"),
        usage(3, prompt_tokens_details={"cached_tokens": 4}),
        DONE,
    )
    assert tokens == [token(5, "a"), token(6, "b"), token(2)]
    assert finish == FinishEvent("stop", "", 7, 3, 4)


def test_events_with_none_one_four_and_three_ids() -> None:
    tokens, finish = decode(
        chunk([], "x"),
        chunk([1], "a"),
        chunk([2, 3, 4, 5], "bcde"),
        chunk([6, 7, 8], "fgh", "length"),
        usage(8),
    )
    assert [one.token_id for one in tokens] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [one.text for one in tokens] == ["xa", "", "", "", "bcde", "", "", "fgh"]
    assert finish == FinishEvent("length", "", 7, 8, None)


def test_text_without_an_id_joins_the_next_event_or_the_end() -> None:
    tokens, finish = decode(
        chunk([1], "a"),
        chunk([], "b"),
        chunk([], "c"),
        chunk([2], "d"),
        chunk([], "e"),
        chunk([], "f", "stop"),
    )
    assert tokens == [token(1, "a"), token(2, "bcd")]
    assert finish == FinishEvent("stop", "ef")


@pytest.mark.parametrize(
    ("data", "cached"),
    [
        (usage(1), None),
        (usage(1, prompt_tokens_details=None), None),
        (usage(1, prompt_tokens_details={}), None),
        (usage(1, prompt_tokens_details={"cached_tokens": None}), None),
        (usage(1, prompt_tokens_details={"cached_tokens": 0}), 0),
        (usage(1, prompt_tokens_details={"cached_tokens": 255, "audio_tokens": 0}), 255),
    ],
)
def test_cached_tokens_are_what_is_reported(data: bytes, cached: int | None) -> None:
    assert decode(chunk([5], "a", "length"), data)[1].cached_tokens == cached


@pytest.mark.parametrize("parts", [[usage(1)], [usage(1), DONE], [DONE], []], ids=len)
def test_with_the_finish_reason_the_answer_is_whole(parts: list[bytes]) -> None:
    assert decode(chunk([5], "a", "length"), *parts)[1].reason == "length"


def test_usage_on_every_event_counts_as_far_as_the_last() -> None:
    data = [json.loads(chunk([5], "a")), json.loads(chunk([6], "b", "length"))]
    for number, one in enumerate(data):
        one["usage"] = {"prompt_tokens": 7, "completion_tokens": number + 1}
    tokens, finish = decode(*(json.dumps(one).encode() for one in data), usage(2))
    assert len(tokens) == 2
    assert finish.completion_tokens == 2


@pytest.mark.parametrize(
    ("data", "ended"),
    [
        ([chunk([5], "a", "length")], False),
        ([chunk([5], "a", "length"), usage(1)], True),
        ([usage(0)], False),
        ([DONE], True),
        ([chunk([5], "a"), DONE], True),
    ],
)
def test_ended_says_that_no_more_need_be_read(data: list[bytes], ended: bool) -> None:
    decoder = ChoiceDecoder("")
    for one in data:
        decoder.feed(one)
    assert decoder.ended is ended


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"  ",
        b"{}",
        b'{"choices": []}',
        b'{"choices": [], "usage": null, "error": null}',
        b'{"type": "ping"}',
        chunk([], ""),
        chunk(None, ""),
    ],
)
def test_what_says_nothing_changes_nothing(data: bytes) -> None:
    tokens, finish = decode(chunk([5], "a"), data, chunk([6], "b", "stop"), usage(2))
    assert tokens == [token(5, "a"), token(6, "b")]
    assert finish.reason == "stop"


def test_fields_that_are_not_needed_are_not_decoded() -> None:
    # None of this would pass if it were: a number that is none, and text that is no UTF-8.
    data = chunk([5], "a", prompt_token_ids=["?"], invented={"x": [1, {}]})
    assert decode(data.replace(b'"?"', b'"\xff"'), chunk([6], "b", "stop"))[0] == [
        token(5, "a"),
        token(6, "b"),
    ]


@pytest.mark.parametrize("reason", ["length", None])
def test_token_ids_of_the_older_form(reason: str | None) -> None:
    tokens, finish = decode(
        older(["token_id:5"], "a"),
        older([], "b"),
        older(["token_id:6", "token_id:7"], "cd", reason),
        older([], "", None if reason else "stop"),
        usage(3),
    )
    assert tokens == [token(5, "a"), token(6), token(7, "bcd")]
    assert finish.reason == (reason or "stop")


def test_token_ids_win_over_logprobs() -> None:
    data = chunk([5], "a", "stop", logprobs={"tokens": ["a"]})
    assert decode(data)[0] == [token(5, "a")]


@pytest.mark.parametrize(
    "data",
    [
        chunk(None, "a"),
        b'{"choices": [{"index": 0, "text": "a"}]}',
        chunk(None, "a", logprobs={}),
        older(["a"], "a"),
        older(["token_id:"], "a"),
        older(["token_id:-1"], "a"),
        older(["token_id:x"], "a"),
    ],
)
def test_text_without_ids_names_the_flags_that_bring_them(data: bytes) -> None:
    decoder = ChoiceDecoder("POST http://engine")
    with pytest.raises(EngineStreamError, match=r"0\.10\.2") as caught:
        decoder.feed(data)
    assert "return_tokens_as_token_ids" in str(caught.value)
    assert "return_token_ids" in str(caught.value)
    assert str(caught.value).startswith("POST http://engine: ")


@pytest.mark.parametrize("counted", [1, 3])
def test_ids_that_the_engine_counts_otherwise_are_refused(counted: int) -> None:
    decoder = ChoiceDecoder("")
    for data in (chunk([5], "a"), chunk([6], "b", "stop"), usage(counted)):
        decoder.feed(data)
    with pytest.raises(EngineStreamError, match=f"counts {counted}.*ids of 2") as caught:
        decoder.finish()
    assert caught.value.token_ids == (5, 6)


def test_a_count_without_any_id_names_the_flags_too() -> None:
    decoder = ChoiceDecoder("")
    for data in (chunk(None, "", "stop"), usage(1)):
        decoder.feed(data)
    with pytest.raises(EngineStreamError, match=r"0\.10\.2"):
        decoder.finish()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"error": {"message": "Token id 9 is out of vocabulary", "code": 400}}', "Token id 9 is out"),
        (b'{"error": "it broke"}', "it broke"),
        (b'{"error": {"code": 500}}', "500"),
        (b'{"object": "error", "message": "it broke", "code": 400}', "it broke"),
        (b'{"message": "it broke"}', "it broke"),
        (b'{"choices": [{"index": 0, "text": "x", "token_ids": [9]}], "error": "it broke"}', "it broke"),
        (chunk([], "", "abort"), "abort"),
        (chunk([], "", "error"), "error"),
        (chunk([9], "x", index=1), "n=1"),
        (chunk([-1], "x"), ">= 0"),
        (chunk([5.5], "x"), "float"),  # type: ignore[list-item]
        (b'{"choices": [{"text": "x"', "no completion chunk"),
        (b'{"choices": "x"}', "no completion chunk"),
        (b'{"choices": [{"text": "\xff"}]}', "no completion chunk"),
        (b"[1]", "no completion chunk"),
        (b'{"choices": [], "extra": ' + b"[" * 100_000, "no completion chunk"),
        (b"oops", "oops"),
    ],
)
def test_errors_carry_the_engines_words_and_the_ids_so_far(data: bytes, message: str) -> None:
    decoder = ChoiceDecoder("POST http://engine")
    for one in ([5], [6], [7]):
        decoder.feed(chunk(one, "x"))
    with pytest.raises(EngineStreamError) as caught:
        decoder.feed(data)
    assert message in str(caught.value)
    assert "POST http://engine" in str(caught.value)
    assert caught.value.token_ids == (5, 6, 7)


def test_ids_that_come_with_an_abort_are_among_those_received() -> None:
    decoder = ChoiceDecoder("")
    with pytest.raises(EngineStreamError) as caught:
        decoder.feed(chunk([5, 6], "ab", "abort"))
    assert caught.value.token_ids == (5, 6)


@pytest.mark.parametrize("data", [[], [DONE], [usage(2)], [usage(2), DONE]], ids=len)
def test_an_end_without_a_finish_reason_is_a_truncation(data: list[bytes]) -> None:
    decoder = ChoiceDecoder("POST http://engine")
    for one in [chunk([5], "a"), chunk([6], "b"), *data]:
        decoder.feed(one)
    with pytest.raises(TruncatedStreamError, match="after 2 tokens") as caught:
        decoder.finish()
    assert caught.value.token_ids == (5, 6)


def test_the_stop_string_is_told() -> None:
    decoder = ChoiceDecoder("")
    decoder.feed(chunk([5], "a", "stop", stop_reason="END"))
    assert decoder.stop_reason == "END"
