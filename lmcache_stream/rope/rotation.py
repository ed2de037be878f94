"""Moving cached keys to new positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import GeometryError, InvalidRequestError
from .config import RopeConfig

__all__ = ["rotate_keys"]

# Elements worked on at a time. Two float32 buffers of this size stay in a core's L2 cache, and one
# torch operation on it still takes longer than its own overhead.
_BLOCK = 1 << 18
_KEY_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

Positions = Tensor | Sequence[int]


def rotate_keys(
    keys: Tensor,
    from_positions: Positions,
    to_positions: Positions,
    rope: RopeConfig,
    *,
    select: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Rotate cached keys from the positions they were made at to others.

    One rotation by ``(to - from) * inv_freq``, with the angle in float64 and the rotation in
    float32 (float64 for float64 keys). A key that does not move, and what ``rope`` does not rotate,
    is copied bit for bit. Beside the result, a few MiB of memory are used, whatever the size.

    Args:
        keys: ``[..., T, D]`` of any strides, ``D`` a multiple of ``rope.head_size``; bfloat16,
            float16, float32 or float64.
        from_positions: ``[n]``, the position of each result's key in the old sequence.
        to_positions: ``[n]``, its position in the new one.
        rope: how the model rotates.
        select: int64 ``[n]``, rows of ``keys`` to take; None takes all of them (``n = T``).
        out: ``[..., n, D]`` of the keys' dtype to write into. It may be ``keys`` itself where there
            is no ``select``, and must not overlap it otherwise.

    Returns:
        ``out``, or a new contiguous tensor.

    Raises:
        InvalidRequestError: shapes or positions do not fit each other.
        GeometryError: the keys' dtype or width does not fit ``rope``.
    """
    deltas = _deltas(from_positions, to_positions)
    _check(keys, deltas, rope, select)
    shape = (*keys.shape[:-2], len(deltas), keys.shape[-1])
    if out is None:
        out = torch.empty(shape, dtype=keys.dtype, device=keys.device)
    elif out.shape != shape or out.dtype != keys.dtype:
        raise InvalidRequestError(f"out must be {keys.dtype} of shape {shape}")
    planes = list(zip(_planes(keys), _planes(out), strict=True))
    worker = _Worker(rope, keys)
    for start in range(0, len(deltas), worker.block_rows):
        rows = slice(start, min(start + worker.block_rows, len(deltas)))
        worker.aim(deltas[rows])
        for source, target in planes:
            worker.rotate(source, target, rows, select)
    return out


def _deltas(from_positions: Positions, to_positions: Positions) -> Tensor:
    pair = []
    for name, given in (("from_positions", from_positions), ("to_positions", to_positions)):
        positions = torch.as_tensor(given)
        if positions.dim() != 1 or (len(positions) and positions.is_floating_point()):
            raise InvalidRequestError(f"{name} must be a flat sequence of ints")
        pair.append(positions.to(torch.int64))
    if len(pair[0]) != len(pair[1]):
        raise InvalidRequestError(f"{len(pair[0])} positions cannot move to {len(pair[1])}")
    return pair[1] - pair[0]


def _check(keys: Tensor, deltas: Tensor, rope: RopeConfig, select: Tensor | None) -> None:
    if keys.dtype not in _KEY_DTYPES:
        raise GeometryError(f"keys of {keys.dtype} cannot be rotated exactly")
    if keys.dim() < 2:
        raise InvalidRequestError(f"keys must be [..., T, D], not {tuple(keys.shape)}")
    tokens = keys.shape[-2]
    if select is not None and bool(((select < 0) | (select >= tokens)).any()):
        raise InvalidRequestError(f"select reaches outside of the {tokens} tokens")
    if len(deltas) != (tokens if select is None else len(select)):
        raise InvalidRequestError(f"{len(deltas)} positions do not fit keys of shape {tuple(keys.shape)}")
    if keys.shape[-1] % rope.head_size:
        raise GeometryError(f"keys of {keys.shape[-1]} elements do not divide into heads of {rope.head_size}")


