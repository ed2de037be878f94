"""From text and chats to token ids, and back; it blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from .._files import is_missing_folder
from ..errors import InvalidRequestError
from .prompts import BadRowError, PromptRow

__all__ = ["TextModel", "load_tokenizer"]

# Tokens in front of a piece that tell how it is written there, e.g. with a space or without.
_CONTEXT = 8
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextModel:
    """A transformers tokenizer, used by one thread at a time.

    Args:
        tokenizer: it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, row: PromptRow) -> list[int]:
        """Return the prompt of a row as token ids.

        Raises:
            BadRowError: it has messages and there is no chat template, or the tokenizer cannot take it.
        """
        try:
            if row.messages is None:
                return list(self._tokenizer(row.prompt)["input_ids"])
            if not getattr(self._tokenizer, "chat_template", None):
                raise BadRowError("messages, but the model's tokenizer has no chat template: use prompt")
            ids = self._tokenizer.apply_chat_template(
                list(row.messages), add_generation_prompt=True, return_dict=False
            )
            return list(ids)
        except BadRowError:
            raise
        except (KeyboardInterrupt, SystemExit):
            raise
        # Of transformers, the template's own code, or tokenizers, whose panics are no Exception.
        except BaseException as error:
            said = " ".join(str(error).split()) or type(error).__name__
            raise BadRowError(f"the tokenizer cannot take it: {said}") from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return text, special tokens and all."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def places(self, token_ids: Sequence[int], whole: str, borders: Sequence[int]) -> Iterator[int]:
        """Yield where in ``whole``, the text of ``token_ids``, the token at each of ``borders`` begins.

        A border within a character counts as one in front of it.

        Args:
            token_ids: the tokens.
            whole: their text.
            borders: increasing indices of tokens, the first of them 0.
        """
        place = length = 0
        yield place
        for start, stop in itertools.pairwise(borders):
            # Texts of tokens cannot simply be joined: what one looks like can depend on those before it.
            context = list(token_ids[max(0, start - _CONTEXT) : start])
            before = self.decode(context) if context else ""
            after = self.decode([*context, *token_ids[start:stop]])
            length += len(after) - len(before)
            incomplete = _incomplete(after)
            # Where there is nothing else, how many there are in front of the context cannot be seen in it.
            if incomplete < len(after):
                place = min(max(place, length - incomplete), len(whole))
            yield place


def _incomplete(text: str) -> int:
    """Return how many characters at the end may be parts of one."""
    return len(text) - len(text.rstrip(_REPLACEMENT))


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer of a model folder or Hub id.

    Raises:
        InvalidRequestError: transformers is missing, or has no such tokenizer.
    """
    try:
        from transformers import AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise InvalidRequestError(
            "a tokenizer needs transformers: pip install 'lmcache-stream[jobs]'"
        ) from error
    if is_missing_folder(name):
        raise InvalidRequestError(
            f"no tokenizer of {name!r} here (there is no such folder): --tokenizer names a folder or Hub id"
        )
    untyped: Any = logging
    # Its warning that a text is longer than the model takes: each such row is told anyway.
    untyped.set_verbosity_error()
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # Of transformers, tokenizers, or the tokenizer's own code.
        said = str(error).strip().splitlines()
        raise InvalidRequestError(
            f"no tokenizer of {name!r} here ({said[0] if said else type(error).__name__}): --tokenizer names "
            "a folder or Hub id"
        ) from error
