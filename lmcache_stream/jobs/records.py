"""Rows of a job's output: what a stream came to as JSON, and what is read of it again; pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import msgspec

from .._state import EditReport
from ..batch.outcome import StreamOutcome
from ..dropping import Policy, WholeChunks
from ..dropping.policy import DropPolicy
from .prompts import PromptRow
from .tokens import TextModel

__all__ = ["Head", "described", "encode_row", "read_head", "row_of"]

_METRICS = ("ttft", "tpot", "e2e_latency", "itl", "input_tokens", "output_tokens", "cached_tokens")
_KV = ("tokens_before", "tokens_after", "bytes_before", "bytes_after", "seconds", "recomputed_tokens")
# The first bytes of every row: a line that was cut can be told from another program's.
_BEGINNING = b'{"id":'


class Head(msgspec.Struct, frozen=True):
    """What a job reads of a row of its output.

    Attributes:
        id: of the row.
        line: of the prompts' file.
        policy: what edited the KV; None for none.
        model: the model's name in the engine.
        token_ids: not read, but it must be there.
        text: not read, but it must be there.
        error: null where the row did not fail.
    """

    id: str | int
    line: int
    policy: str | None
    model: str
    token_ids: msgspec.Raw
    text: msgspec.Raw
    error: msgspec.Raw

    @property
    def is_failed(self) -> bool:
        """Whether a stream of the row failed."""
        return bytes(self.error) != b"null"


_heads = msgspec.json.Decoder(Head)


def read_head(text: bytes) -> Head | None:
    """Read a line of an output; None where it is no row of a job."""
    try:
        return _heads.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def is_beginning(text: bytes) -> bool:
    """Tell whether ``text``, a line without its end, can be the beginning of a row."""
    return text.startswith(_BEGINNING) or _BEGINNING.startswith(text)


def described(policy: Policy | None) -> str | None:
    """Return a policy as text: its share or budget, what it always keeps, and what is not as usual."""
    if isinstance(policy, WholeChunks):
        return f"WholeChunks({described(policy.policy)}, {policy.size})"
    if not isinstance(policy, DropPolicy):
        return None if policy is None else repr(policy)
    usual = {each.name for each in fields(DropPolicy)}
    shown = [
        f"{each.name}={value!r}"
        for each in fields(policy)
        if (value := getattr(policy, each.name)) is not None and (each.name in usual or value != each.default)
    ]
    return f"{type(policy).__name__}({', '.join(shown)})"


def row_of(
    row: PromptRow,
    token_ids: Sequence[int],
    outcome: StreamOutcome,
    baseline: StreamOutcome | None,
    *,
    policy: str | None,
    model: str,
    text_model: TextModel | None,
) -> dict[str, Any]:
    """Return a row of the output.

    Args:
        row: what was asked.
        token_ids: the prompt.
        outcome: what came of it, prefill, edit and decoding together.
        baseline: what came of decoding from the whole KV, where that was wanted.
        policy: see ``described``.
        model: the model's name in the engine.
        text_model: what makes text of the prompt's tokens.
    """
    failed, phase = outcome.error, outcome.failed_phase
    if failed is None and baseline is not None and baseline.error is not None:
        failed, phase = baseline.error, "baseline"
    decode, edit = outcome.decode, outcome.edit
    answer: dict[str, Any] = {
        "id": row.row_id,
        "line": row.line,
        "policy": policy,
        "model": model,
        "prompt_tokens": len(token_ids),
        "text": outcome.text,
        "token_ids": outcome.token_ids,
        "finish_reason": decode.finish_reason if decode else None,
        "error": None if failed is None else _error(failed, phase),
        "kv": None if edit is None else {name: getattr(edit, name) for name in _KV},
        "pieces": None if text_model is None else _pieces(text_model, token_ids, edit),
        "metrics": {name: getattr(decode, name, None) for name in _METRICS}
        | {
            "prefill_ttft": outcome.prefill.ttft if outcome.prefill else None,
            "edit_time": edit.seconds if edit else None,
            "queue_time": outcome.queue_time,
            "seconds": outcome.seconds,
            "attempts": outcome.attempts,
        },
        "baseline": None if baseline is None else _baseline(baseline),
    }
    if row.extra:
        answer["extra"] = row.extra
    return answer


def encode_row(answer: dict[str, Any]) -> bytes:
    """Return a row as one line, with its end."""
    return msgspec.json.encode(answer) + b"\n"


def _error(error: BaseException, phase: str | None) -> dict[str, Any]:
    return {"type": type(error).__name__, "message": " ".join(str(error).split()), "phase": phase}


def _baseline(outcome: StreamOutcome) -> dict[str, Any]:
    decode = outcome.decode
    return {
        "text": outcome.text,
        "token_ids": outcome.token_ids,
        "finish_reason": decode.finish_reason if decode else None,
        "ttft": decode.ttft if decode else None,
    }


def _pieces(
    text_model: TextModel, token_ids: Sequence[int], edit: EditReport | None
) -> list[tuple[str, bool]]:
    """Return the prompt as runs of text with whether they were kept, kept and dropped ones in turn."""
    whole = text_model.decode(token_ids)
    if edit is None or edit.kept_indices is None:
        return [(whole, True)]
    kept = {*edit.kept_indices, *range(edit.tokens_before, len(token_ids))}
    borders, flags = [], []
    for is_kept, run in itertools.groupby(range(len(token_ids)), kept.__contains__):
        borders.append(next(run))
        flags.append(is_kept)
    places = [*text_model.places(token_ids, whole, borders), len(whole)]
    pieces: list[tuple[str, bool]] = []
    for is_kept, (start, stop) in zip(flags, itertools.pairwise(places), strict=True):
        if start == stop:
            # A part of a character, which belongs to the run where it ends.
            continue
        text = whole[start:stop]
        if pieces and pieces[-1][1] == is_kept:
            text = pieces.pop()[0] + text
        pieces.append((text, is_kept))
    return pieces
