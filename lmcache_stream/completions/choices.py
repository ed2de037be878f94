"""From the data of a stream's events to tokens: vLLM's ``/v1/completions`` chunks, typed.

Only the fields that are needed are decoded. The others are passed over unread, such as the whole
prompt that the first chunk repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from ..errors import EngineStreamError, TruncatedStreamError
from .events import FinishEvent, TokenEvent
from .problems import problem

__all__ = ["ChoiceDecoder"]

_TokenId = Annotated[int, msgspec.Meta(ge=0)]
_TOKEN_ID_PREFIX = "token_id:"
_NO_IDS = (
    "token ids are needed: vLLM sends them from 0.10.2 on (return_token_ids); with an older one add "
    '"logprobs": 0 and "return_tokens_as_token_ids": True to the sampling parameters'
)


class _Logprobs(msgspec.Struct, gc=False):
    tokens: list[str] | None = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    text: str | None = None
    token_ids: list[_TokenId] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: _Logprobs | None = None


class _PromptDetails(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class ChoiceDecoder:
    """Decodes the events of one pass.

    Attributes:
        token_ids: every id received, in order.
        finish_reason: the engine's, once it came.
        stop_reason: the stop string or token id that ended the pass, where one did.
        ended: nothing more is to come.
    """

    def __init__(self, endpoint: str) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.ended = False
        self._endpoint = endpoint
        self._usage: _Usage | None = None
        self._text = ""

    def feed(self, data: bytes, arrived: float | None = None) -> Sequence[TokenEvent]:
        """Take the data of one event and return its tokens, the text on the last of them.

        Raises:
            EngineStreamError: the engine reports an error, or its data cannot be understood.
        """
        try:
            chunk = _decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return self._not_a_chunk(data, error)
        choices = chunk.choices
        if len(choices) == 1 and chunk.error is None:
            choice = choices[0]
            ids = choice.token_ids
            if (
                ids is not None
                and len(ids) == 1
                and choice.finish_reason is None
                and choice.index == 0
                and not self._text
            ):
                token = ids[0]
                self.token_ids.append(token)
                return (TokenEvent(token, choice.text or "", arrived),)
        return self._feed_slowly(chunk, data, arrived)

    def _feed_slowly(self, chunk: _Chunk, data: bytes, arrived: float | None) -> Sequence[TokenEvent]:
        if chunk.error is not None:
            raise self.error(f"the engine reported an error: {problem(data)}")
        if not chunk.choices and chunk.usage is None:
            self._refuse_flat_error(data)
        if chunk.usage is not None:
            self._usage = chunk.usage
            self.ended = self.finish_reason is not None and not chunk.choices
        tokens: list[TokenEvent] = []
        for choice in chunk.choices:
            tokens += self._tokens(choice, arrived)
        return tokens

    def _tokens(self, choice: _Choice, arrived: float | None) -> list[TokenEvent]:
        if choice.index != 0:
            raise self.error(f"the engine sent choice {choice.index} of a request for one: send n=1")
        ids = choice.token_ids
        if ids is None:
            ids = self._ids_of_logprobs(choice)
        self._text += choice.text or ""
        self.token_ids += ids
        tokens: list[TokenEvent] = []
        if ids:
            tokens += [TokenEvent(token, "", arrived) for token in ids[:-1]]
            tokens.append(TokenEvent(ids[-1], self._text, arrived))
            self._text = ""
        if choice.finish_reason is not None:
            if choice.finish_reason in ("abort", "error"):
                raise self.error(
                    f"the engine ended the pass with finish reason {choice.finish_reason!r}: "
                    "it was cancelled there or failed, see the engine's log"
                )
            self.finish_reason = choice.finish_reason
            self.stop_reason = choice.stop_reason
        return tokens

    def _ids_of_logprobs(self, choice: _Choice) -> list[int]:
        tokens = choice.logprobs.tokens if choice.logprobs is not None else None
        if tokens is None:
            if choice.text:
                raise self.error(f"the engine sent text without token ids; {_NO_IDS}")
            return []
        ids = []
        for token in tokens:
            number = token.removeprefix(_TOKEN_ID_PREFIX)
            if number == token or not number.isdecimal():
                raise self.error(f"the engine sent the token {token!r} without its id; {_NO_IDS}")
            ids.append(int(number))
        return ids

    def finish(self, *, why: str = "") -> FinishEvent:
        """Return how the pass ended; ``why`` says what ended the stream, for the error.

        Raises:
            TruncatedStreamError: no finish reason came, whatever else did.
            EngineStreamError: the engine counts other tokens than it sent.
        """
        if self.finish_reason is None:
            raise TruncatedStreamError(
                f"{self._endpoint}: the stream ended without a finish reason after "
                f"{len(self.token_ids)} tokens{why and f' ({why})'}: the answer is not complete; "
                "see the engine's log, and any proxy between",
                token_ids=self.token_ids,
            )
        usage = self._usage or _Usage()
        counted = usage.completion_tokens
        if counted is not None and counted != len(self.token_ids):
            advice = "what is missing cannot be known" if self.token_ids else _NO_IDS
            raise self.error(
                f"the engine counts {counted} decoded tokens and sent the ids of "
                f"{len(self.token_ids)}: {advice}"
            )
        details = usage.prompt_tokens_details
        return FinishEvent(
            reason=self.finish_reason,
            text=self._text,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=counted,
            cached_tokens=details.cached_tokens if details is not None else None,
        )

    def _not_a_chunk(self, data: bytes, error: Exception) -> Sequence[TokenEvent]:
        stripped = data.strip()
        if stripped == b"[DONE]":
            # It says nothing about how the pass ended: vLLM sends it after errors too.
            self.ended = True
        elif stripped:
            raise self.error(
                f"the engine sent what is no completion chunk ({error}): {problem(data)!r}"
            ) from error
        return ()

    def _refuse_flat_error(self, data: bytes) -> None:
        said = msgspec.json.decode(data)
        if said.get("object") == "error" or "message" in said:
            raise self.error(f"the engine reported an error: {problem(data)}")

    def error(self, message: str) -> EngineStreamError:
        """Return an error of this pass with the ids so far."""
        return EngineStreamError(f"{self._endpoint}: {message}", token_ids=self.token_ids)
