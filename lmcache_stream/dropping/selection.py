"""From scores to the indices that are kept; pure."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InvalidRequestError

__all__ = ["budget_of", "highest"]


def budget_of(num_tokens: int, chunk_size: int, *, ratio: float | None, budget: int | None) -> int:
    """Return how many of ``num_tokens`` to keep: whole chunks, at least one, at most all.

    The cache holds whole chunks only: a remainder would be kept and computed anew.

    Args:
        num_tokens: length of the prefix, whole chunks.
        chunk_size: tokens of a chunk.
        ratio: the share to drop; the number that is left is rounded to the nearest chunk.
        budget: or the number to keep; rounded down to whole chunks.

    Raises:
        InvalidRequestError: ``budget`` is less than one chunk.
    """
    if budget is None:
        assert ratio is not None
        chunks = round(num_tokens * (1 - ratio) / chunk_size)
    else:
        chunks = budget // chunk_size
        if not chunks:
            raise InvalidRequestError(
                f"budget={budget} is less than one chunk of {chunk_size} tokens: nothing could be stored"
            )
    return min(max(chunks, 1) * chunk_size, num_tokens)


def highest(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the ``count`` highest scores (``[T]``), in order; of equals the later ones.

    Raises:
        InvalidRequestError: a score is NaN.
    """
    if bool(torch.isnan(scores).any()):
        raise InvalidRequestError("a score is NaN: no order of the tokens follows from it")
    # Stable, over the reversed scores: of equal ones those of later tokens come first.
    order = scores.flip(0).sort(descending=True, stable=True).indices
    return (len(scores) - 1 - order[:count]).sort().values
