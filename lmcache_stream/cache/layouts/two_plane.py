"""``two-plane``: K and V in planes of their own, as engines with separate caches store them."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ..geometry import KVGeometry
from .base import LayoutCodec, split_heads

__all__ = ["TwoPlane"]


class TwoPlane(LayoutCodec):
    """``[2, L, c, D]``: the library's own form, so that a chunk is copied once and as it is."""

    name: ClassVar[str] = "two-plane"
    single_plane: ClassVar[bool] = False

    def _decode(self, chunk: Tensor, out: Tensor, geometry: KVGeometry) -> None:
        out.copy_(chunk)

    def _encode(self, kv: Tensor, chunk: Tensor, geometry: KVGeometry) -> None:
        chunk.copy_(kv)

    def planes(self, chunk: Tensor, geometry: KVGeometry) -> tuple[Tensor, Tensor]:
        """View both planes by heads; see the base class."""
        return split_heads(chunk[0], geometry), split_heads(chunk[1], geometry)
