"""Retrieves and stores: between chunks on the server and ``[2, L, T, D]`` here, copied once."""

from __future__ import annotations

import secrets
import traceback
from collections.abc import Callable

import anyio
import torch

from .._background import to_the_end
from .._workers import Workers
from ..errors import CacheConnectError, CacheError, CacheTimeoutError, ClosedError
from . import layouts
from .fillings import Filling, GivenKV
from .holds import Holds
from .keyed_locks import KeyedLocks
from .lookups import Lookups, PrefixLease
from .messages import COMMIT_STORE, PREPARE_STORE, Encoded, StoreContext
from .peer import LATE_SECONDS, Peer
from .pickled import dump_chunks
from .shared_memory import SharedPool

__all__ = ["Transfers"]


class Transfers:
    """Moves chunks to the server and back.

    A store that was begun runs to its end in the peer's background, whatever becomes of the caller: what the
    server reserved is filled.

    The server keys a transfer by client, tokens, range, worker and salt and knows nothing of the
    request id, so that equal transfers must not overlap.

    Attributes:
        holds: the retrieves.
    """

    def __init__(self, peer: Peer, lookups: Lookups, workers: Workers) -> None:
        self.holds = Holds(peer, lookups, workers)
        self._peer = peer
        self._workers = workers
        self._serial = KeyedLocks()

    async def read(self, lease: PrefixLease) -> torch.Tensor | None:
        """Return the KV of the chunks that ``lease`` locks.

        Returns ``[2, L, T, D]`` of the geometry's dtype, private and writable, or None where the
        chunks were gone after all. Uses the lease up.

        Raises:
            ChunkMismatchError: the chunks are not of the registered geometry.
            CacheTimeoutError: silence.
        """
        async with self.holds.hold(lease) as held:
            return None if held.chunks is None else await self.decode(held.chunks)

    async def decode(self, chunks: list[torch.Tensor]) -> torch.Tensor:
        """Return what ``chunks`` hold as ``[2, L, T, D]``, private and writable."""
        geometry, size = self._peer.geometry, self._peer.chunk_size
        codec = layouts.get(geometry.layout)
        out = torch.empty(codec.kv_shape(geometry, len(chunks) * size), dtype=geometry.dtype)

        def decode(numbered: tuple[int, torch.Tensor]) -> None:
            index, chunk = numbered
            codec.decode(chunk, out[:, :, index * size : (index + 1) * size], geometry)

        await self._workers.run_each(decode, enumerate(chunks))
        return out

    def given(self, kv: torch.Tensor, *, own_salt: bool = False) -> Filling:
        """Return what stores ``kv`` (``[2, L, T, D]``, T whole chunks)."""
        peer = self._peer
        return GivenKV(kv, self._workers, peer.geometry, peer.chunk_size, own_salt=own_salt)

    async def write(
        self, filling: Filling, tokens: list[int], cache_salt: str, *, deadline: float
    ) -> set[int]:
        """Send the chunks of ``tokens`` (whole chunks) and return those it may be in.

        With shared memory these are the indices of the chunks that were taken. The pickle plane
        does not tell; there it is every index.

        Raises:
            ChunkMismatchError: the server's slots are not of the registered geometry.
            CacheTimeoutError: silence.
        """
        peer, end = self._peer, anyio.current_time() + deadline
        release: Callable[[], None] | None = None
        try:
            with anyio.fail_after(deadline):
                await peer.ensure_registered()
                instance = peer.instance_id
                release = await self._serial.acquire((instance, tuple(tokens), cache_salt))
            # No await in between: the work owns the lock from here on.
            left = max(0.0, end - anyio.current_time())
            work = self._write(filling, tokens, cache_salt, instance, release)
            return await peer.background.finish(work, deadline=left)
        except BaseException as error:
            # The store goes on without the caller, who may use the tensor for something else.
            await to_the_end(filling.let_go())
            if isinstance(error, ClosedError) and release is not None:
                # The work may not have come to its first step.
                release()
            if not isinstance(error, TimeoutError) or isinstance(error, CacheTimeoutError):
                raise
            # What is left unanswered keeps its transfer; under another id an equal one can be begun.
            peer.retire()
            raise await peer.explain("a store", deadline) from error

    async def _write(
        self,
        filling: Filling,
        tokens: list[int],
        cache_salt: str,
        instance: int,
        release: Callable[[], None],
    ) -> set[int]:
        peer = self._peer
        request_id = f"store-{secrets.token_hex(16)}"
        filling.is_wanted = True
        try:
            await peer.ensure_registered()
            pool = peer.pool
            key = peer.key(tokens, cache_salt, request_id)
            peer.unfilled[request_id] = instance
            reply = await peer.call(PREPARE_STORE, key, instance, deadline=LATE_SECONDS)
            data = Encoded.of(b"")
            if reply.context.slots is None:
                # Nothing is reserved on the pickle plane.
                peer.unfilled.pop(request_id, None)
                targets = self._room(len(tokens) // peer.chunk_size)
                await filling.fill(targets)
                data = await self._workers.run(_pickled, targets)
            else:
                targets = self._slots(reply.context, pool)
                try:
                    await filling.fill(targets)
                except Exception as error:
                    # Of those that ended, which look at slots: who keeps the error must not keep these.
                    traceback.clear_frames(error.__traceback__)
                    if targets and filling.may_spoil:
                        # Nobody will look at what is in there; left open, it could never be evicted.
                        await peer.call(COMMIT_STORE, key, instance, data, deadline=LATE_SECONDS)
                        peer.unfilled.pop(request_id, None)
                    raise
            if pool is not peer.pool:
                raise CacheConnectError(
                    f"LMCache at {peer.requests.url} was restarted during a store: try once more"
                )
            if targets:
                # Without slots there is nothing to commit, and a commit would publish another's.
                await peer.call(COMMIT_STORE, key, instance, data, deadline=LATE_SECONDS)
            peer.unfilled.pop(request_id, None)
            peer.end_session_soon(request_id)
            return set(targets)
        finally:
            filling.is_wanted = False
            targets, pool = {}, None
            release()

    def _room(self, count: int) -> dict[int, torch.Tensor]:
        geometry = self._peer.geometry
        shape = layouts.get(geometry.layout).chunk_shape(geometry, self._peer.chunk_size)
        return {index: torch.empty(shape, dtype=geometry.dtype) for index in range(count)}

    def _slots(self, context: StoreContext, pool: SharedPool | None) -> dict[int, torch.Tensor]:
        slots, indices = context.slots or [], context.chunk_indices or []
        if len(slots) != len(indices) or (slots and pool is None):
            raise CacheError(f"LMCache answered a store with {len(slots)} slots for {len(indices)} chunks")
        geometry = self._peer.geometry
        shape = layouts.get(geometry.layout).chunk_shape(geometry, self._peer.chunk_size)
        found = [] if pool is None else [pool.chunk(slot, shape, geometry.dtype) for slot in slots]
        return dict(zip(indices, found, strict=True))


def _pickled(chunks: dict[int, torch.Tensor]) -> Encoded:
    return Encoded.of(dump_chunks(list(chunks.values())))
