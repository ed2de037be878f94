"""What a PostCompletion yields, and what one is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec

__all__ = ["FinishEvent", "PostCompletion", "TokenEvent"]


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """One decoded token.

    Attributes:
        token_id: the engine's id of it, the truth about what was decoded.
        text: what it adds to the text; empty for a token whose text comes with a later one.
        arrived: ``time.perf_counter()`` when the event that carried it was read, in seconds, or
            None where the source does not say; ids of one event share one time.
    """

    token_id: int
    text: str = ""
    arrived: float | None = None


class FinishEvent(msgspec.Struct, frozen=True, gc=False):
    """How a pass ended; at most one, after the last token.

    Attributes:
        reason: the engine's finish reason (``stop``, ``length``, ...), or None where it gives none.
        text: text that belongs after the last token, where the engine sent some without an id.
        prompt_tokens: the engine's count of prompt tokens.
        completion_tokens: the engine's count of decoded tokens.
        cached_tokens: prompt tokens whose KV came from a cache, or None where it is not reported.
    """

    reason: str | None = None
    text: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class PostCompletion(Protocol):
    """Submits one pass to an engine and yields its events; an async generator function will do.

    Called with the prompt's token ids, the sampling parameters under the engine's names, and the
    cache salt ("" for none). Raises ``EngineError`` for what the engine does wrong and
    ``InvalidRequestError`` for what the caller does.
    """

    def __call__(
        self,
        prompt_token_ids: list[int],
        sampling_params: dict[str, Any],
        cache_salt: str,
        /,
    ) -> AsyncIterator[TokenEvent | FinishEvent]: ...
