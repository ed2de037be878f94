"""Documents as prompts: with and without a chat template, and where the question begins."""

from __future__ import annotations

import pytest

import lmcache_stream as lms
from lmcache_stream.embedded.demo import Document, builtin_documents
from lmcache_stream.embedded.demo.documents import build_prompt

from .conftest import BOS, CharacterTokenizer

DOCUMENT = Document("a title", " The text. Question: of old?\n", " Who? ")


def text_of(ids: tuple[int, ...]) -> str:
    return "".join(map(chr, ids))


def test_a_chat_template_is_used() -> None:
    prompt = build_prompt(CharacterTokenizer(), DOCUMENT)
    assert text_of(prompt.token_ids) == (
        "<user>The text. Question: of old?\n\nQuestion: Who?</user><assistant>"
    )
    assert text_of(prompt.token_ids[prompt.question_start :]) == "Question: Who?</user><assistant>"


def test_without_a_template_the_text_is_plain_and_begins_as_the_model_wants() -> None:
    prompt = build_prompt(CharacterTokenizer(chat_template=None), DOCUMENT)
    assert prompt.token_ids[0] == BOS
    assert text_of(prompt.token_ids[1:]) == "The text. Question: of old?\n\nQuestion: Who?\nAnswer:"
    assert text_of(prompt.token_ids[prompt.question_start :]) == "Question: Who?\nAnswer:"
    assert prompt.token_ids.count(BOS) == 1


def test_a_template_that_changes_the_question_is_refused() -> None:
    with pytest.raises(lms.InvalidRequestError, match="chat template changes the question"):
        build_prompt(CharacterTokenizer(chat_template="<user>nothing</user>"), DOCUMENT)


def test_the_texts_that_come_with_the_demo() -> None:
    documents = builtin_documents()
    assert len(documents) == 3
    assert all(3000 <= len(document.text) <= 6000 for document in documents)
    assert len({document.question for document in documents}) == 3
    asked = builtin_documents("Why?")
    assert [document.text for document in asked] == [document.text for document in documents]
    assert {document.question for document in asked} == {"Why?"}
