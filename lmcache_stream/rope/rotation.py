"""Moving cached keys to new positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..errors import GeometryError, InvalidRequestError
from .config import RopeConfig

__all__ = ["rotate_keys"]

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
    planes = list(zip(_planes(keys, rope), _planes(out, rope), strict=True))
    elements = _BLOCK if torch.get_num_threads() == 1 else _UNSPLIT_BLOCK
    rows = max(1, elements // keys.shape[-1])
    for first, last in _spans(deltas):
        span = _Span(rope, deltas[first:last], keys)
        for begin in range(first, last, rows):
            end = min(begin + rows, last)
            block = span.block(begin - first, end - first)
            chosen = slice(begin, end) if select is None else _narrowed(select[begin:end])
            for source, target in planes:
                if isinstance(chosen, slice):
                    block.rotate(source[chosen], target[begin:end])
                elif block.is_still:
                    torch.index_select(source, 0, chosen, out=target[begin:end])
                else:
                    block.rotate(source.index_select(0, chosen), target[begin:end])
    return out


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


def _narrowed(rows: Tensor) -> Tensor | slice:
    """Return rows that follow each other as a slice, which needs no copy to read."""
    if bool((rows.diff() == 1).all()):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def _spans(deltas: Tensor) -> Iterator[tuple[int, int]]:
    """Yield ranges of at most ``_SPAN`` rows; those before the first dropped token keep apart."""
    moving = (deltas != 0).nonzero()
    first_moving = int(moving[0]) if len(moving) else len(deltas)
    for start, stop in ((0, first_moving), (first_moving, len(deltas))):
        for first in range(start, stop, _SPAN):
            yield first, min(first + _SPAN, stop)


class _Span:
    """Cos and sin of many rows."""

    def __init__(self, rope: RopeConfig, deltas: Tensor, keys: Tensor) -> None:
        self._rope = rope
        self._deltas = deltas
        self._width = keys.shape[-1]
        dtype = torch.promote_types(keys.dtype, torch.float32)
        # Behind a dropped range all rows move by the same: one row of cos and sin does for them.
        distinct = deltas[:1] if bool((deltas == deltas[0]).all()) else deltas
        inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float64, device=keys.device)
        angles = (distinct.to(inv_freq).unsqueeze(1) * inv_freq).unsqueeze(1)
        self._cos, self._sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def block(self, start: int, stop: int) -> _Block:
        """Return the rotation of some of the rows."""
        cos, sin = self._cos, self._sin
        if len(cos) > 1:
            cos, sin = cos[start:stop], sin[start:stop]
        return _Block(self._rope, self._deltas[start:stop], cos, sin, self._width)


class _Block:
    """The rotation of a few rows, the same in every layer, with its buffers.

    Args:
        rope: how the model rotates.
        deltas: ``[n]``, by how many tokens each row moves.
        cos, sin: ``[n or 1, 1, rotary_dim / 2]``, in the type to compute in.
        width: elements of a row.
    """

    def __init__(self, rope: RopeConfig, deltas: Tensor, cos: Tensor, sin: Tensor, width: int) -> None:
        self._is_half = rope.pairing == "half"
        self._dim = rope.rotary_dim
        self._is_partial = rope.rotary_dim < rope.head_size
        self._still = (deltas == 0).nonzero().squeeze(1).to(cos.device)
        self.is_still = len(self._still) == len(deltas)
        shape = (len(deltas), width // rope.head_size, self._dim)
        self._loaded: Tensor = torch.empty(shape, dtype=cos.dtype, device=cos.device)
        if self._is_half:
            self._cos, self._sin = torch.cat((cos, cos), dim=-1), sin
            self._turned: Tensor = torch.empty(shape, dtype=cos.dtype, device=cos.device)
            self._halves = (*self._loaded.chunk(2, dim=-1), *self._turned.chunk(2, dim=-1))
        else:
            self._spin = torch.complex(cos, sin)
            self._pairs = torch.view_as_complex(self._loaded.view(*shape[:2], -1, 2))

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
        if not self._is_half:
            self._pairs.mul_(self._spin)
            return self._loaded
        first, second, new_first, new_second = self._halves
        torch.mul(self._loaded, self._cos, out=self._turned)
        new_first.addcmul_(second, self._sin, value=-1)
        new_second.addcmul_(first, self._sin)
        return self._turned


def _copy(source: Tensor, target: Tensor) -> None:
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)
