"""Associative recall: facts scattered in a text, one of them asked; pure.

A policy that has dropped the fact cannot be right by luck: of 9,000 codes one is.
"""

from __future__ import annotations

import bisect
import pydoc_data.topics
import random
from dataclasses import dataclass
from typing import Any

from ...errors import InvalidRequestError
from .documents import chat_text

__all__ = ["NAMES", "RecallPrompt", "RecallTask", "is_recalled", "make_task", "recall_prompt"]

NAMES = (
    *("Alice", "Bernard", "Clara", "Daniel", "Edith", "Frank", "Grace", "Henry", "Irene", "Jacob"),
    *("Karen", "Louis", "Martha", "Norman", "Olivia", "Peter", "Quentin", "Rachel", "Simon", "Teresa"),
)
_FACTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallTask:
    """A text with facts in it, and which of them is asked.

    Attributes:
        lines: of the text, without the facts.
        facts: ``(place, name, code)`` in the order of the text: the fact stands before the line ``place``.
        asked: index of the fact that is asked.
    """

    lines: tuple[str, ...]
    facts: tuple[tuple[int, str, str], ...]
    asked: int

    @property
    def name(self) -> str:
        """Whose code is asked."""
        return self.facts[self.asked][1]

    @property
    def code(self) -> str:
        """The right answer."""
        return self.facts[self.asked][2]

    @property
    def question(self) -> str:
        """The question behind the text."""
        return f"What is the secret code of {self.name}?"

    @property
    def answer_start(self) -> str:
        """The words that the answer is given to begin with, so that the next one is the code."""
        return f"The secret code of {self.name} is"

    def text(self) -> str:
        """Return the text with the facts, each a line of its own."""
        return "".join(piece for piece, _ in self.pieces())

    def pieces(self) -> list[tuple[str, int | None]]:
        """Return the text in pieces, each with the index of the fact that it is, or None."""
        pieces: list[tuple[str, int | None]] = []
        start = 0
        for index, (place, name, code) in enumerate(self.facts):
            before = "".join(f"{line}\n" for line in self.lines[start:place])
            pieces += [(before, None), (_sentence(name, code), index), ("\n", None)]
            start = place
        pieces.append(("".join(f"{line}\n" for line in self.lines[start:]), None))
        return [piece for piece in pieces if piece[0]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallPrompt:
    """A task as token ids.

    Attributes:
        token_ids: the text, the question, and the answer's first words.
        fact: indices of the asked fact's sentence.
        question_start: index of the question's first token.
    """

    token_ids: tuple[int, ...]
    fact: range
    question_start: int


def make_task(tokenizer: Any, *, seed: int, prompt_tokens: int = 960) -> RecallTask:
    """Return the task of ``seed``: consecutive lines of Python's documentation, from a random one on, and
    four facts before random ones of them.

    Args:
        tokenizer: counts the tokens of a line.
        seed: chooses lines, names, codes, places and the fact that is asked.
        prompt_tokens: length of the whole prompt; lines are added up to it, so it is shorter by less than
            a line.

    Raises:
        InvalidRequestError: ``prompt_tokens`` leaves no room for a text.
    """
    chance = random.Random(seed)
    names = chance.sample(NAMES, _FACTS)
    codes = [str(code) for code in chance.sample(range(1000, 10000), _FACTS)]
    asked = chance.randrange(_FACTS)
    topics = pydoc_data.topics.topics
    source = "\n".join(topics[name] for name in sorted(topics)).splitlines()
    start = chance.randrange(len(source))
    facts = tuple((0, name, code) for name, code in zip(names, codes, strict=True))
    bare = RecallTask(lines=(), facts=facts, asked=asked)
    room = prompt_tokens - len(recall_prompt(tokenizer, bare).token_ids)
    lines = [source[(start + index) % len(source)] for index in range(max(0, room))]

    def tokens_of(count: int) -> int:
        return len(tokenizer("\n".join(lines[:count]), add_special_tokens=False)["input_ids"])

    count = bisect.bisect_right(range(len(lines) + 1), room, key=tokens_of) - 1
    if count < _FACTS:
        raise InvalidRequestError(
            f"a prompt of {prompt_tokens} tokens has no room for a text with {_FACTS} facts"
        )
    lines = lines[:count]
    places = sorted(chance.sample(range(len(lines)), _FACTS))
    facts = tuple((place, name, code) for place, (_, name, code) in zip(places, facts, strict=True))
    return RecallTask(lines=tuple(lines), facts=facts, asked=asked)


def recall_prompt(tokenizer: Any, task: RecallTask) -> RecallPrompt:
    """Return the task as a chat, or as plain text where the tokenizer has no chat template.

    Facts are tokenized apart from what is around them, so that their borders are exact with every tokenizer.

    Raises:
        InvalidRequestError: the chat template does not repeat the text as it is.
    """
    text, question = task.text(), f"Question: {task.question}"
    whole, templated = chat_text(tokenizer, f"{text}\n{question}")
    head, found, behind = whole.partition(text)
    if not found or not behind.startswith(f"\n{question}"):
        raise InvalidRequestError("the model's chat template changes the text: its facts cannot be placed")
    # A chat template writes the special tokens of the beginning itself.
    ids: list[int] = [*tokenizer(head, add_special_tokens=not templated)["input_ids"]]
    fact = range(0)
    for piece, index in [*task.pieces(), ("\n", None)]:
        start = len(ids)
        ids += tokenizer(piece, add_special_tokens=False)["input_ids"]
        if index == task.asked:
            fact = range(start, len(ids))
    question_start = len(ids)
    # Behind plain text the first word needs the space that a template's line break stands for.
    gap = "" if templated else " "
    tail = f"{behind[1:]}{gap}{task.answer_start}"
    ids += tokenizer(tail, add_special_tokens=False)["input_ids"]
    return RecallPrompt(token_ids=tuple(ids), fact=fact, question_start=question_start)


def is_recalled(answer: str, code: str) -> bool:
    """Return whether ``answer``, what was decoded behind the given words, begins with the code."""
    begun = answer.lstrip()
    return begun.startswith(code) and not begun[len(code) : len(code) + 1].isdigit()


def _sentence(name: str, code: str) -> str:
    return f"The secret code of {name} is {code}."
