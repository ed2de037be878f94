"""Text that comes token by token, and stop strings in it."""

from __future__ import annotations

import random

import pytest

from lmcache_stream.embedded.engine import CausalModel
from lmcache_stream.embedded.engine.text import Detokenizer, StopStrings

from ...tiny_model import EOS

TEXT = "a plain word, \U0001f336 Zürich, 漢字 \n\nand an end"


@pytest.mark.parametrize("prompt", ["", "x", "漢", "before that: "])
def test_the_pieces_are_the_text(model: CausalModel, prompt: str) -> None:
    ids = list(TEXT.encode())
    detokenizer = Detokenizer(model.tokenizer, list(prompt.encode()))
    pieces = [detokenizer.push(one) for one in ids]
    assert "".join(pieces) + detokenizer.flush() == TEXT
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


def test_a_prompt_that_ends_inside_a_character(model: CausalModel) -> None:
    whole = "漢".encode()
    detokenizer = Detokenizer(model.tokenizer, [*b"ab", *whole[:2]])
    assert [detokenizer.push(one) for one in (whole[2], ord("c"))] == ["漢", "c"]


def test_a_prompt_that_ends_in_what_is_no_character(model: CausalModel) -> None:
    detokenizer = Detokenizer(model.tokenizer, [ord("a"), 0xF0, 0x9F])
    assert detokenizer.push(ord("b")) + detokenizer.flush() == "b"
    assert Detokenizer(model.tokenizer, [0xE6]).flush() == ""


def test_what_never_becomes_a_character_comes_at_the_end(model: CausalModel) -> None:
    detokenizer = Detokenizer(model.tokenizer, [])
    assert [detokenizer.push(one) for one in (ord("a"), 0xF0, 0x9F)] == ["a", "", ""]
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(("skip", "text"), [(True, "ab"), (False, "a<eos>b")])
def test_special_tokens(model: CausalModel, skip: bool, text: str) -> None:
    detokenizer = Detokenizer(model.tokenizer, [1], skip_special_tokens=skip)
    assert "".join(detokenizer.push(one) for one in (97, EOS, 98)) == text


@pytest.mark.parametrize(
    ("stops", "text", "given", "found"),
    [
        ([], "anything", "anything", None),
        (["END"], "the END of it", "the ", "END"),
        (["END"], "EN EEND", "EN E", "END"),
        (["END"], "no EN", "no EN", None),
        (["ab", "b"], "xab", "x", "ab"),
        (["bcd", "c"], "abcd", "ab", "c"),
        (["a"], "a", "", "a"),
    ],
)
@pytest.mark.parametrize("keep", [False, True])
def test_stop_strings_at_every_cut(
    stops: list[str], text: str, given: str, found: str | None, keep: bool
) -> None:
    chance = random.Random(1)
    for _ in range(30):
        watch = StopStrings(stops, keep=keep)
        out, rest = "", text
        while rest and watch.found is None:
            cut = chance.randint(1, 2)
            out += watch.push(rest[:cut])
            rest = rest[cut:]
        if watch.found is None:
            out += watch.flush()
        assert out == given + (found if keep and found else "")
        assert watch.found == found
