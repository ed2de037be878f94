"""What a store writes: a caller's tensor, or the chunks of an edit."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from .._workers import Workers
from ..rope import RopeConfig
from . import layouts
from .edit import drop_into
from .geometry import KVGeometry

__all__ = ["DroppedTokens", "Filling", "GivenKV"]


class Filling(ABC):
    """Fills the chunks of one store, in worker threads.

    Attributes:
        is_wanted: whether a store that was begun may still fill something.
        may_spoil: whether a chunk that could not be filled may be published all the same: nobody else
            stores or reads under the salt, and whoever stored is told.
    """

    may_spoil: bool
    is_wanted: bool = False

    @abstractmethod
    async def fill(self, targets: Mapping[int, Tensor]) -> None:
        """Overwrite the chunks, given by their index; when this ends, nothing writes into them any more."""

    @abstractmethod
    async def let_go(self) -> None:
        """Return when nothing reads what belongs to the caller any more, who has left."""


class GivenKV(Filling):
    """A caller's tensor as long as the caller waits, and after that a copy of it."""

    def __init__(
        self, kv: Tensor, workers: Workers, geometry: KVGeometry, chunk_size: int, *, own_salt: bool = False
    ) -> None:
        self.may_spoil = own_salt
        self._kv = kv
        self._workers = workers
        self._geometry = geometry
        self._size = chunk_size
        self._reading: asyncio.Event | None = None

    async def fill(self, targets: Mapping[int, Tensor]) -> None:
        """Encode the chunks; see ``Filling``."""
        kv, self._reading = self._kv, asyncio.Event()
        codec, size, geometry = layouts.get(self._geometry.layout), self._size, self._geometry

        def encode(target: tuple[int, Tensor]) -> None:
            index, chunk = target
            codec.encode(kv[:, :, index * size : (index + 1) * size], chunk, geometry)

        try:
            await self._workers.run_each(encode, targets.items())
        finally:
            self.is_wanted = False
            self._reading.set()

    async def let_go(self) -> None:
        """Copy the tensor where it is still to be read; see ``Filling``."""
        if self.is_wanted and self._reading is None:
            copy = await self._workers.run(self._kv.clone)
            if self._reading is None:
                self._kv = copy
                return
        if self.is_wanted and self._reading is not None:
            await self._reading.wait()


class DroppedTokens(Filling):
    """The chunks of an edit, made from those of the prefix.

    Args:
        sources: the prefix's chunks in the engine's layout.
        kept: int64 ``[n]``, which of its tokens to keep; n is a multiple of a chunk.
        rope: how the model rotates.
        geometry: of all chunks.
        workers: threads in each of which torch computes by itself; see ``tensor_workers``.
    """

    may_spoil = True

    def __init__(
        self,
        sources: Sequence[Tensor],
        kept: Tensor,
        rope: RopeConfig,
        geometry: KVGeometry,
        workers: Workers,
    ) -> None:
        self._workers = workers
        codec = layouts.get(geometry.layout)
        self._make: partial[Tensor] | None = partial(
            drop_into, list(sources), kept, rope=rope, codec=codec, geometry=geometry
        )
        self._prints: dict[int, Tensor] = {}

    async def fill(self, targets: Mapping[int, Tensor]) -> None:
        """Make the chunks; see ``Filling``."""

        work, self._make = self._make, None

        def make(target: tuple[int, Tensor]) -> None:
            assert work is not None, "filled once"
            index, chunk = target
            self._prints[index] = work(index, chunk)

        try:
            await self._workers.run_each(make, targets.items())
        finally:
            # An error that somebody keeps must not keep the pool mapped.
            work = None

    async def let_go(self) -> None:
        """Return at once: the chunks are the server's, and what is made of them is not used."""

    def prints(self) -> Tensor:
        """Return what ``fingerprint`` gives for the edit, int64 ``[chunks, 2]``, once it is made."""
        return torch.stack([self._prints[index] for index in sorted(self._prints)])
