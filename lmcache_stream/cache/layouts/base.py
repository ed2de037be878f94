"""What every codec of a chunk layout can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from ...errors import LayoutError
from ..geometry import KVGeometry

__all__ = ["LayoutCodec", "split_heads"]


class LayoutCodec(ABC):
    """Between the tensor that LMCache holds for a chunk and the library's ``[2, L, c, D]``.

    ``c`` tokens are one chunk or several in a row, ``D = num_kv_heads * head_size``. Codecs have no
    state; both directions write in place and refuse what does not fit before they write.

    Attributes:
        name: the layout's name in a ``KVGeometry``.
        single_plane: whether K and V share one plane; LMCache's registration calls it ``use_mla``.
        is_strided: whether strides describe where K and V are in a chunk, so that both can be read and
            written in place.
        has_planes: whether there are K and V, which edits and the layer-0 check need.
    """

    name: ClassVar[str]
    single_plane: ClassVar[bool]
    is_strided: ClassVar[bool] = True
    has_planes: ClassVar[bool] = True

    def hidden_dim_size(self, geometry: KVGeometry) -> int:
        """Return the elements of a token in one layer of one plane, as registrations name it."""
        return geometry.hidden_size * (2 if self.single_plane else 1)

    def chunk_shape(self, geometry: KVGeometry, chunk_size: int) -> tuple[int, ...]:
        """Return the shape of the tensor that LMCache holds for ``chunk_size`` tokens."""
        plane = (geometry.num_layers, chunk_size, self.hidden_dim_size(geometry))
        return plane if self.single_plane else (2, *plane)

    def check(self, geometry: KVGeometry, chunk_size: int) -> None:
        """Raise unless chunks of ``chunk_size`` tokens of that geometry can have this layout.

        Raises:
            LayoutError: they cannot; the message says which number does not fit.
        """
        if chunk_size < 1 or chunk_size % geometry.block_size:
            raise LayoutError(
                f"layout {self.name}: a chunk of {chunk_size} tokens is not a multiple of the "
                f"engine's block of {geometry.block_size}"
            )

    def decode(self, chunk: Tensor, out: Tensor, geometry: KVGeometry) -> None:
        """Copy ``chunk`` into ``out``.

        Args:
            chunk: of ``chunk_shape``, any strides.
            out: ``[2, L, c, D]`` of the chunk's dtype, any strides: a view of a longer KV will do.
            geometry: of both.

        Raises:
            LayoutError: a shape or dtype does not fit; nothing was written.
        """
        self._refuse_misfit(chunk, out, geometry)
        self._decode(chunk, out, geometry)

    def encode(self, kv: Tensor, chunk: Tensor, geometry: KVGeometry) -> None:
        """Copy ``kv`` into ``chunk``: ``decode`` reversed, with its arguments and errors."""
        self._refuse_misfit(chunk, kv, geometry)
        self._encode(kv, chunk, geometry)

    def planes(self, chunk: Tensor, geometry: KVGeometry) -> tuple[Tensor, Tensor]:
        """View ``chunk`` as K and V, each ``[L, c, num_kv_heads, head_size]``; only where ``is_strided``."""
        raise LayoutError(f"layout {self.name}: there are no K and V to view")

    def layer_groups(self, chunk: Tensor) -> Iterator[slice]:
        """Yield the layers of ``chunk`` that are best read or written together; all of them in order."""
        yield slice(0, len(chunk))

    def load_layers(self, chunk: Tensor, layers: slice, geometry: KVGeometry) -> tuple[Tensor, Tensor]:
        """Return K and V of ``n`` layers, each ``[n, c, num_kv_heads, head_size]``.

        Views of ``chunk`` where ``is_strided``, else copies, which ``save_layers`` writes back.
        """
        keys, values = self.planes(chunk, geometry)
        return keys[layers], values[layers]

    def save_layers(
        self, keys: Tensor, values: Tensor, chunk: Tensor, layers: slice, geometry: KVGeometry
    ) -> None:
        """Write K and V of some layers into ``chunk``, as ``load_layers`` reads them."""
        loaded = self.load_layers(chunk, layers, geometry)
        for source, target in zip((keys, values), loaded, strict=True):
            target.copy_(source)

    def load_layer(self, chunk: Tensor, layer: int, geometry: KVGeometry) -> tuple[Tensor, Tensor]:
        """Return K and V of one layer, each ``[c, num_kv_heads, head_size]``; see ``load_layers``."""
        keys, values = self.load_layers(chunk, slice(layer, layer + 1), geometry)
        return keys[0], values[0]

    def kv_shape(self, geometry: KVGeometry, num_tokens: int) -> tuple[int, int, int, int]:
        """Return the library's own shape for that many tokens."""
        return geometry.kv_shape(num_tokens)

    def _refuse_misfit(self, chunk: Tensor, kv: Tensor, geometry: KVGeometry) -> None:
        tokens = kv.shape[2] if kv.dim() == 4 else 0
        self.check(geometry, tokens)
        wanted = self.chunk_shape(geometry, tokens), self.kv_shape(geometry, tokens)
        if (tuple(chunk.shape), tuple(kv.shape)) != wanted:
            raise LayoutError(
                f"layout {self.name}: chunk {tuple(chunk.shape)} and KV {tuple(kv.shape)} are not "
                f"the {wanted[0]} and {wanted[1]} of the geometry"
            )
        if (chunk.dtype, kv.dtype) != (geometry.dtype, geometry.dtype):
            raise LayoutError(
                f"layout {self.name}: chunk of {chunk.dtype} and KV of {kv.dtype}, but the "
                f"geometry says {geometry.dtype}"
            )

    @abstractmethod
    def _decode(self, chunk: Tensor, out: Tensor, geometry: KVGeometry) -> None: ...

    @abstractmethod
    def _encode(self, kv: Tensor, chunk: Tensor, geometry: KVGeometry) -> None: ...


def split_heads(tensor: Tensor, geometry: KVGeometry) -> Tensor:
    """View ``[..., D]`` as ``[..., num_kv_heads, head_size]``."""
    return tensor.view(*tensor.shape[:-1], geometry.num_kv_heads, geometry.head_size)
