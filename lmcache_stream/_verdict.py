"""What the end of a pass says of it; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .completions import FinishEvent, TokenEvent
from .errors import EngineStreamError, InvalidRequestError

FAILURES = ("abort", "error")
"""Finish reasons that are no end of an answer."""

# What vLLM decodes where max_tokens is absent.
_DEFAULT_MAX_TOKENS = 16


def refuse_failure(finish: FinishEvent | None, token_ids: Sequence[int], sent: int) -> None:
    """Raise EngineStreamError where the engine gave up, or worked on another prompt than was sent."""
    if finish is None:
        return
    if finish.reason in FAILURES:
        raise EngineStreamError(
            f"the engine ended the pass with {finish.reason!r} after {len(token_ids)} tokens: see its log",
            token_ids=token_ids,
        )
    if finish.prompt_tokens is not None and finish.prompt_tokens != sent:
        raise EngineStreamError(
            f"the engine worked on {finish.prompt_tokens} prompt tokens, but {sent} were sent: does it, or a "
            "proxy before it, cut or change prompts?",
            token_ids=token_ids,
        )


def refuse_odd_token(event: TokenEvent) -> None:
    """Raise InvalidRequestError for an id or text that no engine decodes."""
    token_id, text = event.token_id, event.text
    is_id = isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0
    if not is_id or not isinstance(text, str) or not isinstance(event.arrived, float | int | None):
        raise InvalidRequestError(
            f"post_completion yielded {event!r}: a token id, text or time cannot be that"
        )


def is_done(finish: FinishEvent | None, num_tokens: int, params: Mapping[str, Any]) -> bool:
    """Return whether the model has finished: the reason says so, or, without one, the count."""
    if finish is not None and finish.reason is not None:
        return finish.reason != "length"
    limit = params.get("max_tokens")
    return num_tokens < (_DEFAULT_MAX_TOKENS if limit is None else int(limit))


def unused_edit(cached: int, edited: int, sent: int, cache_salt: str) -> str:
    """Return why the answer is not the edit's: too few tokens came from the cache; "" where it is.

    Of a prompt that is cached whole the engine computes the last token anew.
    """
    wanted = min(edited, sent - 1)
    if cached >= wanted:
        return ""
    return (
        f"the engine took {cached} tokens from the cache, not the {wanted} that were edited: the edited KV "
        f"under the salt {cache_salt!r} was gone, so this answer is not the edit's"
    )
