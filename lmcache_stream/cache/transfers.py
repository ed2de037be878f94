"""Retrieves and stores: between chunks on the server and ``[2, L, T, D]`` here, copied once."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import anyio
import torch

from .._background import to_the_end
from .._workers import Workers
from ..errors import CacheError, CacheTimeoutError, ClosedError
from . import layouts
from .lookups import Lookups, PrefixLease
from .messages import (
    COMMIT_RETRIEVE,
    COMMIT_STORE,
    PREPARE_RETRIEVE,
    PREPARE_STORE,
    Encoded,
    PrepareRetrieveReply,
    StoreContext,
)
from .peer import LATE_SECONDS, Peer
from .pickled import dump_chunks, load_chunks
from .shared_memory import SharedPool

T = TypeVar("T")
Release = Callable[[], None]


class KeyedLocks:
    """A lock for each key, which exists while somebody holds it or waits for it."""

    def __init__(self) -> None:
        self._locks: dict[Any, asyncio.Lock] = {}
        self._users: Counter[Any] = Counter()

    async def acquire(self, key: Any) -> Callable[[], None]:
        """Wait for the lock of ``key`` and return what releases it, once however often it is called."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        self._users[key] += 1
        try:
            await lock.acquire()
        except BaseException:
            self._drop(key)
            raise

        held = True

        def release() -> None:
            nonlocal held
            if held:
                held = False
                lock.release()
                self._drop(key)

        return release

    def _drop(self, key: Any) -> None:
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key], self._locks[key]


