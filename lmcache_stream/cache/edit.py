"""Dropping tokens from KV: the kept rows, moved to contiguous positions.

Whole (``drop_tokens``) or chunk by chunk (``drop_into``), with bit for bit the same result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    pieces = list(_pieces(kept, index, size, rope, geometry))
    if codec.is_strided:
        return _drop_in_place(sources, target, pieces, codec, geometry)
    sums = torch.zeros(2, dtype=torch.int64)
    for layers in codec.layer_groups(target):
        shape = (2, layers.stop - layers.start, size, geometry.num_kv_heads, geometry.head_size)
        keys, values = torch.empty(shape, dtype=geometry.dtype)
        for piece in pieces:
            piece.fill(*codec.load_layers(sources[piece.source], layers, geometry), keys, values)
        for place, plane in enumerate((keys, values)):
            _check_finite(plane, first_layer=layers.start)
            sums[place] += plane_print(plane)
        codec.save_layers(keys, values, target, layers, geometry)
    return sums


@dataclass(frozen=True, slots=True)
class _Piece:
    """The rows of one source chunk that go to one place in the target chunk."""

    source: int
    rows: Tensor
    where: slice
    move: KeyMove

    def fill(self, old_keys: Tensor, old_values: Tensor, keys: Tensor, values: Tensor) -> None:
        """Fill the rows of some layers, each tensor ``[n, c, heads, head_size]``.

        What is only copied goes in one operation for all layers, so that side by side little time passes in
        Python.
        """
        _take(old_values, self.rows, values[:, self.where], dim=1)
        if self.move.is_still:
            _take(old_keys, self.rows, keys[:, self.where], dim=1)
            return
        for old, new in zip(old_keys, keys[:, self.where], strict=True):
            self.move.apply(old, new)


def _drop_in_place(
    sources: Sequence[Tensor],
    target: Tensor,
    pieces: Sequence[_Piece],
    codec: LayoutCodec,
    geometry: KVGeometry,
) -> Tensor:
    """Do ``drop_into`` between views of the chunks."""
    keys, values = codec.planes(target, geometry)
    for piece in pieces:
        piece.fill(*codec.planes(sources[piece.source], geometry), keys, values)
    for plane in (keys, values):
        _check_finite(plane)
    return torch.stack([plane_print(keys), plane_print(values)])


def _check_finite(plane: Tensor, first_layer: int = 0) -> None:
    """Raise unless ``plane``, ``[layers, c, heads, head_size]``, is finite."""
    if is_finite(plane):
        return
    layer = next(number for number, rows in enumerate(plane) if not is_finite(rows))
    raise InvalidRequestError(
        f"KV of layer {first_layer + layer} holds NaN or infinities: an engine would decode nonsense from it"
    )


def _pieces(kept: Tensor, index: int, size: int, rope: RopeConfig, geometry: KVGeometry) -> Iterator[_Piece]:
    """Yield what the target chunk ``index`` is made of."""
    here = kept[index * size : (index + 1) * size]
    chunks, counts = torch.unique_consecutive(here // size, return_counts=True)
    start = 0
    for source, count in zip(chunks.tolist(), counts.tolist(), strict=True):
        where = slice(start, start + count)
        rows = here[where] - source * size
        deltas = torch.arange(where.start, where.stop) + index * size - here[where]
        move = KeyMove(rope, deltas, rows, num_heads=geometry.num_kv_heads, dtype=geometry.dtype)
        yield _Piece(source, rows, where, move)
        start += count


def _take(source: Tensor, rows: Tensor, target: Tensor, *, dim: int) -> None:
    first, last = int(rows[0]), int(rows[-1])
    if last - first == len(rows) - 1:
        target.copy_(source.narrow(dim, first, len(rows)))
    else:
        torch.index_select(source, dim, rows, out=target)
