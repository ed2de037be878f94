"""``cpu-vec``: vLLM on a CPU with float32 or float16, or with bfloat16 where there is no AMX."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ..geometry import KVGeometry
from .cpu_blocks import CPUBlocks

__all__ = ["CPUVec"]


class CPUVec(CPUBlocks):
    """Per block and head, K is ``[head_size, block_size]`` and V is ``[block_size, head_size]``.

    vLLM's kernels named ``vec`` and ``vec16`` write it (x86); those of other machines are unknown.
    """

    name: ClassVar[str] = "cpu-vec"

    def _keys(self, half: Tensor, geometry: KVGeometry) -> Tensor:
        split = half.view(*half.shape[:2], geometry.head_size, 1, geometry.block_size, 1)
        return split.permute(0, 1, 4, 5, 2, 3)

    def _values(self, half: Tensor, geometry: KVGeometry) -> Tensor:
        return half.view(*half.shape[:2], geometry.block_size, 1, geometry.head_size, 1)
