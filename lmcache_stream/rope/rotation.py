"""Moving cached keys to new positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import GeometryError, InvalidRequestError
from .config import RopeConfig

__all__ = ["KeyMove", "rotate_keys"]

# Elements worked on at a time. Two float32 buffers of the larger size stay in a core's L2 cache, but
# from 32,768 elements on torch splits an operation among its threads. Waiting for those at each of
# thousands of short operations costs seconds where other processes want the cores as well (4 s for
# 54 ms of work were seen beside an engine on the CPU), so unless torch has a single thread here, no
# operation is large enough. To use more cores, edit in several threads.
_BLOCK = 1 << 17
_UNSPLIT_BLOCK = (1 << 15) - 1
# Rows whose cos and sin are computed together: those are split among threads at any size.
_SPAN = 4096
_KEY_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_POSITION_DTYPES = (torch.int64, torch.int32)

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
    heads = keys.shape[-1] // rope.head_size
    planes = list(zip(_planes(keys, rope), _planes(out, rope), strict=True))
    for first in range(0, len(deltas), _SPAN):
        last = min(first + _SPAN, len(deltas))
        rows = slice(first, last) if select is None else select[first:last]
        move = KeyMove(rope, deltas[first:last], rows, num_heads=heads, dtype=keys.dtype, device=keys.device)
        for source, target in planes:
            move.apply(source, target[first:last])
    return out


class KeyMove:
    """The rotation of some rows of keys, made once and applied to any number of layers.

    Attributes:
        is_still: whether no row moves, so that all are copied.

    Args:
        rope: how the model rotates.
        deltas: int64 ``[n]``, by how many tokens each row moves.
        rows: which rows of a source these are: int64 ``[n]``, or a slice.
        num_heads: of the layers' keys.
        dtype: of the layers' keys.
        device: of the layers' keys.
    """

    def __init__(
        self,
        rope: RopeConfig,
        deltas: Tensor,
        rows: Tensor | slice,
        *,
        num_heads: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        elements = _BLOCK if torch.get_num_threads() == 1 else _UNSPLIT_BLOCK
        step = max(1, elements // (num_heads * rope.head_size))
        shape = (min(step, len(deltas)), num_heads, rope.rotary_dim)
        computed = torch.promote_types(dtype, torch.float32)
        buffers = torch.empty((2, *shape), dtype=computed, device=device).unbind()
        self.is_still = not bool(deltas.any())
        self._blocks: list[tuple[slice, Tensor | slice, _Block]] = []
        for first, last in _spans(deltas):
            span = _Span(rope, deltas[first:last], buffers)
            for begin in range(first, last, step):
                end = min(begin + step, last)
                block = span.block(begin - first, end - first)
                self._blocks.append((slice(begin, end), _some(rows, begin, end), block))

    def apply(self, source: Tensor, target: Tensor) -> None:
        """Fill ``target``, ``[n, num_heads, head_size]``, from the rows of a ``source`` ``[T, ...]``."""
        for where, chosen, block in self._blocks:
            if isinstance(chosen, slice):
                block.rotate(source[chosen], target[where])
            elif block.is_still:
                torch.index_select(source, 0, chosen, out=target[where])
            else:
                block.rotate(source.index_select(0, chosen), target[where])


def _some(rows: Tensor | slice, begin: int, end: int) -> Tensor | slice:
    """Return a part of ``rows``: as a slice, which needs no copy to read, where they follow each other."""
    if isinstance(rows, slice):
        return slice(rows.start + begin, rows.start + end)
    part = rows[begin:end]
    if bool((part.diff() == 1).all()):
        return slice(int(part[0]), int(part[-1]) + 1)
    return part


def _deltas(from_positions: Positions, to_positions: Positions) -> Tensor:
    pair = []
    for name, given in (("from_positions", from_positions), ("to_positions", to_positions)):
        positions = torch.as_tensor(given)
        # torch takes an empty list for floats.
        if positions.dim() != 1 or (len(positions) and positions.dtype not in _POSITION_DTYPES):
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


def _planes(tensor: Tensor, rope: RopeConfig) -> Iterator[Tensor]:
    """Yield ``[..., T, D]`` as views ``[T, heads, head_size]``: one might not do for all strides."""
    if tensor.dim() == 2:
        yield tensor.view(len(tensor), tensor.shape[1] // rope.head_size, rope.head_size)
    else:
        for part in tensor.unbind(0):
            yield from _planes(part, rope)


def _spans(deltas: Tensor) -> Iterator[tuple[int, int]]:
    """Yield the ranges of rows before the first dropped token, which do not move, and behind it."""
    moving = (deltas != 0).nonzero()
    first_moving = int(moving[0]) if len(moving) else len(deltas)
    for start, stop in ((0, first_moving), (first_moving, len(deltas))):
        if start < stop:
            yield start, stop


class _Span:
    """Cos and sin of many rows."""

    def __init__(self, rope: RopeConfig, deltas: Tensor, buffers: tuple[Tensor, ...]) -> None:
        self._rope = rope
        self._deltas = deltas
        self._buffers = buffers
        dtype, device = buffers[0].dtype, buffers[0].device
        # Behind a dropped range all rows move by the same: one row of cos and sin does for them.
        distinct = deltas[:1] if bool((deltas == deltas[0]).all()) else deltas
        inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float64, device=device)
        angles = (distinct.to(inv_freq).unsqueeze(1) * inv_freq).unsqueeze(1)
        self._cos, self._sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def block(self, start: int, stop: int) -> _Block:
        """Return the rotation of some of the rows."""
        cos, sin = self._cos, self._sin
        if len(cos) > 1:
            cos, sin = cos[start:stop], sin[start:stop]
        return _Block(self._rope, self._deltas[start:stop], cos, sin, self._buffers)


class _Block:
    """The rotation of a few rows, the same in every layer.

    Args:
        rope: how the model rotates.
        deltas: ``[n]``, by how many tokens each row moves.
        cos, sin: ``[n or 1, 1, rotary_dim / 2]``, in the type to compute in.
        buffers: two to work in, of n rows or more, shared with other blocks.
    """

    def __init__(
        self, rope: RopeConfig, deltas: Tensor, cos: Tensor, sin: Tensor, buffers: tuple[Tensor, ...]
    ) -> None:
        self._dim = rope.rotary_dim
        self._is_partial = rope.rotary_dim < rope.head_size
        self._still = (deltas == 0).nonzero().squeeze(1).to(cos.device)
        self.is_still = len(self._still) == len(deltas)
        self._loaded, self._turned = (buffer[: len(deltas)] for buffer in buffers)
        # In real numbers for both pairings: torch rounds a product of complex numbers otherwise at the end
        # of a tensor than within it, so that the same row in another block would not have the same bits.
        if rope.pairing == "half":
            self._cos = torch.cat((cos, cos), dim=-1)
            self._parts = (*self._loaded.chunk(2, dim=-1), *self._turned.chunk(2, dim=-1))
        else:
            self._cos = cos.repeat_interleave(2, dim=-1)
            whole = (self._loaded, self._turned)
            self._parts = tuple(one[..., first::2] for one in whole for first in (0, 1))
        self._sin = sin

    def rotate(self, old: Tensor, new: Tensor) -> None:
        """Fill ``new``, ``[n, heads, head_size]``, from ``old``, which may be the same memory."""
        if self.is_still:
            _copy(old, new)
            return
        # Taken first, as new may be old.
        still = old[self._still] if len(self._still) else None
        if self._is_partial:
            _copy(old[..., self._dim :], new[..., self._dim :])
        self._loaded.copy_(old[..., : self._dim] if self._is_partial else old)
        (new[..., : self._dim] if self._is_partial else new).copy_(self._turn())
        if still is not None:
            new[self._still] = still

    def _turn(self) -> Tensor:
        first, second, new_first, new_second = self._parts
        torch.mul(self._loaded, self._cos, out=self._turned)
        new_first.addcmul_(second, self._sin, value=-1)
        new_second.addcmul_(first, self._sin)
        return self._turned


def _copy(source: Tensor, target: Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)
