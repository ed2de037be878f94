"""``cpu-amx``: vLLM on a CPU with AMX, in bfloat16."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from ...errors import LayoutError
from ..geometry import KVGeometry
from .cpu_blocks import CPUBlocks

__all__ = ["CPUAmx"]

_TILE = 16
_MULTIPLE = 32


class CPUAmx(CPUBlocks):
    """Per block and head, K and V in tiles for AMX, which multiplies pairs of bfloat16.

    K is ``[block_size / 16][head_size / 2][16 tokens][2]``, V is ``[head_size / 16][block_size / 2]
    [16 dims][2 tokens]``.
    """

    name: ClassVar[str] = "cpu-amx"

    def check(self, geometry: KVGeometry, chunk_size: int) -> None:
        """Raise unless vLLM takes its AMX kernel for that geometry; see the base class."""
        if geometry.dtype is not torch.bfloat16:
            raise LayoutError(f"layout {self.name}: holds bfloat16 only, not {geometry.dtype}")
        for what, size in (("block", geometry.block_size), ("head", geometry.head_size)):
            if size % _MULTIPLE:
                raise LayoutError(
                    f"layout {self.name}: a {what} of {size} is not a multiple of {_MULTIPLE}: "
                    "vLLM uses cpu-vec there"
                )
        super().check(geometry, chunk_size)

    def _keys(self, half: Tensor, geometry: KVGeometry) -> Tensor:
        tiles, pairs = geometry.block_size // _TILE, geometry.head_size // 2
        return half.view(*half.shape[:2], tiles, pairs, _TILE, 2).permute(0, 1, 2, 4, 3, 5)

    def _values(self, half: Tensor, geometry: KVGeometry) -> Tensor:
        tiles, pairs = geometry.head_size // _TILE, geometry.block_size // 2
        return half.view(*half.shape[:2], tiles, pairs, _TILE, 2).permute(0, 1, 3, 5, 2, 4)
