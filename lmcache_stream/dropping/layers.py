"""One plane of a cache, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

__all__ = ["Layers"]


class Layers:
    """The keys or the values of a prefix, a layer at a time: ``layers[i]`` is ``[T, H, d]``.

    A layer may be read from a server's memory at each use, so that no policy needs a copy of all.

    Args:
        count: number of layers.
        load: returns a layer.
        rows: int64 ``[n]``, the tokens of which these are; None for all.
    """

    def __init__(self, count: int, load: Callable[[int], Tensor], rows: Tensor | None = None) -> None:
        self._count = count
        self._load = load
        self._rows = rows
        self._last: tuple[int, Tensor] | None = None

    @classmethod
    def of(cls, plane: Tensor) -> Layers:
        """View ``plane``, ``[L, T, H, d]``."""
        return cls(len(plane), lambda layer: plane[layer])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, layer: int) -> Tensor:
        if not -self._count <= layer < self._count:
            raise IndexError(f"layer {layer} of {self._count}")
        if self._last is None or self._last[0] != layer % self._count:
            loaded = self._load(layer % self._count)
            # Kept, because a policy may look at a layer's keys more than once.
            self._last = layer % self._count, loaded if self._rows is None else loaded[self._rows]
        return self._last[1]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[layer] for layer in range(self._count))

    def map(self, function: Callable[[Tensor], Tensor]) -> Layers:
        """Return the layers as ``function`` changes each, ``[T, H, d]``."""
        return Layers(self._count, lambda layer: function(self[layer]))

    def select(self, kept: Tensor) -> Layers:
        """Return the layers of some of the tokens, int64 ``[n]``."""
        return Layers(self._count, self._load, kept if self._rows is None else self._rows[kept])

    def stack(self) -> Tensor:
        """Return all layers, ``[L, T, H, d]``: as much memory as the plane has."""
        return torch.stack(list(self))
