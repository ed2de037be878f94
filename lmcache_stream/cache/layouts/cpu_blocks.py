"""What both layouts of vLLM's CPU engine have in common: blocks with a permuted interior.

The engine registers a block as ``[num_kv_heads, block_size, 2 * head_size]``, but per head those
elements are, flat, a half with K and a half with V, each in an order made for its attention kernel.
LMCache takes row ``s`` of that shape for token ``s`` and stores ``[L, c, num_kv_heads * 2 *
head_size]``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from ..geometry import KVGeometry
from .base import LayoutCodec, split_heads

__all__ = ["CPUBlocks"]

# Of small models many layers fit into a processor's cache, and an operation costs more than its work.
_BUFFER_BYTES = 1 << 20


class CPUBlocks(LayoutCodec):
    """Some layers at a time through a small buffer, as no strides of a chunk describe the interior."""

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

    def layer_groups(self, chunk: Tensor) -> Iterator[slice]:
        """Yield layers that one buffer takes together; see the base class."""
        count = max(1, _BUFFER_BYTES // max(1, chunk[0].nbytes))
        for start in range(0, len(chunk), count):
            yield slice(start, min(start + count, len(chunk)))

    def load_layers(self, chunk: Tensor, layers: slice, geometry: KVGeometry) -> tuple[Tensor, Tensor]:
        """Return copies of both halves; see the base class."""
        part = chunk[layers]
        shape = (2, *part.shape[:2], geometry.hidden_size)
        flat = torch.empty(shape, dtype=chunk.dtype, device=chunk.device)
        self._decode_layers(part, flat[0], flat[1], geometry)
        return split_heads(flat[0], geometry), split_heads(flat[1], geometry)

    def save_layers(
        self, keys: Tensor, values: Tensor, chunk: Tensor, layers: slice, geometry: KVGeometry
    ) -> None:
        """Write both halves; see the base class."""
        self._encode_layers(keys.flatten(2), values.flatten(2), chunk[layers], geometry)

    def _decode(self, chunk: Tensor, out: Tensor, geometry: KVGeometry) -> None:
        for layers in self.layer_groups(chunk):
            self._decode_layers(chunk[layers], out[0, layers], out[1, layers], geometry)

    def _encode(self, kv: Tensor, chunk: Tensor, geometry: KVGeometry) -> None:
        for layers in self.layer_groups(chunk):
            self._encode_layers(kv[0, layers], kv[1, layers], chunk[layers], geometry)

    def _decode_layers(self, part: Tensor, keys: Tensor, values: Tensor, geometry: KVGeometry) -> None:
        rows, planes = self._buffer(part, geometry)
        rows.copy_(_chunk_rows(part, geometry))
        for source, target in zip(planes, (keys, values), strict=True):
            _by_blocks(target, source).copy_(source)

    def _encode_layers(self, keys: Tensor, values: Tensor, part: Tensor, geometry: KVGeometry) -> None:
        rows, planes = self._buffer(part, geometry)
        for source, target in zip((keys, values), planes, strict=True):
            target.copy_(_by_blocks(source, target))
        _chunk_rows(part, geometry).copy_(rows)

    def _buffer(self, part: Tensor, geometry: KVGeometry) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return room for some layers in the engine's order, as LMCache's rows and as K and V."""
        heads, half = geometry.num_kv_heads, geometry.block_size * geometry.head_size
        layers, blocks = part.shape[0], part.shape[1] // geometry.block_size
        buffer = torch.empty((layers * blocks, heads, 2, half), dtype=part.dtype, device=part.device)
        rows = buffer.view(layers, blocks, heads, geometry.block_size, 2 * geometry.head_size)
        planes = self._keys(buffer[:, :, 0], geometry), self._values(buffer[:, :, 1], geometry)
        keys, values = (plane.view(layers, blocks, *plane.shape[1:]) for plane in planes)
        return rows, (keys, values)


def _chunk_rows(part: Tensor, geometry: KVGeometry) -> Tensor:
    """View ``[n, c, heads * 2 * head_size]`` as ``[n, blocks, heads, block_size, 2 * head_size]``."""
    shape = (len(part), -1, geometry.block_size, geometry.num_kv_heads, 2 * geometry.head_size)
    return part.view(shape).transpose(2, 3)


def _by_blocks(plane: Tensor, interior: Tensor) -> Tensor:
    """View ``[n, c, D]`` of the library's form with the axes of ``interior``."""
    layers, blocks, heads, *tokens_and_dims = interior.shape
    split = plane.view(layers, blocks, *tokens_and_dims[:2], heads, *tokens_and_dims[2:])
    return split.movedim(4, 2)
