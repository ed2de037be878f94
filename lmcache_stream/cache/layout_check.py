"""The layer-0 self-check on the chunks of a retrieved prefix, in one layout or in several; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import LayoutError
from ..rope import RopeConfig
from . import layouts
from .geometry import KVGeometry
from .selfcheck import MAX_SPREAD, check_layer0, measure_spread, repeated_rows

__all__ = ["find_layout", "layer0_rows", "verify_layout"]


def verify_layout(
    chunks: Sequence[Tensor], tokens: Sequence[int], geometry: KVGeometry, rope: RopeConfig
) -> float | None:
    """Return the spread of layer 0's keys in ``chunks``, which hold the prefix ``tokens``.

    Returns None where too few tokens repeat to tell.

    Raises:
        LayoutError: the KV is not in the geometry's layout, or RoPE is not what the engine rotates
            with: an edit would be silently wrong.
    """
    rows = repeated_rows(tokens)
    names = [name for name in candidates(geometry, tokens, chunks) if name != geometry.layout]
    return check_layer0(
        layer0_rows(chunks, rows, geometry),
        [tokens[row] for row in rows],
        rope,
        layout=geometry.layout,
        others=((name, layer0_rows(chunks, rows, replace(geometry, layout=name))) for name in names),
        positions=rows,
    )


def find_layout(
    chunks: Sequence[Tensor], tokens: Sequence[int], geometry: KVGeometry, rope: RopeConfig
) -> tuple[str, float]:
    """Return the one layout that ``chunks`` can have, and the spread of layer 0's keys in it.

    Raises:
        LayoutError: none fits, or too few tokens repeat to tell.
    """
    rows = repeated_rows(tokens)
    ids = [tokens[row] for row in rows]
    measured: dict[str, float] = {}
    for name in candidates(geometry, tokens, chunks):
        keys = layer0_rows(chunks, rows, replace(geometry, layout=name))
        spread = measure_spread(keys, ids, rope, positions=rows)
        if spread is None:
            raise LayoutError(
                "layout='auto': too few tokens of this prompt repeat to tell the layouts apart; give a "
                f"longer prompt, or name the layout: {', '.join(candidates(geometry, tokens, chunks))}"
            )
        measured[name] = spread
    best = min(measured, key=measured.__getitem__)
    if measured[best] > MAX_SPREAD:
        tried = ", ".join(f"{name} {spread:.2f}" for name, spread in measured.items())
        raise LayoutError(
            f"layout='auto': no layout fits; keys of equal tokens differ by {tried} (at most {MAX_SPREAD} "
            "when layout and RoPE are right): is the model config that of the engine?"
        )
    return best, measured[best]


def candidates(geometry: KVGeometry, tokens: Sequence[int], chunks: Sequence[Tensor]) -> Iterator[str]:
    """Yield the layouts with K and V that these chunks can have by their shape."""
    size = len(tokens) // len(chunks)
    for name, codec in layouts.LAYOUTS.items():
        try:
            codec.check(replace(geometry, layout=name), size)
        except LayoutError:
            continue
        if codec.has_planes and codec.chunk_shape(geometry, size) == tuple(chunks[0].shape):
            yield name


def layer0_rows(chunks: Sequence[Tensor], rows: Sequence[int], geometry: KVGeometry) -> Tensor:
    """Return ``[n, D]``: some tokens' keys of layer 0, or queries. Only chunks that hold them are read."""
    codec = layouts.get(geometry.layout)
    size = chunks[0].shape[-2]
    where = torch.tensor(rows, dtype=torch.int64)
    out = torch.empty((len(rows), geometry.hidden_size), dtype=geometry.dtype)
    for index in torch.unique(where // size).tolist():
        here = (where // size == index).nonzero().squeeze(1)
        keys, _ = codec.load_layer(chunks[index], 0, geometry)
        out[here] = keys[where[here] - index * size].flatten(1)
    return out
