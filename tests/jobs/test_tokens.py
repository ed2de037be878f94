"""Texts and tokens: prompts as transformers makes them, and borders of tokens in a text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lmcache_stream as lms
from lmcache_stream.jobs.prompts import BadRowError, PromptRow
from lmcache_stream.jobs.tokens import TextModel, load_tokenizer

from ..tiny_model import write_tiny_llama

CHAT = ({"role": "user", "content": "Why?"},)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer of single bytes, so that characters are cut by borders of tokens."""
    return load_tokenizer(str(write_tiny_llama(tmp_path_factory.mktemp("tokenizer"))))


def test_text_becomes_what_transformers_makes_of_it(tokenizer: Any) -> None:
    ids = TextModel(tokenizer).encode(PromptRow(1, "a", prompt="aü<eos>"))
    assert ids == tokenizer("aü<eos>")["input_ids"]
    assert TextModel(tokenizer).decode(ids) == "aü<eos>"


def test_a_chat_needs_a_template(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    row = PromptRow(1, "a", messages=CHAT)
    with pytest.raises(BadRowError, match="no chat template: use prompt"):
        TextModel(tokenizer).encode(row)
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ '!' if add_generation_prompt }}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    assert TextModel(tokenizer).decode(TextModel(tokenizer).encode(row)) == "[Why?]!"
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles must\\nalternate') }}")
    with pytest.raises(BadRowError, match="the tokenizer cannot take it: roles must alternate"):
        TextModel(tokenizer).encode(row)


class PanicException(BaseException):
    """What tokenizers, which is Rust, raises where it fails: no ``Exception``."""


def test_a_panic_of_the_tokenizer_is_of_its_row_alone() -> None:
    def panic(text: str) -> Any:
        raise PanicException(f"no {text}")

    with pytest.raises(BadRowError, match="the tokenizer cannot take it: no x"):
        TextModel(panic).encode(PromptRow(1, "a", prompt="x"))


class Spaced:
    """A tokenizer of words, which writes a space in front of all but a text's first one."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join("w" * one for one in ids)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40), st.data())
def test_borders_are_found_where_texts_of_tokens_do_not_simply_join(
    ids: list[int], data: st.DataObject
) -> None:
    borders = [0, *sorted(data.draw(st.sets(st.integers(1, len(ids)))))]
    whole = Spaced().decode(ids)
    found = list(TextModel(Spaced()).places(ids, whole, borders))
    assert found == [len(Spaced().decode(ids[:border])) for border in borders]


class Bytes:
    """A tokenizer of bytes."""

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode(errors="replace")


def check_places(text: str, borders: list[int]) -> None:
    codes = list(text.encode())
    found = list(TextModel(Bytes()).places(codes, text, borders))
    # A replacement character of the text itself cannot be told from a part of one.
    texts = [bytes(codes[:border]).decode(errors="replace").rstrip("\ufffd") for border in borders]
    assert found == [len(one) for one in texts]


@given(st.text(st.sampled_from("a ü三🙂\ufffd"), min_size=1, max_size=20), st.data())
def test_a_border_within_a_character_is_in_front_of_it(text: str, data: st.DataObject) -> None:
    check_places(text, [0, *sorted(data.draw(st.sets(st.integers(1, len(text.encode())))))])


@pytest.mark.parametrize("step", [1, 2, 5, 7])
def test_replacement_characters_of_the_text_s_own_move_no_border_behind_them(step: int) -> None:
    # More of them than there are tokens in front of a border that are looked at.
    text = "a" + "\ufffd" * 20 + "三b" + "\ufffd" * 3 + "üc"
    check_places(text, list(range(0, len(text.encode()) + 1, step)))


def test_a_tokenizer_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(lms.InvalidRequestError, match="--tokenizer names a folder or Hub id"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(lms.InvalidRequestError, match=r"here \(there is no such folder\): --tokenizer"):
        load_tokenizer(str(tmp_path / "nowhere"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(lms.InvalidRequestError, match=r"pip install 'lmcache-stream\[jobs\]'"):
        load_tokenizer(str(tmp_path))
