"""What the examples show of an edit as text, and how their prompts are made."""

from __future__ import annotations

import io
from typing import Any

import pytest
from kept import kept_text, takes_colour
from prompts import build_prompt, ferry_log

from lmcache_stream.embedded.engine import CausalModel
from lmcache_stream.figures import Strip


class Letters:
    """A tokenizer whose ids are letters."""

    def decode(self, ids: list[int], **options: Any) -> str:
        return "".join(map(chr, ids))


def test_text_without_colours_counts_what_is_missing() -> None:
    ids = [ord(letter) for letter in "abcd\n\n\n\nefg?"]
    strip = Strip("", 11, tuple(range(11)), (0, 3, 4, 5, 6, 7, 8))
    assert kept_text(Letters(), ids, strip, colour=False) == "a[2]d\n\ne[2]"


def test_text_with_colours_has_all_of_it() -> None:
    ids = [ord(letter) for letter in "ab\ncd"]
    strip = Strip("", 5, tuple(range(5)), (0, 4))
    text = kept_text(Letters(), ids, strip, colour=True)
    assert text == "\x1b[32ma\x1b[0m\x1b[2;9mb\x1b[0m\n\x1b[2;9mc\x1b[0m\x1b[32md\x1b[0m"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("no_color", "colours"), [(None, True), ("", True), ("1", False)])
def test_colours_are_for_terminals_that_may_have_them(
    monkeypatch: pytest.MonkeyPatch, no_color: str | None, colours: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    assert takes_colour(Terminal()) is colours
    assert not takes_colour(io.StringIO())


def test_a_prompt_is_whole_chunks_of_named_parts(model: CausalModel) -> None:
    prompt = build_prompt(model.tokenizer, 32)
    assert len(prompt.token_ids) % 32 == 0
    stops = [0, *(part.stop for part in prompt.parts)]
    assert [part.start for part in prompt.parts] == stops[:-1]
    assert stops[-1] == len(prompt.token_ids)
    texts = {
        part.name: model.tokenizer.decode(prompt.token_ids[part.start : part.stop]) for part in prompt.parts
    }
    assert texts["fact"] == " The password of the harbour gate is marigold."
    assert texts["question"].endswith("Question: What is the password of the harbour gate?\nAnswer:")
    assert set(texts["filler"]) == {"\n"}
    assert [part.name for part in prompt.parts if part.is_marked] == ["fact"]
    whole = model.tokenizer.decode([*prompt.token_ids])
    assert ferry_log() in whole


@pytest.mark.parametrize(("text", "question"), [("a text", None), ("a text", "why?"), ("a request", "")])
def test_a_text_of_the_users(model: CausalModel, text: str, question: str | None) -> None:
    prompt = build_prompt(model.tokenizer, 1, text, question)
    asked = {None: "a text\n\nQuestion: What is this text about?\nAnswer:", "": "a request\n"}
    decoded = model.tokenizer.decode(prompt.token_ids)
    assert decoded == asked.get(question, "a text\n\nQuestion: why?\nAnswer:")
    assert "fact" not in {part.name for part in prompt.parts}
