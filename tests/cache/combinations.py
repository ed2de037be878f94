"""Ways to decode and un-rotate layer 0: layouts, head splits, thetas and pairings, right and wrong."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmcache_stream.cache import layouts
from lmcache_stream.cache.geometry import KVGeometry
from lmcache_stream.errors import LayoutError
from lmcache_stream.rope import Pairing, RopeConfig

__all__ = [
    "EDITABLE",
    "Combination",
    "applicable",
    "chunk_of",
    "combinations",
    "decoded",
    "ropes_of",
    "shaped",
    "splits_of",
]

EDITABLE = ("two-plane", "fused", "cpu-vec", "cpu-amx")
THETAS = (1.0, 0.1, 10.0, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One way to read layer 0's keys.

    Attributes:
        name: of it, to tell which were judged wrongly.
        is_right: whether it is the one that they were written with.
        keys: ``[T, D]``, as decoded.
        geometry: by which they were decoded.
        rope: by which they are to be un-rotated.
    """

    name: str
    is_right: bool
    keys: Tensor
    geometry: KVGeometry
    rope: RopeConfig


def applicable(geometry: KVGeometry, chunk_size: int) -> list[str]:
    """Return the layouts that chunks of that geometry can have."""
    found = []
    for name in EDITABLE:
        try:
            layouts.get(name).check(dataclasses.replace(geometry, layout=name), chunk_size)
        except LayoutError:
            continue
        found.append(name)
    return found


def chunk_of(layer0: Tensor, geometry: KVGeometry) -> Tensor:
    """Return K and V of layer 0, ``[2, T, D]``, as a flat chunk of all tokens."""
    codec = layouts.get(geometry.layout)
    chunk = torch.empty(codec.chunk_shape(geometry, layer0.shape[1]), dtype=layer0.dtype)
    codec.encode(layer0[:, None], chunk, geometry)
    return chunk.flatten()


def decoded(chunk: Tensor, geometry: KVGeometry, count: int) -> Tensor:
    """Return ``[2, 1, T, D]`` of a flat chunk of one layer, whatever wrote it."""
    codec = layouts.get(geometry.layout)
    kv = torch.empty(geometry.kv_shape(count), dtype=chunk.dtype)
    codec.decode(chunk.view(codec.chunk_shape(geometry, count)), kv, geometry)
    return kv


def shaped(chunk: Tensor, geometry: KVGeometry, count: int) -> list[Tensor]:
    """Return a flat chunk in the shape that the geometry's layout has."""
    return [chunk.view(layouts.get(geometry.layout).chunk_shape(geometry, count))]


def splits_of(config: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """Return what a config says of the KV's heads, and other splits of as many elements."""
    heads, size = config["num_key_value_heads"], config["head_dim"]
    splits = {"right": (heads, size), "halves": (2 * heads, size // 2)}
    for joined in (2, 3):
        if heads % joined == 0:
            splits[f"{joined} heads as one"] = (heads // joined, joined * size)
    return {name: {"num_key_value_heads": h, "head_dim": s} for name, (h, s) in splits.items()}


def ropes_of(config: Mapping[str, Any]) -> dict[tuple[float, Pairing], RopeConfig]:
    """Return the rotations by factor of theta and by pairing; the right one is under ``1.0``."""
    parameters = config["rope_parameters"]
    found: dict[tuple[float, Pairing], RopeConfig] = {}
    pairings: tuple[Pairing, ...] = ("half", "interleaved")
    for factor, pairing in itertools.product(THETAS, pairings):
        changed = {**parameters, "rope_theta": parameters["rope_theta"] * factor}
        given = {**config, "rope_parameters": changed}
        found[factor, pairing] = RopeConfig.from_model_config(given, pairing=pairing)
    return found


def combinations(
    chunk: Tensor, written: KVGeometry, config: Mapping[str, Any], count: int
) -> Iterator[Combination]:
    """Yield every combination for a flat chunk of layer 0 that ``written`` describes.

    Args:
        chunk: of ``count`` tokens.
        written: its geometry, with one layer.
        config: the model's, with ``rope_parameters``, ``head_dim`` and ``num_key_value_heads``.
        count: tokens, whole blocks.
    """
    pairing = RopeConfig.from_model_config(config).pairing
    for split, sizes in splits_of(config).items():
        shape = dataclasses.replace(
            written, num_kv_heads=sizes["num_key_value_heads"], head_size=sizes["head_dim"]
        )
        ropes = ropes_of({**config, **sizes})
        for layout in applicable(shape, count):
            geometry = dataclasses.replace(shape, layout=layout)
            keys = decoded(chunk, geometry, count)[0, 0]
            for (factor, paired), rope in ropes.items():
                wrong = (layout != written.layout, split != "right", factor != 1, paired != pairing)
                name = f"read as {layout}, heads {split}, theta * {factor:g}, {paired}"
                yield Combination(name=name, is_right=not any(wrong), keys=keys, geometry=geometry, rope=rope)
