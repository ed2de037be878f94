"""Dropping tokens from KV: the kept rows, moved to contiguous positions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._checks import checked_token_ids
from ..errors import InvalidRequestError
from ..rope import RopeConfig, rotate_keys

__all__ = ["drop_tokens"]


def drop_tokens(
    kv: Tensor, tokens: Sequence[int], kept: Tensor, rope: RopeConfig
) -> tuple[Tensor, list[int]]:
    """Keep some tokens of a prefix and close the gaps.

    The kept tokens get the positions ``0 .. n - 1``: their keys are rotated there, their values are
    copied. ``kv`` is only read, and each kept row is read and written once, but for the keys' pass
    through a few MiB of working memory.

    Args:
        kv: ``[2, L, T, D]``, the tokens at the positions ``0 .. T - 1``; bfloat16, float16, float32
            or float64, any strides.
        tokens: the ``T`` token ids.
        kept: int64 ``[n]``, strictly increasing indices of the tokens to keep.
        rope: how the model rotates its keys.

    Returns:
        A new contiguous ``[2, L, n, D]`` that shares nothing with ``kv``, and its ``n`` token ids.

    Raises:
        InvalidRequestError: shapes, ids and indices do not fit each other.
        GeometryError: the keys do not fit ``rope``.
    """
    ids = checked_token_ids(tokens, "tokens")
    if kv.dim() != 4 or kv.shape[0] != 2 or kv.shape[2] != len(ids):
        raise InvalidRequestError(f"kv of shape {tuple(kv.shape)} is not [2, L, T, D] of {len(ids)} tokens")
    if kept.dim() != 1 or kept.dtype != torch.int64:
        raise InvalidRequestError(f"kept must be int64 [n], not {kept.dtype} {tuple(kept.shape)}")
    if bool((kept < 0).any() | (kept >= len(ids)).any() | (kept.diff() < 1).any()):
        raise InvalidRequestError(f"kept must increase strictly within the {len(ids)} tokens")
    out = torch.empty((2, kv.shape[1], len(kept), kv.shape[3]), dtype=kv.dtype, device=kv.device)
    rotate_keys(kv[0], kept, torch.arange(len(kept)), rope, select=kept, out=out[0])
    # Values do not turn; rows that move by nothing are copied.
    rotate_keys(kv[1], kept, kept, rope, select=kept, out=out[1])
    return out, [ids[index] for index in kept.tolist()]
