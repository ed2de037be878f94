"""The layer-0 self-check on retrieved KV, with the other layouts at hand for its message; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..errors import LayoutError
from ..rope import RopeConfig
from . import layouts
from .geometry import KVGeometry
from .selfcheck import check_layer0


def verify_layout(
    kv: torch.Tensor,
    tokens: Sequence[int],
    geometry: KVGeometry,
    rope: RopeConfig,
    *,
    chunk_size: int,
) -> float | None:
    """Return the spread of layer 0's keys in ``kv`` (``[2, L, T, D]``, T whole chunks).

    Returns None where too few tokens repeat to tell.

    Raises:
        LayoutError: the KV was not decoded as the engine wrote it, or RoPE is not what it rotates
            with: an edit would be silently wrong.
    """
    others = _other_layouts(kv, geometry, chunk_size)
    return check_layer0(kv[0, 0], tokens, rope, layout=geometry.layout, others=others)


def _other_layouts(
    kv: torch.Tensor, geometry: KVGeometry, chunk_size: int
) -> Iterator[tuple[str, torch.Tensor]]:
    # Every layout is a permutation of the same bytes, so the chunks can be had back from the KV.
    own = layouts.get(geometry.layout)
    shape = own.chunk_shape(geometry, chunk_size)
    for name, other in layouts.LAYOUTS.items():
        if other is own or other.chunk_shape(geometry, chunk_size) != shape:
            continue
        try:
            other.check(geometry, chunk_size)
        except LayoutError:
            continue
        chunk = torch.empty(shape, dtype=kv.dtype)
        decoded = torch.empty_like(kv)
        for start in range(0, kv.shape[2], chunk_size):
            end = start + chunk_size
            own.encode(kv[:, :, start:end], chunk, geometry)
            other.decode(chunk, decoded[:, :, start:end], geometry)
        yield name, decoded[0, 0]
