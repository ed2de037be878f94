"""Stores, and what became of them: only a lookup tells what is there, and only bytes whose it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .._workers import Workers
from .fillings import Filling
from .lookups import Lookups
from .peer import Peer
from .transfers import Transfers

__all__ = ["StoreResult", "Stores"]


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What became of a store, in chunks; truthy when all of it is in the cache.

    Attributes:
        stored: written by this call.
        existing: there before, with equal bytes.
        refused: not in the cache as given: no room, or other bytes are there.
        conflicting: of the refused, those where other bytes are there, which are never overwritten.
    """

    stored: int
    existing: int
    refused: int
    conflicting: int = 0

    def __bool__(self) -> bool:
        return self.refused == 0


class Stores:
    """Sends chunks and finds out which of them are in the cache as they were given.

    Attributes:
        transfers: what sends them.
    """

    def __init__(self, peer: Peer, lookups: Lookups, transfers: Transfers, workers: Workers) -> None:
        self._peer = peer
        self._lookups = lookups
        self.transfers = transfers
        self._workers = workers

    async def store(
        self,
        kv: torch.Tensor,
        tokens: list[int],
        cache_salt: str,
        *,
        own_salt: bool,
        deadline: float,
    ) -> StoreResult:
        """Store ``kv`` (``[2, L, T, D]``, T whole chunks) and look at what came of it.

        Args:
            kv: the KV of ``tokens``.
            tokens: T token ids.
            cache_salt: the salt.
            own_salt: nobody else stores under this salt, so that no bytes need be compared.
            deadline: seconds for the transfer.
        """
        lookup = self._peer.timeouts.lookup
        if kv.device.type != "cpu":
            kv = await self._workers.run(kv.cpu)
        pickled = self._peer.pool is None
        before = 0
        if pickled and not own_salt:
            lease = await self._lookups.acquire(tokens, cache_salt, deadline=lookup)
            before = lease.chunks
            await self._lookups.release(lease)
        filling = self.transfers.given(kv, own_salt=own_salt)
        taken = await self.transfers.write(filling, tokens, cache_salt, deadline=deadline)
        lease = await self._lookups.acquire(tokens, cache_salt, deadline=lookup)
        found = set(range(lease.chunks))
        # The pickle plane does not tell which chunks it took.
        same = found if own_salt else set() if pickled else found & taken
        if same == found:
            await self._lookups.release(lease)
        else:
            there = await self.transfers.read(lease)
            if there is None:
                # Gone since the lookup: no room, not other bytes.
                found = same
            else:
                size = self._peer.chunk_size
                same = same | await self._workers.run(equal_chunks, kv, there, size)
        old = same & set(range(before)) if pickled else same - taken
        total = len(tokens) // self._peer.chunk_size
        return StoreResult(
            stored=len(same) - len(old),
            existing=len(old),
            refused=total - len(same),
            conflicting=len(found) - len(same),
        )

    async def fill(self, filling: Filling, tokens: list[int], cache_salt: str, *, deadline: float) -> bool:
        """Store what ``filling`` makes, under a salt of its own, and return whether all is in."""
        await self.transfers.write(filling, tokens, cache_salt, deadline=deadline)
        lease = await self._lookups.acquire(tokens, cache_salt, deadline=self._peer.timeouts.lookup)
        await self._lookups.release(lease)
        return lease.chunks * self._peer.chunk_size == len(tokens)


def equal_chunks(kv: torch.Tensor, there: torch.Tensor, chunk_size: int) -> set[int]:
    """Return the indices of the chunks of ``there`` that are bit for bit those of ``kv``."""
    # As integers, because a NaN is not equal to itself and -0.0 is equal to 0.0.
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[kv.dtype.itemsize]
    found = there.shape[2]
    here, there = kv[:, :, :found].contiguous().view(bits), there.view(bits)
    return {
        start // chunk_size
        for start in range(0, found, chunk_size)
        if torch.equal(here[:, :, start : start + chunk_size], there[:, :, start : start + chunk_size])
    }
