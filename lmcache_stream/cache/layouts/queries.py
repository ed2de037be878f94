"""``queries``: rotated attention queries, which LMCache keeps under ``<model>##query``."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ..geometry import KVGeometry
from .base import split_heads
from .mla import MLA

__all__ = ["Queries"]


class Queries(MLA):
    """``[L, c, D]`` with ``D`` the query heads times the head size: one plane, as it is, both ways."""

    name: ClassVar[str] = "queries"

    def load_layers(self, chunk: Tensor, layers: slice, geometry: KVGeometry) -> tuple[Tensor, Tensor]:
        """Return a view of the queries, in both places: there is no second plane."""
        rows = split_heads(chunk[layers], geometry)
        return rows, rows

    def _encode(self, kv: Tensor, chunk: Tensor, geometry: KVGeometry) -> None:
        chunk.copy_(kv[0])