def _planes(tensor: Tensor) -> Iterator[Tensor]:
    """Yield ``tensor`` as views ``[L, T, D]``; strides may not allow a single one."""
    if tensor.dim() == 2:
        yield tensor.unsqueeze(0)
    elif tensor.dim() == 3:
        yield tensor
    else:
        for part in tensor.unbind(0):
            yield from _planes(part)


class _Worker:
    """The rotation of one block of rows at a time, with its buffers."""

    def __init__(self, rope: RopeConfig, keys: Tensor) -> None:
        self._rope = rope
        self._dtype = torch.promote_types(keys.dtype, torch.float32)
        self._inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float64, device=keys.device)
        self._width = keys.shape[-1]
        self.block_rows = max(1, _BLOCK // self._width)
        size = self.block_rows * self._width
        self._loaded = torch.empty(size, dtype=self._dtype, device=keys.device)
        self._turned = torch.empty(size, dtype=self._dtype, device=keys.device)

    def aim(self, deltas: Tensor) -> None:
        """Set by how much each row of the next block is to be moved."""
        self._still = (deltas == 0).nonzero().squeeze(1)
        # Behind a dropped range all rows move by the same: one row of cos and sin does for them.
        distinct = deltas[:1] if bool((deltas == deltas[0]).all()) else deltas
        angles = distinct.to(self._inv_freq).unsqueeze(1) * self._inv_freq
        cos, sin = angles.cos().to(self._dtype), angles.sin().to(self._dtype)
        if self._rope.pairing == "half":
            self._cos, self._sin = torch.cat((cos, cos), dim=-1).unsqueeze(1), sin.unsqueeze(1)
        else:
            self._spin = torch.complex(cos, sin).unsqueeze(1)

    def rotate(self, keys: Tensor, out: Tensor, rows: slice, select: Tensor | None) -> None:
        """Fill ``out[:, rows]``, of ``[L, n, D]``, as many layers at a time as fit the buffers."""
        count = rows.stop - rows.start
        layers = max(1, len(self._loaded) // (count * self._width))
        for first in range(0, len(keys), layers):
            source, target = keys[first : first + layers], out[first : first + layers, rows]
            self._block(_take(source, rows, select), target)

    def _block(self, source: Tensor, target: Tensor) -> None:
        if len(self._still) == source.shape[1]:
            _copy(source, target)
            return
        # Taken first: target may be source.
        still = source[:, self._still] if len(self._still) else None
        heads = (*source.shape[:2], -1, self._rope.head_size)
        old, new = source.view(heads), target.view(heads)
        dim = self._rope.rotary_dim
        if dim < self._rope.head_size:
            _copy(old[..., dim:], new[..., dim:])
        old, new = old[..., :dim], new[..., :dim]
        loaded = self._loaded[: old.numel()].view(old.shape)
        loaded.copy_(old)
        new.copy_(self._turn(loaded))
        if still is not None:
            target[:, self._still] = still

    def _turn(self, loaded: Tensor) -> Tensor:
        """Return ``[L, n, heads, rotary_dim]`` rotated, in a buffer."""
        if self._rope.pairing == "interleaved":
            pairs = torch.view_as_complex(loaded.view(*loaded.shape[:-1], -1, 2))
            pairs.mul_(self._spin)
            return loaded
        half = loaded.shape[-1] // 2
        turned = self._turned[: loaded.numel()].view(loaded.shape)
        torch.mul(loaded, self._cos, out=turned)
        turned[..., :half].addcmul_(loaded[..., half:], self._sin, value=-1)
        turned[..., half:].addcmul_(loaded[..., :half], self._sin)
        return turned


def _take(keys: Tensor, rows: slice, select: Tensor | None) -> Tensor:
    """Return the wanted rows of ``[L, T, D]``: a view where they follow each other."""
    if select is None:
        return keys[:, rows]
    wanted = select[rows]
    first, last = int(wanted[0]), int(wanted[-1])
    if last - first + 1 == len(wanted) and bool((wanted.diff() == 1).all()):
        return keys[:, first : last + 1]
    return keys.index_select(1, wanted)


def _copy(source: Tensor, target: Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)
