"""Rotated attention queries, recorded while a model computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from ..errors import InvalidRequestError

__all__ = ["QUERY_ATTENTION", "recording", "register"]

QUERY_ATTENTION = "lmcache_stream_queries"
"""Name of the attention implementation that a recorded model is loaded with."""

# Of the forward pass that runs in this thread: each runs in a context of its own.
_recorded: ContextVar[list[Tensor] | None] = ContextVar("recorded", default=None)


@contextmanager
def recording() -> Iterator[list[Tensor]]:
    """Collect the queries of one forward pass, one ``[1, heads, T, head size]`` a layer, in order."""
    recorded: list[Tensor] = []
    token = _recorded.set(recorded)
    try:
        yield recorded
    finally:
        _recorded.reset(token)


def register() -> None:
    """Make the attention implementation known to transformers; idempotent.

    Raises:
        InvalidRequestError: transformers is missing.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise InvalidRequestError(
            "queries come from a Hugging Face model: pip install 'lmcache-stream[embedded]'"
        ) from error
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(module: Any, query: Tensor, *arguments: Any, **options: Any) -> Any:
        recorded = _recorded.get()
        if recorded is not None:
            recorded.append(query)
        return sdpa_attention_forward(module, query, *arguments, **options)

    AttentionInterface.register(QUERY_ATTENTION, attend)
    # Without a mask of its own, a chunk behind a cached prefix would see its own future.
    AttentionMaskInterface.register(QUERY_ATTENTION, sdpa_mask)
