"""How a document and a question become a prompt of whole chunks."""

from __future__ import annotations

from typing import Any

__all__ = ["DocumentPrompt"]

_CONTENT = "document and question"


class DocumentPrompt:
    """Makes prompts with one tokenizer, in one thread at a time.

    Args:
        tokenizer: that of the model.
        chunk_size: tokens of a chunk of the cache.
    """

    def __init__(self, tokenizer: Any, chunk_size: int) -> None:
        self._tokenizer = tokenizer
        self._chunk_size = chunk_size
        head, tail = "", "\nAnswer:"
        if getattr(tokenizer, "chat_template", None):
            messages = [{"role": "user", "content": _CONTENT}]
            rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            head, _, tail = rendered.partition(_CONTENT)
            # A chat template writes the special tokens of the beginning itself.
            self._head = self._encode(head)
        else:
            self._head = list(self._tokenizer(head)["input_ids"])
        self._tail = self._encode(tail)
        self._filler = self._encode("\n")[-1:]

    def __call__(self, document: str, question: str) -> list[int]:
        """Return token ids: the question stands last, where policies that look at attention see it.

        Newlines before it fill the prompt up to whole chunks, since only these can be edited.
        """
        text = self._encode_text(document.strip())
        asked = [*self._encode_text(f"\n\nQuestion: {question.strip()}"), *self._tail]
        missing = -(len(self._head) + len(text) + len(asked)) % self._chunk_size
        return [*self._head, *text, *self._filler * missing, *asked]

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _encode_text(self, text: str) -> list[int]:
        # What a client writes is text, also where it looks like the end of a turn.
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)
        return list(encoded["input_ids"])
