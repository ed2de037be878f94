"""The texts of the demo, and how a text and its question become a prompt."""

from __future__ import annotations

import pydoc_data.topics
from dataclasses import dataclass
from typing import Any

from ...errors import InvalidRequestError

__all__ = ["Document", "Prompt", "build_prompt", "builtin_documents", "chat_text"]

# Topics of Python's own documentation, which every Python carries, with a question to each.
_TOPICS = {
    "with": "What does the with statement do? Answer in two sentences.",
    "raise": "What does the from clause of a raise statement do? Answer in two sentences.",
    "objects": "What are the identity, the type and the value of an object? Answer in two sentences.",
}
_LONGEST_TEXT = 6000


@dataclass(frozen=True, slots=True)
class Document:
    """A text, and a question that is asked behind it."""

    title: str
    text: str
    question: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A document as token ids; those from ``question_start`` on must not be dropped."""

    token_ids: tuple[int, ...]
    question_start: int


def builtin_documents(question: str | None = None) -> tuple[Document, ...]:
    """Return documents of 3,000 to 6,000 characters, each with its own question or with ``question``."""
    topics = pydoc_data.topics.topics
    return tuple(
        Document(f"Python's documentation: {name}", topics[name][:_LONGEST_TEXT], question or own)
        for name, own in _TOPICS.items()
    )


def build_prompt(tokenizer: Any, document: Document) -> Prompt:
    """Return the document as a chat, or as plain text where the tokenizer has no chat template.

    The text and the question are tokenized apart, so that the border between them is exact with every
    tokenizer.

    Raises:
        InvalidRequestError: the chat template does not repeat the question as it is.
    """
    question = f"Question: {document.question.strip()}"
    whole, templated = chat_text(tokenizer, f"{document.text.strip()}\n\n{question}")
    border = whole.rfind(question)
    if border < 0:
        raise InvalidRequestError("the model's chat template changes the question: the demo cannot keep it")
    # A chat template writes the special tokens of the beginning itself.
    head = tokenizer(whole[:border], add_special_tokens=not templated)["input_ids"]
    tail = tokenizer(whole[border:], add_special_tokens=False)["input_ids"]
    return Prompt((*head, *tail), len(head))


def chat_text(tokenizer: Any, content: str) -> tuple[str, bool]:
    """Return ``content`` as a user's turn that awaits its answer, and whether a chat template made it: then
    the special tokens of the beginning are in it."""
    if not getattr(tokenizer, "chat_template", None):
        return f"{content}\nAnswer:", False
    messages = [{"role": "user", "content": content}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False), True