class Source:
    """A caller's tensor as long as the caller waits, and after that a copy of it.

    Attributes:
        is_wanted: whether a store may still read it.
    """

    def __init__(self, kv: torch.Tensor, workers: Workers) -> None:
        self.is_wanted = False
        self._kv = kv
        self._workers = workers
        self._reading: asyncio.Event | None = None

    async def read(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run ``function`` on the tensor in a thread."""
        self._reading = asyncio.Event()
        try:
            return await self._workers.run(function, self._kv, *arguments)
        finally:
            self.is_wanted = False
            self._reading.set()

    async def let_go(self) -> None:
        """Return when nothing reads the caller's own tensor any more."""
        if self.is_wanted and self._reading is None:
            copy = await self._workers.run(self._kv.clone)
            if self._reading is None:
                self._kv = copy
                return
        if self.is_wanted and self._reading is not None:
            await self._reading.wait()


class Transfers:
    """Moves chunks. Each transfer runs to its end in the peer's background, whatever becomes of the
    caller: what the server granted is given back, and what it reserved is filled.

    The server keys a transfer by client, tokens, range, worker and salt and knows nothing of the
    request id, so that equal transfers must not overlap.
    """

    def __init__(self, peer: Peer, lookups: Lookups, workers: Workers) -> None:
        self._peer = peer
        self._lookups = lookups
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
        count = lease.chunks
        tokens = lease.tokens[: count * self._peer.chunk_size]

        def work(instance: int, release: Release) -> Coroutine[Any, Any, torch.Tensor | None]:
            return self._read(lease, tokens, count, instance, release)

        key = ("read", tuple(tokens), lease.cache_salt)
        try:
            return await self._run(key, work, "a retrieve", self._peer.timeouts.retrieve)
        except BaseException:
            # Does nothing where the transfer began: from there on it gives the locks back itself.
            await self._lookups.release(lease)
            raise

    async def write(
        self, kv: torch.Tensor, tokens: list[int], cache_salt: str, *, deadline: float
    ) -> set[int]:
        """Send the chunks of ``kv`` (``[2, L, T, D]``, T whole chunks) and return those it may be in.

        With shared memory these are the indices of the chunks that were taken. The pickle plane
        does not tell; there it is every index.

        Raises:
            ChunkMismatchError: the server's slots are not of the registered geometry.
            CacheTimeoutError: silence.
        """

        source = Source(kv, self._workers)

        def work(instance: int, release: Release) -> Coroutine[Any, Any, set[int]]:
            return self._write(source, tokens, cache_salt, instance, release)

        key = ("write", tuple(tokens), cache_salt)
        try:
            return await self._run(key, work, "a store", deadline)
        except BaseException:
            # The store goes on without the caller, who may use the tensor for something else.
            await to_the_end(source.let_go())
            raise

    async def _run(
        self,
        key: tuple[Any, ...],
        work: Callable[[int, Release], Coroutine[Any, Any, T]],
        what: str,
        deadline: float,
    ) -> T:
        end = anyio.current_time() + deadline
        try:
            with anyio.fail_after(deadline):
                await self._peer.ensure_registered()
                instance = self._peer.instance_id
                release = await self._serial.acquire((instance, *key))
            # No await in between: the work owns the lock from here on.
            left = max(0.0, end - anyio.current_time())
            return await self._peer.background.finish(work(instance, release), deadline=left)
        except ClosedError:
            # The work may not have come to its first step.
            release()
            raise
        except TimeoutError as error:
            if isinstance(error, CacheTimeoutError):
                raise
            # What is left unanswered keeps its transfer; under another id an equal one can be begun.
            self._peer.retire()
            raise await self._peer.explain(what, deadline) from error

    async def _read(
        self, lease: PrefixLease, tokens: list[int], count: int, instance: int, release: Release
    ) -> torch.Tensor | None:
        peer = self._peer
        held_from = 0
        # Taken over before the first await, so that the caller's clean-up leaves them alone.
        lease.released = True
        try:
            await peer.ensure_registered()
            # Of the server that is asked now: a slot means nothing in another one's pool.
            pool = peer.pool
            key = peer.key(tokens, lease.cache_salt, lease.request_id)
            # Once this was sent, whatever is answered, the locks of these chunks are the retrieve's.
            held_from = count
            reply = await peer.call(PREPARE_RETRIEVE, key, instance, deadline=LATE_SECONDS)
            if not reply.success:
                return None
            try:
                return await self._workers.run(self._decode, reply, count, pool)
            finally:
                await peer.call(COMMIT_RETRIEVE, key, instance, deadline=LATE_SECONDS)
        finally:
            try:
                await self._lookups.give_back(lease, start=held_from)
            finally:
                release()

    def _decode(self, reply: PrepareRetrieveReply, count: int, pool: SharedPool | None) -> torch.Tensor:
        geometry, size = self._peer.geometry, self._peer.chunk_size
        layout = layouts.get(geometry.layout)
        shape = layout.chunk_shape(geometry, size)
        slots = reply.context.slots
        if slots is None:
            chunks = load_chunks(reply.data, count, shape, geometry.dtype)
        elif pool is None or len(slots) != count:
            raise CacheError(f"LMCache answered a retrieve of {count} chunks with {len(slots)} slots")
        else:
            chunks = [pool.chunk(slot, shape, geometry.dtype) for slot in slots]
        out = torch.empty(layout.kv_shape(geometry, count * size), dtype=geometry.dtype)
        for index, chunk in enumerate(chunks):
            layout.decode(chunk, out[:, :, index * size : (index + 1) * size], geometry)
        return out

    async def _write(
        self, source: Source, tokens: list[int], cache_salt: str, instance: int, release: Release
    ) -> set[int]:
        peer = self._peer
        request_id = f"store-{secrets.token_hex(16)}"
        source.is_wanted = True
        try:
            await peer.ensure_registered()
            pool = peer.pool
            key = peer.key(tokens, cache_salt, request_id)
            peer.unfilled[request_id] = instance
            reply = await peer.call(PREPARE_STORE, key, instance, deadline=LATE_SECONDS)
            if reply.context.slots is None:
                # Nothing is reserved on the pickle plane.
                peer.unfilled.pop(request_id, None)
                indices = set(range(len(tokens) // peer.chunk_size))
                data = await source.read(self._pickle)
            else:
                indices = set(reply.context.chunk_indices or ())
                data = Encoded.of(b"")
                if indices:
                    await source.read(self._fill, reply.context, pool)
            if indices:
                # Without slots there is nothing to commit, and a commit would publish another's.
                await peer.call(COMMIT_STORE, key, instance, data, deadline=LATE_SECONDS)
            peer.unfilled.pop(request_id, None)
            peer.end_session_soon(request_id)
            return indices
        finally:
            source.is_wanted = False
            release()

    def _pickle(self, kv: torch.Tensor) -> Encoded:
        geometry, size = self._peer.geometry, self._peer.chunk_size
        layout = layouts.get(geometry.layout)
        shape = layout.chunk_shape(geometry, size)
        chunks = []
        for start in range(0, kv.shape[2], size):
            chunk = torch.empty(shape, dtype=geometry.dtype)
            layout.encode(kv[:, :, start : start + size], chunk, geometry)
            chunks.append(chunk)
        return Encoded.of(dump_chunks(chunks))

    def _fill(self, kv: torch.Tensor, context: StoreContext, pool: SharedPool | None) -> None:
        geometry, size = self._peer.geometry, self._peer.chunk_size
        slots, indices = context.slots or [], context.chunk_indices or []
        if pool is None or len(slots) != len(indices):
            raise CacheError(f"LMCache answered a store with {len(slots)} slots for {len(indices)} chunks")
        layout = layouts.get(geometry.layout)
        shape = layout.chunk_shape(geometry, size)
        chunks = [pool.chunk(slot, shape, geometry.dtype) for slot in slots]
        for index, chunk in zip(indices, chunks, strict=True):
            layout.encode(kv[:, :, index * size : (index + 1) * size], chunk, geometry)
