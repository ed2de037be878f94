"""The memory layouts of chunks: a codec a file, found by name."""

from __future__ import annotations

from ...errors import GeometryError
from .base import LayoutCodec
from .cpu_amx import CPUAmx
from .cpu_vec import CPUVec
from .formats import layout_of_format
from .fused import Fused
from .mla import MLA
from .queries import Queries
from .two_plane import TwoPlane

__all__ = ["LAYOUTS", "LayoutCodec", "get", "layout_of_format"]

LAYOUTS: dict[str, LayoutCodec] = {
    codec.name: codec for codec in (TwoPlane(), Fused(), CPUVec(), CPUAmx(), MLA(), Queries())
}


def get(layout: str) -> LayoutCodec:
    """Return the codec of a layout.

    Raises:
        GeometryError: there is none of that name.
    """
    codec = LAYOUTS.get(layout)
    if codec is None:
        raise GeometryError(f"unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")
    return codec
