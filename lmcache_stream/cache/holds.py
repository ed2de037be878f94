"""Prefixes whose chunks can be looked at where they are: the slots of the pool, or what was pickled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from torch import Tensor

from .._background import to_the_end
from .._workers import Workers
from ..errors import CacheError, CacheTimeoutError
from . import layouts
from .lookups import Lookups, PrefixLease
from .messages import COMMIT_RETRIEVE, PREPARE_RETRIEVE, PrepareRetrieveReply
from .peer import LATE_SECONDS, Peer
from .pickled import load_chunks
from .shared_memory import SharedPool

__all__ = ["HeldChunks", "Holds"]

logger = logging.getLogger(__name__)

# How long a cancelled caller waits for the server to take the locks back.
_GRACE = 2.0


@dataclass(slots=True, eq=False)
class HeldChunks:
    """The chunks of a prefix, read-locked on the server as long as they are held.

    Attributes:
        chunks: one tensor a chunk in the engine's layout, not to be written into; None where they were
            gone after all.
        granted: ``time.monotonic()`` before their lookup: the locks end by themselves in the end.
    """

    granted: float
    chunks: list[Tensor] | None = None
    is_ending: bool = False
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class Holds:
    """Opens retrieves and keeps them open.

    Each runs to its end in the peer's background, whatever becomes of the caller, so that what the server
    granted is given back. The server keys a retrieve by client, tokens, range, worker and salt and knows
    nothing of the request id, so that equal ones must not overlap: a second one looks at the same chunks,
    where these lie in shared memory. What was pickled is a copy of what was there once; it ends at once.
    """

    def __init__(self, peer: Peer, lookups: Lookups, workers: Workers) -> None:
        self._peer = peer
        self._lookups = lookups
        self._workers = workers
        self._open: dict[tuple[Any, ...], HeldChunks] = {}
        peer.leaving.append(self._end_all)

    def _end_all(self) -> None:
        for held in self._open.values():
            held.is_ending = True
            held.closed.set()

    @asynccontextmanager
    async def hold(self, lease: PrefixLease) -> AsyncIterator[HeldChunks]:
        """Hold the chunks that ``lease`` locks, and use the lease up.

        Raises:
            ChunkMismatchError: the chunks are not of the registered geometry.
            CacheTimeoutError: silence.
        """
        if not lease.chunks:
            await self._lookups.release(lease)
            yield HeldChunks(lease.granted)
            return
        deadline = self._peer.timeouts.retrieve
        try:
            with anyio.fail_after(deadline):
                await self._peer.ensure_registered()
                held, is_own = await self._enter(lease)
        except TimeoutError as error:
            await self._lookups.release(lease)
            if isinstance(error, CacheTimeoutError):
                raise
            # What is left unanswered keeps its retrieve; under another id an equal one can be begun.
            self._peer.retire()
            raise await self._peer.explain("a retrieve", deadline) from error
        except BaseException:
            # Does nothing where the retrieve began: from there on it gives the locks back itself.
            await self._lookups.release(lease)
            raise
        try:
            yield held
        finally:
            try:
                if is_own:
                    await self._leave(held, deadline)
                else:
                    await self._lookups.release(lease)
            finally:
                # An error that somebody keeps must not keep the pool mapped.
                if held.chunks:
                    held.chunks.clear()

    async def _leave(self, held: HeldChunks, deadline: float) -> None:
        await _end(held, deadline)
        if not held.ended.is_set():
            # As above. What was read is right all the same.
            self._peer.retire()
            logger.warning("%s", await self._peer.explain("the end of a retrieve", deadline))

    async def _enter(self, lease: PrefixLease) -> tuple[HeldChunks, bool]:
        """Return the open retrieve of these chunks and whether it is ``lease``'s own."""
        instance, count = self._peer.instance_id, lease.chunks
        tokens = lease.tokens[: count * self._peer.chunk_size]
        # Chunks that a server showed before it was restarted are not those that the lease found.
        key = (instance, lease.connection, tuple(tokens), lease.cache_salt)
        while (other := self._open.get(key)) is not None:
            await other.opened.wait()
            if other.chunks is not None and not other.is_ending:
                # As long as that one was open no chunk can have moved, and from here on the lease's own
                # locks hold them.
                return HeldChunks(other.granted, list(other.chunks)), False
            await other.ended.wait()
        held = self._open[key] = HeldChunks(lease.granted)
        try:
            outcome = self._peer.background.spawn(self._keep(lease, tokens, held, instance))
        except BaseException:
            del self._open[key]
            raise

        def end(_: asyncio.Future[None]) -> None:
            # Also where the work never came to its first step.
            del self._open[key]
            held.opened.set()
            held.ended.set()

        outcome.add_done_callback(end)
        # Taken over before the first await, so that the caller's clean-up leaves them alone.
        lease.released = True
        try:
            await held.opened.wait()
        except BaseException:
            await _end(held, _GRACE)
            raise
        if held.chunks is None:
            # Raises what went wrong; without an error the chunks were gone.
            await asyncio.shield(outcome)
        return held, True

    async def _keep(self, lease: PrefixLease, tokens: list[int], held: HeldChunks, instance: int) -> None:
        peer, held_from = self._peer, 0
        try:
            await peer.ensure_registered()
            # Of the server that is asked now: a slot means nothing in another one's pool.
            pool = peer.pool
            prefix = peer.key(tokens, lease.cache_salt, lease.request_id)
            # Once this was sent, whatever is answered, the locks of these chunks are the retrieve's.
            held_from = lease.chunks
            reply = await peer.call(PREPARE_RETRIEVE, prefix, instance, deadline=LATE_SECONDS)
            if reply.success:
                try:
                    held.chunks = await self._chunks(reply, lease.chunks, pool)
                    if reply.context.slots is None:
                        # Copies, which nothing on the server changes with: for this caller alone.
                        held.is_ending = True
                    held.opened.set()
                    if not held.is_ending:
                        await held.closed.wait()
                finally:
                    held.is_ending = True
                    if await self._is_same(lease, pool):
                        await peer.call(COMMIT_RETRIEVE, prefix, instance, deadline=LATE_SECONDS)
        finally:
            held.is_ending = True
            await self._lookups.give_back(lease, start=held_from)

    async def _is_same(self, lease: PrefixLease, pool: SharedPool | None) -> bool:
        """Tell whether the server is the lease's: one that was restarted would answer with silence."""
        if lease.connection == self._peer.requests.connections:
            return True
        await self._peer.ensure_registered()
        return pool is not None and pool is self._peer.pool

    async def _chunks(self, reply: PrepareRetrieveReply, count: int, pool: SharedPool | None) -> list[Tensor]:
        geometry = self._peer.geometry
        shape = layouts.get(geometry.layout).chunk_shape(geometry, self._peer.chunk_size)
        slots = reply.context.slots
        if slots is None:
            return await self._workers.run(load_chunks, reply.data, count, shape, geometry.dtype)
        if pool is None or len(slots) != count:
            raise CacheError(f"LMCache answered a retrieve of {count} chunks with {len(slots)} slots")
        return [pool.chunk(slot, shape, geometry.dtype) for slot in slots]


async def _end(held: HeldChunks, deadline: float) -> None:
    """Let go of the chunks and wait for the server to take the locks back; a cancelled caller not long."""
    held.closed.set()
    try:
        with anyio.move_on_after(deadline):
            await held.ended.wait()
    except asyncio.CancelledError:
        await to_the_end(_wait(held.ended))
        raise


async def _wait(event: asyncio.Event) -> None:
    with anyio.move_on_after(_GRACE):
        await event.wait()
