"""``fused``: K and V of a head side by side, as newer vLLM layouts for GPUs store them."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ..geometry import KVGeometry
from .base import LayoutCodec, split_heads

__all__ = ["Fused"]


class Fused(LayoutCodec):
    """``[L, c, num_kv_heads * 2 * head_size]``, for each head its K and then its V. One copy."""

    name: ClassVar[str] = "fused"
    single_plane: ClassVar[bool] = True

    def _decode(self, chunk: Tensor, out: Tensor, geometry: KVGeometry) -> None:
        for source, target in zip(self.planes(chunk, geometry), out, strict=True):
            split_heads(target, geometry).copy_(source)

    def _encode(self, kv: Tensor, chunk: Tensor, geometry: KVGeometry) -> None:
        for source, target in zip(kv, self.planes(chunk, geometry), strict=True):
            target.copy_(split_heads(source, geometry))

    def planes(self, chunk: Tensor, geometry: KVGeometry) -> tuple[Tensor, Tensor]:
        """View each head's halves; see the base class."""
        heads = chunk.view(*chunk.shape[:2], geometry.num_kv_heads, 2 * geometry.head_size)
        return heads[..., : geometry.head_size], heads[..., geometry.head_size :]
