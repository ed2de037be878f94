"""``mla``: the latent of multi-head latent attention. Retrieved as it is, never stored."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from ...errors import LayoutError
from ..geometry import KVGeometry
from .base import LayoutCodec

__all__ = ["MLA"]


class MLA(LayoutCodec):
    """``[L, c, D]``, one latent a token and no K and V; decoded to ``[1, L, c, D]``.

    ``D`` is the geometry's ``hidden_size``: one head as wide as the latent (DeepSeek: 512 + 64).
    """

    name: ClassVar[str] = "mla"
    single_plane: ClassVar[bool] = True
    has_planes: ClassVar[bool] = False

    def hidden_dim_size(self, geometry: KVGeometry) -> int:
        """Return the width of the latent."""
        return geometry.hidden_size

    def kv_shape(self, geometry: KVGeometry, num_tokens: int) -> tuple[int, int, int, int]:
        """Return ``[1, L, T, D]``: there is a single plane."""
        return (1, geometry.num_layers, num_tokens, geometry.hidden_size)

    def _decode(self, chunk: Tensor, out: Tensor, geometry: KVGeometry) -> None:
        out[0].copy_(chunk)

    def _encode(self, kv: Tensor, chunk: Tensor, geometry: KVGeometry) -> None:
        raise LayoutError(
            "layout mla: a latent cannot be edited like K and V; it is retrieved only, never stored"
        )
