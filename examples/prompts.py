"""The text of the token-dropping examples, and how it and a question become a prompt of whole chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmcache_stream.figures import Part

__all__ = ["Prompt", "build_prompt", "ferry_log"]

FACT = " The password of the harbour gate is marigold."
QUESTION = "What is the password of the harbour gate?"

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_ENTRY = "The ferry Margaret left at eight and came back at six. The sea was calm and nothing was reported."


def ferry_log() -> str:
    """Return the log of two weeks: the same entry every day, and ``FACT`` in one of them."""
    entries = [f"{day}. {_ENTRY}" for day in _DAYS * 2]
    entries[5] += FACT
    return "\n".join(entries)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids, and what its parts are."""

    question: str
    token_ids: list[int]
    parts: list[Part]


def build_prompt(
    tokenizer: Any, chunk_size: int, text: str | None = None, question: str | None = None
) -> Prompt:
    """Return a chat in which ``question`` is asked behind ``text``, or plain text without a chat template.

    Without a text it is the ferry's log; an empty question asks nothing.

    The cache holds whole chunks, so a policy neither sees nor drops what is behind the last one. Newlines
    in front of the question fill the prompt up to whole chunks: the question, by which SnapKV and R-KV
    judge the text, is then what they see last.
    """
    if question is None:
        question = QUESTION if text is None else "What is this text about?"
    text = (ferry_log() if text is None else text).strip()
    content = f"{text}\n\nQuestion: {question.strip()}" if question else text
    templated = bool(getattr(tokenizer, "chat_template", None))
    if templated:
        messages = [{"role": "user", "content": content}]
        whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    else:
        whole = f"{content}\nAnswer:" if question else f"{content}\n"
    head, found, tail = whole.partition(text)
    if not found:
        raise SystemExit("the model's chat template changes the text: its parts cannot be told apart")

    def encode(piece: str) -> list[int]:
        return list(tokenizer(piece, add_special_tokens=False)["input_ids"])

    before, fact, after = text.partition(FACT)
    # A chat template writes the special tokens of the beginning itself.
    opening = encode(head) if templated else list(tokenizer(head)["input_ids"])
    pieces = [
        ("template", opening),
        ("text", encode(before)),
        ("fact", encode(fact)),
        ("text", encode(after)),
        ("question" if question else "template", encode(tail)),
    ]
    filler = encode("\n")[-1:] * (-sum(len(ids) for _, ids in pieces) % chunk_size)
    pieces.insert(-1, ("filler", filler))
    token_ids: list[int] = []
    parts = []
    for name, ids in pieces:
        if ids:
            parts.append(Part(name, len(token_ids), len(token_ids) + len(ids), is_marked=name == "fact"))
        token_ids += ids
    return Prompt(question, token_ids, parts)
