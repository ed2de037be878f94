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
from .base import LayoutCodec

__all__ = ["CPUBlocks"]


class CPUBlocks(LayoutCodec):
    """A layer at a time through a small buffer, as no strides of a chunk describe the interior."""

    single_plane: ClassVar[bool] = True

    @abstractmethod
    def _keys(self, half: Tensor, geometry: KVGeometry) -> Tensor:
        """View the K half ``[blocks, heads, block_size * head_size]`` by tokens and dims.

        Returns ``[blocks, heads, tokens, tokens, dims, dims]``, both axes split into outer and
        inner; an inner axis may have the size 1.
        """

    @abstractmethod
    def _values(self, half: Tensor, geometry: KVGeometry) -> Tensor:
        """View the V half in the same way."""

    def _decode(self, chunk: Tensor, out: Tensor, geometry: KVGeometry) -> None:
        rows, planes = self._buffer(chunk, geometry)
        for layer in range(geometry.num_layers):
            rows.copy_(_chunk_rows(chunk[layer], geometry))
            for source, target in zip(planes, out[:, layer], strict=True):
                _by_blocks(target, source).copy_(source)

    def _encode(self, kv: Tensor, chunk: Tensor, geometry: KVGeometry) -> None:
        rows, planes = self._buffer(chunk, geometry)
        for layer in range(geometry.num_layers):
            for source, target in zip(kv[:, layer], planes, strict=True):
                target.copy_(_by_blocks(source, target))
            _chunk_rows(chunk[layer], geometry).copy_(rows)

    def _buffer(self, chunk: Tensor, geometry: KVGeometry) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return room for one layer in the engine's order, as LMCache's rows and as K and V."""
        heads, half = geometry.num_kv_heads, geometry.block_size * geometry.head_size
        blocks = chunk.shape[1] // geometry.block_size
        buffer = torch.empty((blocks, heads, 2, half), dtype=chunk.dtype, device=chunk.device)
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
