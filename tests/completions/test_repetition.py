"""Which part of a text was generated, where the engine repeats the prompt in it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from lmcache_stream.completions.choices import ChoiceDecoder
from lmcache_stream.completions.repetition import (
    RepeatedPrompt,
    generated_text,
    may_repeat,
    split_text,
)
from lmcache_stream.errors import EngineStreamError

# A tokenizer of single bytes: every character outside ASCII is unfinished between its bytes.
PROMPT = "Hello world \U0001f336 and " * 8
CHARACTER = "\U0001f336".encode()
END = 0xFF  # Plays a special token, which has no text in a stream.


def ids_of(text: str) -> list[int]:
    return list(text.encode())


def text_of(ids: Sequence[int], *, special: bool = True) -> str:
    kept = [token for token in ids if token != END]
    if not special:
        return bytes(kept).decode("utf-8", "replace")
    parts = bytes(END if token == END else token for token in ids).split(bytes([END]))
    return "<end>".join(part.decode("utf-8", "replace") for part in parts)


class Engine:
    """Streams text as vLLM does where the prompt ends inside a character."""

    def __init__(self, prompt: Sequence[int], stop: Sequence[str] = (), *, repeats: bool = True) -> None:
        self.prompt = prompt
        self.repeats = repeats
        self.hold = max((len(one) for one in stop), default=1) - 1
        self.ids: list[int] = []
        self.given = 0
        self.asked: list[list[int]] = []

    def step(self, *ids: int, last: bool = False) -> bytes:
        self.ids += ids
        text = text_of([*self.prompt, *self.ids], special=False)
        own, _ = split_text(text_of(self.prompt, special=False), text)
        text = text.rstrip("\ufffd") if not last else text
        if not self.repeats:
            text = text[len(own) :]
        elif text == own:
            text = ""
        end = len(text) if last else max(self.given, len(text) - self.hold)
        new = text[self.given : end]
        self.given = end
        choice = {"index": 0, "text": new, "token_ids": ids, "finish_reason": "length" if last else None}
        return json.dumps({"choices": [choice]}).encode()

    async def detokenize(self, ids: Sequence[int]) -> str | None:
        self.asked.append(list(ids))
        return text_of(ids)


async def run(
    prompt: Sequence[int], steps: Sequence[Sequence[int]], stop: Sequence[str] = (), *, repeats: bool = True
) -> tuple[str, Engine]:
    """Return the text that is left of a pass, and the engine."""
    engine = Engine(prompt, stop, repeats=repeats)
    choices = ChoiceDecoder("POST http://engine")
    repeated = RepeatedPrompt(prompt, stop, engine.detokenize)
    said = ""
    for number, ids in enumerate(steps):
        for token in choices.feed(engine.step(*ids, last=number == len(steps) - 1)):
            said += (
                await repeated.mend(token.text, choices) if repeated.watching and token.text else token.text
            )
    return said, engine


@pytest.mark.parametrize("repeats", [True, False])
@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("stop", [(), ("zz",), ("zzzzzz",), ("z" * 40,)], ids=len)
@pytest.mark.parametrize("at_once", [1, 2, 5])
async def test_the_prompt_is_taken_out_and_nothing_else(
    repeats: bool, cut: int, stop: tuple[str, ...], at_once: int
) -> None:
    prompt = [*ids_of(PROMPT), *CHARACTER[:cut]]
    answer = [*CHARACTER[cut:], *ids_of(" and Hello world \U0001f336.")]
    steps = [answer[start : start + at_once] for start in range(0, len(answer), at_once)]
    said, _ = await run(prompt, steps, stop, repeats=repeats)
    assert said == "\U0001f336 and Hello world \U0001f336."


@pytest.mark.parametrize("stop", [(), ("zzzz",)], ids=len)
async def test_special_tokens_in_the_prompt_have_no_text_in_the_stream(stop: tuple[str, ...]) -> None:
    prompt = [
        END,
        *ids_of("a user says hi and asks for something"),
        END,
        *ids_of("Well, dear reader, "),
        *CHARACTER[:2],
    ]
    answer = [*CHARACTER[2:], *ids_of(" it is so.")]
    said, _ = await run(prompt, [[one] for one in answer], stop)
    assert said == "\U0001f336 it is so."


async def test_a_special_token_that_ends_the_answer_with_its_first_text() -> None:
    prompt = [END, *ids_of("user: hi there, how are you today? assistant: "), *CHARACTER[:2]]
    said, _ = await run(prompt, [[*CHARACTER[2:], END]])
    assert said == "\U0001f336"


@pytest.mark.parametrize("repeats", [True, False])
async def test_a_prompt_that_ends_with_the_replacement_character_itself(repeats: bool) -> None:
    said, _ = await run(
        ids_of("some text that is long enough to be asked about \ufffd"),
        [ids_of("a"), ids_of("b")],
        repeats=False,
    )
    assert said == "ab"


async def test_a_finished_prompt_costs_one_question_at_most() -> None:
    answer = "-" * 40
    said, engine = await run(ids_of(PROMPT)[:40], [ids_of(answer)[:1], []], repeats=False)
    assert (said, engine.asked) == ("-", [])
    choices = ChoiceDecoder("")
    repeated = RepeatedPrompt(ids_of("Hello world"), (), engine.detokenize)
    choices.feed(json.dumps({"choices": [{"text": answer, "token_ids": [5]}]}).encode())
    assert await repeated.mend(answer, choices) == answer
    assert engine.asked == [[ord("d")]]
    assert not repeated.watching


async def test_an_engine_that_cannot_be_asked_leaves_the_text_as_it_is() -> None:
    async def silent(ids: Sequence[int]) -> str | None:
        return None

    choices = ChoiceDecoder("")
    repeated = RepeatedPrompt([1, 2], (), silent)
    choices.feed(b'{"choices": [{"text": "", "token_ids": [5]}]}')
    assert await repeated.mend("what" * 9, choices) == "what" * 9
    assert not repeated.watching


@pytest.mark.parametrize("text", ["", "Hello ", "Hello world \U0001f336 "])
async def test_a_stop_string_found_in_the_prompt_is_an_error(text: str) -> None:
    prompt = [*ids_of(PROMPT), *CHARACTER[:2]]
    choices = ChoiceDecoder("POST http://engine")
    repeated = RepeatedPrompt(prompt, ("world",), Engine(prompt).detokenize)
    choice = {"text": text, "token_ids": list(CHARACTER[2:]), "finish_reason": "stop", "stop_reason": "world"}
    choices.feed(json.dumps({"choices": [choice]}).encode())
    with pytest.raises(EngineStreamError, match="vllm#48853") as caught:
        await repeated.mend(text, choices)
    assert caught.value.token_ids == tuple(CHARACTER[2:])


async def test_a_stop_string_in_the_answer_is_none() -> None:
    prompt = [*ids_of(PROMPT), *CHARACTER[:2]]
    choices = ChoiceDecoder("")
    repeated = RepeatedPrompt(prompt, ("END",), Engine(prompt).detokenize)
    ids = [*CHARACTER[2:], *ids_of(" so END")]
    text = PROMPT + "\U0001f336 so "
    choice = {"text": text, "token_ids": ids, "finish_reason": "stop", "stop_reason": "END"}
    choices.feed(json.dumps({"choices": [choice]}).encode())
    assert await repeated.mend(text, choices) == "\U0001f336 so "


@pytest.mark.parametrize(
    ("before", "after", "parts"),
    [
        ("ab\ufffd", "ab漢c", ("ab", "漢c")),
        ("ab\ufffd\ufffd", "ab漢c", ("ab", "漢c")),
        ("ab\ufffd", "ab\ufffdc", ("ab\ufffd", "c")),
        ("ab", "abc", ("ab", "c")),
        ("\ufffd", "漢", ("", "漢")),
    ],
)
def test_split_text(before: str, after: str, parts: tuple[str, str]) -> None:
    assert split_text(before, after) == parts


@pytest.mark.parametrize(
    ("streamed", "own", "generated", "held_back", "text"),
    [
        ("xyz漢", "xyz", "漢", False, "漢"),
        ("漢", "xyz", "漢", False, "漢"),
        ("xy", "xyz", "漢", True, None),
        ("xyz", "xyz", "漢", True, ""),
        ("user hello ", "<s>user hello ", "漢", True, ""),
        ("user hello 漢", "<s>user hello ", "漢b", True, "漢"),
        ("hi 漢b", "<s>hi ", "漢b", False, "漢b"),
        ("something else", "<s>user hello ", "漢b", True, None),
    ],
)
def test_generated_text(streamed: str, own: str, generated: str, held_back: bool, text: str | None) -> None:
    assert generated_text(streamed, own, generated, held_back=held_back) == text


@pytest.mark.parametrize(
    ("length", "ids", "prompt", "may"),
    [
        (25, 1, 200, True),
        (25, 1, 201, False),
        (24, 1, 5, False),
        (33, 2, 5, True),
        (32, 2, 5, False),
        (0, 0, 1, False),
    ],
)
def test_only_a_long_text_may_repeat_the_prompt(length: int, ids: int, prompt: int, may: bool) -> None:
    assert may_repeat("x" * length, ids, prompt) is may
