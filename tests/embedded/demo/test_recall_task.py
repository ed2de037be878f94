"""The recall task: facts where they are said to be, prompts of the wanted length, answers judged."""

from __future__ import annotations

import re

import pytest

from lmcache_stream import InvalidRequestError
from lmcache_stream.embedded.demo.recall_task import (
    NAMES,
    RecallTask,
    is_recalled,
    make_task,
    recall_prompt,
)

from .conftest import BOS, CharacterTokenizer

TASK = RecallTask(
    lines=("one", "two", "three"),
    facts=((0, "Alice", "1111"), (2, "Frank", "2222"), (2, "Grace", "3333")),
    asked=1,
)
TEXT = (
    "The secret code of Alice is 1111.\none\ntwo\n"
    "The secret code of Frank is 2222.\nThe secret code of Grace is 3333.\nthree\n"
)
ASKED = "What is the secret code of Frank?"


def text_of(ids: tuple[int, ...]) -> str:
    return "".join(map(chr, ids))


def test_facts_stand_before_their_lines() -> None:
    assert TASK.text() == TEXT
    assert (TASK.name, TASK.code, TASK.question) == ("Frank", "2222", ASKED)


@pytest.mark.parametrize(
    ("template", "begin", "end"),
    [
        ("<user>{content}</user><assistant>", "<user>", "</user><assistant>The secret code of Frank is"),
        (None, chr(BOS), "\nAnswer: The secret code of Frank is"),
    ],
)
def test_a_prompt_ends_with_the_answer_s_first_words(template: str | None, begin: str, end: str) -> None:
    prompt = recall_prompt(CharacterTokenizer(chat_template=template), TASK)
    assert text_of(prompt.token_ids) == f"{begin}{TEXT}\nQuestion: {ASKED}{end}"
    fact = prompt.token_ids[prompt.fact.start : prompt.fact.stop]
    assert text_of(fact) == "The secret code of Frank is 2222."
    assert text_of(prompt.token_ids[prompt.question_start :]).startswith("Question: ")


def test_a_template_that_changes_the_text_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="chat template changes the text"):
        recall_prompt(CharacterTokenizer(chat_template="<user>nothing</user>"), TASK)


def test_tasks_of_many_seeds() -> None:
    tokenizer = CharacterTokenizer()
    asked: set[int] = set()
    places: set[float] = set()
    for seed in range(30):
        task = make_task(tokenizer, seed=seed, prompt_tokens=2000)
        assert task == make_task(tokenizer, seed=seed, prompt_tokens=2000)
        prompt = recall_prompt(tokenizer, task)
        # A line of the documentation has at most some 80 characters.
        assert 1900 < len(prompt.token_ids) <= 2000
        found = re.findall(r"^The secret code of (\w+) is (\d{4})\.$", task.text(), re.MULTILINE)
        assert found == [(name, code) for _, name, code in task.facts]
        assert len({name for name, _ in found} & set(NAMES)) == len({code for _, code in found}) == 4
        asked.add(task.asked)
        places.update(place / len(task.lines) for place, _, _ in task.facts)
    assert asked == {0, 1, 2, 3}
    assert min(places) < 0.1
    assert max(places) > 0.9


def test_a_prompt_without_room_for_a_text_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="300 tokens has no room"):
        make_task(CharacterTokenizer(), seed=0, prompt_tokens=300)


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        (" 1234.", True),
        ("1234", True),
        ("\n1234 and", True),
        (" 12345", False),
        (" 123", False),
        (" not 1234", False),
        ("", False),
    ],
)
def test_an_answer_must_begin_with_the_code(answer: str, is_right: bool) -> None:
    assert is_recalled(answer, "1234") is is_right
