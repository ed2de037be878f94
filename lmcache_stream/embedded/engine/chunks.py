"""The JSON of ``/v1/completions`` answers, whole and in server-sent events, as vLLM writes it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from .answer import Answer, Decoded
from .params import CompletionParams, CompletionRequest
from .problems import RequestError, error_object

__all__ = ["DONE", "AnswerWriter", "event", "failure"]

DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def failure(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return status and body of what went wrong."""
    if isinstance(error, RequestError):
        return error.status, error_object(str(error), error.kind, error.status, error.param)
    return 500, error_object("Internal server error", "InternalServerError", 500)


class AnswerWriter:
    """Writes one answer's events and objects."""

    def __init__(self, request: CompletionRequest, params: CompletionParams, served_name: str) -> None:
        self._with_ids = bool(request.return_token_ids)
        self._prompt = params.prompt
        self._is_first = True
        self._head = {
            "id": f"cmpl-{secrets.token_hex(16)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served_name,
        }

    def delta(self, decoded: Decoded) -> bytes:
        """Return the event of one token; the first repeats the prompt's ids where ids were asked for."""
        choice = self._choice(decoded.text, [decoded.token_id], decoded)
        if not self._is_first:
            choice.pop("prompt_token_ids", None)
        self._is_first = False
        return event({**self._head, "choices": [choice]})

    def usage(self, answer: Answer, count: int) -> bytes:
        """Return the last event, which has no choices."""
        return event({**self._head, "choices": [], "usage": self._usage(answer, count)})

    def whole(self, answer: Answer, decoded: Sequence[Decoded]) -> dict[str, Any]:
        """Return the object of an answer that is not streamed."""
        text = "".join(one.text for one in decoded)
        choice = self._choice(text, [one.token_id for one in decoded], decoded[-1])
        return {**self._head, "choices": [choice], "usage": self._usage(answer, len(decoded))}

    def _choice(self, text: str, ids: list[int], last: Decoded) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "text": text,
            "logprobs": None,
            "finish_reason": last.finish_reason,
            "stop_reason": last.stop_reason,
        }
        if self._with_ids:
            choice |= {"token_ids": ids, "prompt_token_ids": self._prompt}
        return choice

    def _usage(self, answer: Answer, count: int) -> dict[str, Any]:
        return {
            "prompt_tokens": len(self._prompt),
            "completion_tokens": count,
            "total_tokens": len(self._prompt) + count,
            "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        }
