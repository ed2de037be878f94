"""``queries``: rotated attention queries, which LMCache keeps under ``<model>##query``."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ..geometry import KVGeometry
from .mla import MLA

__all__ = ["Queries"]


class Queries(MLA):
    """``[L, c, D]`` with ``D`` the query heads times the head size: one plane, as it is, both ways."""

    name: ClassVar[str] = "queries"

    def _encode(self, kv: Tensor, chunk: Tensor, geometry: KVGeometry) -> None:
        chunk.copy_(kv[0])
