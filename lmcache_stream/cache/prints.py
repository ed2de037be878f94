"""Looking at all bits of KV: is it finite, and is it what was stored?"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["fingerprint", "is_finite", "is_finite_kv", "plane_print"]

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements looked at together where torch would split more among threads (see rope/rotation.py).
_UNSPLIT = (1 << 15) - 1


def is_finite(plane: Tensor) -> bool:
    """Tell whether ``plane``, ``[n, ...]`` of any strides, holds neither NaN nor infinities."""
    return all(_is_finite(rows) for rows in _blocks(plane))


def is_finite_kv(kv: Tensor) -> bool:
    """Tell whether ``kv``, ``[2, L, T, D]`` of any strides, holds neither NaN nor infinities."""
    return all(is_finite(layer) for plane in kv for layer in plane)


def _is_finite(rows: Tensor) -> bool:
    # NaN and infinities stay in a sum, which is several times faster than looking at each element; where
    # numbers that are merely large add up to infinity, each is looked at after all. float16 ends too soon
    # for that to be rare.
    wide = torch.float32 if rows.dtype == torch.float16 else None
    return math.isfinite(rows.sum(dtype=wide).item()) or bool(rows.isfinite().all())


def plane_print(plane: Tensor) -> Tensor:
    """Return the sum, modulo 2^64, over the bits of ``plane``, ``[n, heads, head_size]`` of any strides.

    Eight bytes at a time where a head's bytes divide so: a scalar int64.
    """
    size = plane.dtype.itemsize
    word = 8 if plane.shape[-1] * size % 8 == 0 else size
    per_word = word // size
    steps = (plane.storage_offset(), *plane.stride()[:-1])
    if plane.stride(-1) != 1 or any(step % per_word for step in steps):
        plane = plane.contiguous() if not plane.is_contiguous() else plane.clone()
    sums = [rows.view(_INTEGERS[word]).sum() for rows in _blocks(plane)]
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum()


def _blocks(plane: Tensor) -> tuple[Tensor, ...]:
    if not len(plane) or torch.get_num_threads() == 1:
        return (plane,)
    rows = max(1, _UNSPLIT // max(1, plane[0].numel()))
    return torch.split(plane, rows)


def fingerprint(kv: Tensor, chunk_size: int, head_size: int) -> Tensor:
    """Return the sums over K's and V's bits of each chunk of ``kv`` (``[2, L, T, D]``): int64 ``[T / c, 2]``.

    They tell edited KV from the plain KV of the same tokens, not from what somebody made to look alike.
    """
    by_head = kv.view(*kv.shape[:-1], -1, head_size)
    rows = []
    for start in range(0, kv.shape[2], chunk_size):
        chunk = by_head[:, :, start : start + chunk_size]
        rows.append(torch.stack([torch.stack([plane_print(x) for x in plane]).sum() for plane in chunk]))
    return torch.stack(rows)
