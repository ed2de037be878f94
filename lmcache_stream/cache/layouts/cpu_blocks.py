"""What both layouts of vLLM's CPU engine have in common: blocks with a permuted interior.

The engine registers a block as ``[num_kv_heads, block_size, 2 * head_size]``, but per head those
elements are, flat, a half with K and a half with V, each in an order made for its attention kernel.
LMCache takes row ``s`` of that shape for token ``s`` and stores ``[L, c, num_kv_heads * 2 *
head_size]``.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from ..geometry import KVGeometry
from .base import LayoutCodec, split_heads

__all__ = ["CPUBlocks"]


class CPUBlocks(LayoutCodec):
    """A layer at a time through a small buffer, as no strides of a chunk describe the interior."""

    single_plane: ClassVar[bool] = True
    is_strided: ClassVar[bool] = False

    @abstractmethod
    def _keys(self, half: Tensor, geometry: KVGeometry) -> Tensor:
        """View the K half ``[blocks, heads, block_size * head_size]`` by tokens and dims.

        Returns ``[blocks, heads, tokens, tokens, dims, dims]``, both axes split into outer and
        inner; an inner axis may have the size 1.
        """

    @abstractmethod
    def _values(self, half: Tensor, geometry: KVGeometry) -> Tensor:
        """View the V half in the same way."""

    def load_layer(self, chunk: Tensor, layer: int, geometry: KVGeometry) -> tuple[Tensor, Tensor]:
        """Return copies of both halves; see the base class."""
        flat = torch.empty((2, chunk.shape[1], geometry.hidden_size), dtype=chunk.dtype, device=chunk.device)
        self._decode_layer(chunk[layer], flat[0], flat[1], geometry)
        return split_heads(flat[0], geometry), split_heads(flat[1], geometry)

    def save_layer(
        self, keys: Tensor, values: Tensor, chunk: Tensor, layer: int, geometry: KVGeometry
    ) -> None:
        """Write both halves; see the base class."""
        self._encode_layer(keys.flatten(1), values.flatten(1), chunk[layer], geometry)

    def _decode(self, chunk: Tensor, out: Tensor, geometry: KVGeometry) -> None:
        for layer in range(geometry.num_layers):
            self._decode_layer(chunk[layer], out[0, layer], out[1, layer], geometry)

    def _encode(self, kv: Tensor, chunk: Tensor, geometry: KVGeometry) -> None:
        for layer in range(geometry.num_layers):
            self._encode_layer(kv[0, layer], kv[1, layer], chunk[layer], geometry)

    def _decode_layer(self, layer: Tensor, keys: Tensor, values: Tensor, geometry: KVGeometry) -> None:
        rows, planes = self._buffer(layer, geometry)
        rows.copy_(_chunk_rows(layer, geometry))
        for source, target in zip(planes, (keys, values), strict=True):
            _by_blocks(target, source).copy_(source)

    def _encode_layer(self, keys: Tensor, values: Tensor, layer: Tensor, geometry: KVGeometry) -> None:
        rows, planes = self._buffer(layer, geometry)
        for source, target in zip((keys, values), planes, strict=True):
            target.copy_(_by_blocks(source, target))
        _chunk_rows(layer, geometry).copy_(rows)

    def _buffer(self, layer: Tensor, geometry: KVGeometry) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return room for one layer in the engine's order, as LMCache's rows and as K and V."""
        heads, half = geometry.num_kv_heads, geometry.block_size * geometry.head_size
        blocks = layer.shape[0] // geometry.block_size
        buffer = torch.empty((blocks, heads, 2, half), dtype=layer.dtype, device=layer.device)
        rows = buffer.view(blocks, heads, geometry.block_size, 2 * geometry.head_size)
        planes = self._keys(buffer[:, :, 0], geometry), self._values(buffer[:, :, 1], geometry)
        return rows, planes


def _chunk_rows(layer: Tensor, geometry: KVGeometry) -> Tensor:
    """View ``[c, heads * 2 * head_size]`` as ``[blocks, heads, block_size, 2 * head_size]``."""
    shape = (-1, geometry.block_size, geometry.num_kv_heads, 2 * geometry.head_size)
    return layer.view(shape).transpose(1, 2)


def _by_blocks(plane: Tensor, interior: Tensor) -> Tensor:
    """View ``[c, D]`` of the library's form with the axes of ``interior``."""
    blocks, heads, *tokens_and_dims = interior.shape
    split = plane.view(blocks, *tokens_and_dims[:2], heads, *tokens_and_dims[2:])
    return split.movedim(3, 1)
