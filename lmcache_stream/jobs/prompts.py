"""A line of a prompts' file, read; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from .._checks import checked_token_ids
from ..errors import InvalidRequestError

__all__ = ["BadRowError", "LineSplitter", "PromptRow", "check_tokens", "parse_row"]

_PROMPTS = ("prompt", "messages", "prompt_token_ids")
_BOM = b"\xef\xbb\xbf"
# Lists and objects within each other. A row that is read must be written, and read again with --resume and
# for a report, by threads whose stacks leave room for more of them or fewer.
_DEEPEST = 500


class BadRowError(Exception):
    """A row cannot be read, or is no prompt for the model; the others go on."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A row of a prompts' file; one of ``prompt``, ``messages`` and ``token_ids`` is there.

    Attributes:
        line: its line, counted from 1.
        row_id: as it was given; 1 and "1" are two ids.
        prompt: text.
        messages: a chat.
        token_ids: a prompt that is tokens already.
        extra: the row's other keys.
        size: bytes of the line.
    """

    line: int
    row_id: str | int
    prompt: str | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    token_ids: tuple[int, ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    size: int = field(default=0, compare=False)


class LineSplitter:
    """Makes lines of bytes that come in any pieces.

    Only a line feed ends a line, with or without a carriage return: JSON may hold what else Unicode has.
    """

    def __init__(self) -> None:
        self._begun: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the lines that ``piece`` ends, without their ends."""
        first, *others = piece.split(b"\n")
        self._begun.append(first)
        if not others:
            return []
        *whole, begun = b"".join(self._begun), *others
        self._begun = [begun]
        return [line.removesuffix(b"\r") for line in whole]

    def finish(self) -> list[bytes]:
        """Return the last line, where nothing ended it."""
        last, self._begun = b"".join(self._begun), []
        return [last] if last else []


def parse_row(text: bytes, line: int) -> PromptRow | None:
    """Read a line; None where it is empty.

    Raises:
        BadRowError: no row of a prompts' file.
    """
    size = len(text) + 1
    if line == 1:
        text = text.removeprefix(_BOM)
    if not text.strip():
        return None
    row = _object(text)
    row_id = row.pop("id", None)
    if row_id is None:
        raise BadRowError("no id")
    if isinstance(row_id, bool) or not isinstance(row_id, str | int):
        raise BadRowError(f"id={row_id!r} is neither a string nor an integer")
    given = {name: row.pop(name) for name in _PROMPTS if row.get(name) is not None}
    for name in _PROMPTS:
        row.pop(name, None)
    if not given:
        raise BadRowError(f"none of {', '.join(_PROMPTS)}")
    if len(given) > 1:
        raise BadRowError(f"{' and '.join(given)}: a row has one prompt")
    ((name, value),) = given.items()
    match name:
        case "prompt":
            if not isinstance(value, str):
                raise BadRowError(f"prompt is {_kind(value)}, no text")
            return PromptRow(line, row_id, prompt=value, extra=row, size=size)
        case "messages":
            return PromptRow(line, row_id, messages=_messages(value), extra=row, size=size)
        case _:
            return PromptRow(line, row_id, token_ids=_token_ids(value), extra=row, size=size)


def _object(text: bytes) -> dict[str, Any]:
    try:
        decoded = text.decode()
    except UnicodeDecodeError as error:
        raise BadRowError(f"no UTF-8: {error.reason} at byte {error.start + 1}") from error
    try:
        row = msgspec.json.decode(decoded)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadRowError(f"no JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadRowError(f"{_kind(row)}, no object")
    # A depth needs as many openings, of which few rows have so many.
    if text.count(b"[") + text.count(b"{") > _DEEPEST and _is_deeper(row, _DEEPEST):
        raise BadRowError(f"lists and objects are nested more than {_DEEPEST} deep")
    return row


def _is_deeper(value: Any, limit: int) -> bool:
    """Tell whether lists and objects are within each other more than ``limit`` deep."""
    level = [value]
    for _ in range(limit):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [each for one in inner for each in one if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def _messages(value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise BadRowError('messages is no list of {"role": ..., "content": ...}')
    if missing := [number for number, one in enumerate(value, 1) if not isinstance(one.get("role"), str)]:
        raise BadRowError(f"message {missing[0]} has no role")
    return tuple(value)


def _token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise BadRowError(f"prompt_token_ids is {_kind(value)}, no list of token ids")
    try:
        return tuple(checked_token_ids(value))
    except InvalidRequestError as error:
        raise BadRowError(str(error)) from error


def _kind(value: Any) -> str:
    names = {str: "a string", bool: "a boolean", type(None): "null", dict: "an object", list: "a list"}
    return names.get(type(value), "a number")


def check_tokens(token_ids: Sequence[int], *, vocab_size: int | None, max_model_len: int | None) -> None:
    """Raise BadRowError where the model cannot take a prompt.

    Args:
        token_ids: the prompt.
        vocab_size: the model's, where it is known.
        max_model_len: the model's longest sequence, where it is known.
    """
    if not token_ids:
        raise BadRowError("the prompt is empty")
    if max_model_len is not None and len(token_ids) >= max_model_len:
        raise BadRowError(
            f"the prompt has {len(token_ids)} tokens: there is no room for an answer in the model's "
            f"{max_model_len}"
        )
    if vocab_size is not None and (largest := max(token_ids)) >= vocab_size:
        raise BadRowError(f"token id {largest} is beyond the model's vocabulary of {vocab_size}")
