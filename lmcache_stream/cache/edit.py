"""Dropping tokens from KV: the kept rows, moved to contiguous positions.

Whole (``drop_tokens``) or chunk by chunk (``drop_into``), with bit for bit the same result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._checks import checked_token_ids
from ..errors import InvalidRequestError
from ..rope import KeyMove, RopeConfig, rotate_keys
from .geometry import KVGeometry
from .layouts import LayoutCodec
from .prints import is_finite, plane_print

__all__ = ["drop_into", "drop_tokens"]


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
    check_kept(kept, len(ids))
    out = torch.empty((2, kv.shape[1], len(kept), kv.shape[3]), dtype=kv.dtype, device=kv.device)
    rotate_keys(kv[0], kept, torch.arange(len(kept)), rope, select=kept, out=out[0])
    # Values do not turn; rows that move by nothing are copied.
    rotate_keys(kv[1], kept, kept, rope, select=kept, out=out[1])
    return out, [ids[index] for index in kept.tolist()]


def check_kept(kept: Tensor, num_tokens: int) -> None:
    """Raise InvalidRequestError unless ``kept`` increases strictly within ``num_tokens`` tokens."""
    if kept.dim() != 1 or kept.dtype != torch.int64:
        raise InvalidRequestError(f"kept must be int64 [n], not {kept.dtype} {tuple(kept.shape)}")
    if bool((kept < 0).any() | (kept >= num_tokens).any() | (kept.diff() < 1).any()):
        raise InvalidRequestError(f"kept must increase strictly within the {num_tokens} tokens")


def drop_into(
    sources: Sequence[Tensor],
    kept: Tensor,
    index: int,
    target: Tensor,
    *,
    rope: RopeConfig,
    codec: LayoutCodec,
    geometry: KVGeometry,
) -> Tensor:
    """Fill one chunk of an edit from the chunks of the prefix.

    Args:
        sources: the prefix's chunks in the engine's layout, the tokens at the positions from 0 on.
        kept: int64 ``[n]``, strictly increasing indices of the tokens to keep.
        index: which chunk of the result ``target`` is: that of ``kept[index * c : (index + 1) * c]``.
        target: a chunk in the same layout, overwritten.
        rope: how the model rotates its keys.
        codec: the layout.
        geometry: of all chunks.

    Returns:
        Sums over K's and V's bits in the result: int64 ``[2]``; see ``fingerprint``.

    Raises:
        InvalidRequestError: the KV holds NaN or infinities; ``target`` is spoiled.
        LayoutError: the layout has no K and V.
    """
    size = sources[0].shape[-2]
    pieces = [
        (
            source,
            rows,
            where,
            KeyMove(
                rope,
                (torch.arange(where.start, where.stop) + index * size) - (rows + source * size),
                rows,
                num_heads=geometry.num_kv_heads,
                dtype=geometry.dtype,
            ),
        )
        for source, rows, where in _pieces(kept[index * size : (index + 1) * size], size)
    ]
    sums = torch.zeros(2, dtype=torch.int64)
    shape = (size, geometry.num_kv_heads, geometry.head_size)
    room = None if codec.is_strided else torch.empty((2, *shape), dtype=geometry.dtype)
    for layer in range(geometry.num_layers):
        keys, values = codec.load_layer(target, layer, geometry) if room is None else room
        for source, rows, where, move in pieces:
            old_keys, old_values = codec.load_layer(sources[source], layer, geometry)
            move.apply(old_keys, keys[where])
            _take(old_values, rows, values[where])
        for place, plane in enumerate((keys, values)):
            if not is_finite(plane):
                raise InvalidRequestError(
                    f"KV of layer {layer} holds NaN or infinities: an engine would decode nonsense from it"
                )
            sums[place] += plane_print(plane)
        if room is not None:
            codec.save_layer(keys, values, target, layer, geometry)
    return sums


def _pieces(kept: Tensor, size: int) -> Iterator[tuple[int, Tensor, slice]]:
    """Yield source chunk, rows in it, and their place in the target chunk."""
    chunks, counts = torch.unique_consecutive(kept // size, return_counts=True)
    start = 0
    for chunk, count in zip(chunks.tolist(), counts.tolist(), strict=True):
        yield chunk, kept[start : start + count] - chunk * size, slice(start, start + count)
        start += count


def _take(source: Tensor, rows: Tensor, target: Tensor) -> None:
    first, last = int(rows[0]), int(rows[-1])
    if last - first == len(rows) - 1:
        target.copy_(source[first : last + 1])
    else:
        torch.index_select(source, 0, rows, out=target)
