"""A cached prefix where it lies: its layers for policies, itself for edits."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import torch
from torch import Tensor

from .._workers import Workers
from ..errors import CacheLostError, CacheTimeoutError, ClosedError
from ..rope import RopeConfig
from . import layouts
from .edit import check_kept
from .fillings import DroppedTokens
from .layout_check import layer0_rows
from .peer import LATE_SECONDS, Peer
from .prints import plane_print
from .stores import Stores

__all__ = ["HeldPrefix"]


class HeldPrefix:
    """The KV of a prefix in the server's own memory, where it has that, locked against eviction.

    Args:
        chunks: one tensor a chunk in the engine's layout, not to be written into.
        tokens: its token ids, whole chunks.
        granted: ``time.monotonic()`` before the lookup that locked it.
        peer: the server.
        stores: what an edit is stored through.
        workers: those that edits run in; see ``tensor_workers``.

    Attributes:
        tokens: its token ids, whole chunks.
    """

    def __init__(
        self,
        chunks: list[Tensor],
        tokens: list[int],
        granted: float,
        peer: Peer,
        stores: Stores,
        workers: Workers,
    ) -> None:
        self.tokens = tokens
        self._chunks = chunks
        self._granted = granted
        self._peer = peer
        self._stores = stores
        self._workers = workers

    def keys(self, layer: int) -> Tensor:
        """Return a copy of one layer's keys, ``[T, num_kv_heads, head_size]``; takes a while."""
        return self._layer(layer, 0)

    def values(self, layer: int) -> Tensor:
        """Return a copy of one layer's values, as ``keys``."""
        return self._layer(layer, 1)

    def _layer(self, layer: int, plane: int) -> Tensor:
        geometry = self._peer.geometry
        codec = layouts.get(geometry.layout)
        return torch.cat([codec.load_layer(chunk, layer, geometry)[plane] for chunk in self._chunks])

    def layer0(self, rows: Sequence[int]) -> Tensor:
        """Return some tokens' keys of layer 0, ``[n, D]``, or what else it has in their place."""
        return layer0_rows(self._chunks, rows, self._peer.geometry)

    @asynccontextmanager
    async def unchanged(self) -> AsyncIterator[None]:
        """A block whose reading counts only where the chunks hold in the end what they did before.

        Locks do not keep a server from clearing its cache by force. Whoever takes a slot over writes all
        of it, and so the first and last rows of layers, whose sums over the bits are compared.

        Raises:
            CacheLostError: they do not.
        """
        before = await self._workers.run(_traces, self._chunks)
        yield
        if not torch.equal(await self._workers.run(_traces, self._chunks), before):
            raise CacheLostError(
                "LMCache gave the prefix's memory to something else while it was read (was it cleared by "
                "force?): nothing of it is used; prefill the prompt once more"
            )

    async def last(self, count: int) -> Tensor:
        """Return the last ``count`` tokens of it, ``[planes, L, count, D]``, private and writable.

        Raises as ``unchanged``.
        """
        chunks = self._chunks[-math.ceil(count / self._peer.chunk_size) :]
        async with self.unchanged():
            return (await self._stores.transfers.decode(chunks))[:, :, -count:]

    async def kv(self) -> Tensor:
        """Return all of it, ``[planes, L, T, D]``, private and writable.

        Raises as ``unchanged``.
        """
        async with self.unchanged():
            return await self._stores.transfers.decode(self._chunks)

    async def drop(
        self, kept: Tensor, rope: RopeConfig, cache_salt: str, *, deadline: float
    ) -> Tensor | None:
        """Store what is left when only ``kept`` tokens stay, their keys moved to contiguous positions.

        Chunk by chunk, from the server's slots into its slots where there is shared memory.

        Args:
            kept: int64 ``[n]``, strictly increasing indices of the tokens to keep, whole chunks.
            rope: how the model rotates its keys.
            cache_salt: a salt that nobody else uses; it is spoiled where this fails.
            deadline: seconds for the transfer, where that is less than ``Timeouts.store``.

        Returns:
            What ``fingerprint`` gives for the result, or None where not all of it is in the cache.

        Raises:
            InvalidRequestError: the KV holds NaN or infinities.
            CacheConnectError, CacheTimeoutError: no server, silence, or locks that ran out meanwhile.
        """
        check_kept(kept, len(self.tokens))
        filling = DroppedTokens(self._chunks, kept, rope, self._peer.geometry, self._workers)
        tokens = [self.tokens[index] for index in kept.tolist()]
        deadline = min(deadline, self._peer.timeouts.store)
        complete = await self._stores.fill(filling, tokens, cache_salt, deadline=deadline)
        if self._peer.has_left:
            # The locks were given back; what was read meanwhile may be anything.
            raise ClosedError(f"the LMCache context of {self._peer.model_name!r} was closed during the edit")
        if time.monotonic() - self._granted > LATE_SECONDS:
            raise CacheTimeoutError(
                f"the edit took longer than LMCache keeps its read locks ({LATE_SECONDS:g} s), so that the "
                "prefix may have been evicted meanwhile: nothing of it is used"
            )
        return filling.prints() if complete else None


def _traces(chunks: Sequence[Tensor]) -> Tensor:
    """Return sums over the bits of each chunk's first and last rows of layers, int64 ``[chunks, 2]``."""
    rows = []
    for chunk in chunks:
        layers = chunk.flatten(0, -3)
        rows.append(torch.stack([plane_print(layers[0]), plane_print(layers[-1])]))
    return torch.stack(rows)
