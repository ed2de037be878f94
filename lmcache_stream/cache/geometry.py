"""The shape of one model's KV in the cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import GeometryError

__all__ = ["KVGeometry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """The shape, dtype and memory layout of a model's KV.

    Attributes:
        num_layers: attention layers.
        num_kv_heads: KV heads of one layer, over all workers.
        head_size: elements of one head of K or V.
        dtype: element type of the cache, which the engine may have been told to differ from the
            model's own.
        layout: name of the chunk layout: ``two-plane``, ``fused``, ``cpu-vec``, ``cpu-amx``, ``mla``,
            ``queries``.
        block_size: tokens of one block of the engine's paged cache; the CPU layouts permute within it.
        world_size: tensor-parallel workers; only 1 is supported.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype
    layout: str
    block_size: int
    world_size: int = 1

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_size", "block_size", "world_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise GeometryError(f"geometry: {name} must be a positive int, not {value!r}")
        if self.world_size != 1:
            raise GeometryError(f"geometry: {self.world_size} tensor-parallel workers; only 1 is supported")
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise GeometryError(f"geometry: dtype must be a floating torch.dtype, not {self.dtype!r}")
        if self.dtype.itemsize < 2:
            raise GeometryError(f"geometry: quantised KV ({self.dtype}) cannot be edited exactly")

    @property
    def hidden_size(self) -> int:
        """Elements of one token's K (or V) in one layer: ``num_kv_heads * head_size``."""
        return self.num_kv_heads * self.head_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's K and V over all layers."""
        return 2 * self.num_layers * self.hidden_size * self.dtype.itemsize

    def kv_shape(self, num_tokens: int) -> tuple[int, int, int, int]:
        """Shape ``[2, L, T, D]`` of the KV of ``num_tokens`` tokens in the library's own form."""
        return (2, self.num_layers, num_tokens, self.hidden_size)
