"""Lookups, and the read locks that each of them takes on the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from dataclasses import dataclass, field

import anyio

from ..errors import CacheError, CacheTimeoutError, ClosedError
from .messages import FREE_LOOKUP_LOCKS, LOOKUP, QUERY_PREFETCH_STATUS
from .peer import LATE_SECONDS, Peer

logger = logging.getLogger(__name__)

_FIRST_PAUSE = 0.002
_LONGEST_PAUSE = 0.2
# A payload that the wire format has kept and the server ignores.
_TP_SIZE = 1


@dataclass(slots=True)
class PrefixLease:
    """Read locks on the first ``chunks`` chunks of ``tokens``, to be given back exactly once.

    Attributes:
        tokens: the prompt that was looked up, whole chunks.
        cache_salt: its salt.
        request_id: the server's session of this lookup.
        chunks: chunks that were found; no more than these are locked.
        released: whether the locks are given back, or somebody else has taken that on.
        granted: ``time.monotonic()`` before the lookup.
        connection: which of the connections to the server its result came on.
    """

    tokens: list[int]
    cache_salt: str
    request_id: str
    chunks: int = 0
    released: bool = False
    granted: float = field(default_factory=time.monotonic)
    connection: int = 0


class Lookups:
    """Finds how much of a prompt's KV is in the cache and holds it there."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._granted: dict[str, PrefixLease] = {}

    async def acquire(self, tokens: list[int], cache_salt: str, *, deadline: float) -> PrefixLease:
        """Look ``tokens`` (whole chunks) up and lock what is found.

        Left early, by a cancel or by the deadline, the lookup is followed to its result all the
        same, because only then can its locks be given back.

        Raises:
            CacheTimeoutError: no result within ``deadline`` seconds.
        """
        peer = self._peer
        await peer.ensure_registered()
        request_id = f"lookup-{secrets.token_hex(16)}"
        lease = PrefixLease(tokens, cache_salt, request_id, connection=peer.requests.connections)
        outcome = peer.background.spawn(self._look_up(lease))
        try:
            with anyio.fail_after(deadline):
                await asyncio.shield(outcome)
        except TimeoutError as error:
            self._follow(lease, outcome)
            if isinstance(error, CacheTimeoutError):
                raise
            raise await peer.explain("a lookup", deadline) from error
        except asyncio.CancelledError:
            self._follow(lease, outcome)
            raise
        self._granted[request_id] = lease
        return lease

    def release_all(self) -> None:
        """Give back, in the background, what is still held: the context is closing."""
        for lease in list(self._granted.values()):
            self.release_soon(lease)

    async def release(self, lease: PrefixLease) -> None:
        """Give back the locks and end the session; once, later calls do nothing.

        Raises nothing for a server that is gone or silent, nor after closing: then the locks end with
        it or with their time to live.
        """
        if not lease.released:
            lease.released = True
            work = self.give_back(lease)
            with contextlib.suppress(ClosedError):
                if self._peer.requests.is_up:
                    await self._peer.background.finish(work)
                else:
                    # The locks may be gone with the server; whoever released must not wait to know.
                    self._peer.background.spawn(work)

    def release_soon(self, lease: PrefixLease) -> None:
        """As ``release``, in the background: whoever has better to do does not wait for it."""
        if not lease.released:
            lease.released = True
            with contextlib.suppress(ClosedError):
                self._peer.background.spawn(self.give_back(lease))

    async def _look_up(self, lease: PrefixLease) -> None:
        peer = self._peer
        key = peer.key(lease.tokens, lease.cache_salt, lease.request_id, worker_id=None)
        with anyio.fail_after(LATE_SECONDS):
            await peer.call(LOOKUP, key, _TP_SIZE, deadline=LATE_SECONDS)
            pause = _FIRST_PAUSE
            while True:
                chunks = await peer.call(QUERY_PREFETCH_STATUS, lease.request_id, deadline=LATE_SECONDS)
                if chunks is not None:
                    lease.chunks = min(chunks, len(lease.tokens) // peer.chunk_size)
                    # Of a server that came back just now the lookup itself may have been the first to hear.
                    lease.connection = peer.requests.connections
                    return
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def _follow(self, lease: PrefixLease, outcome: asyncio.Future[None]) -> None:
        lease.released = True
        # Called on the way out of an error or a cancellation, which a closed home must not replace.
        with contextlib.suppress(ClosedError):
            self._peer.background.spawn(self._release_after(lease, outcome))

    async def _release_after(self, lease: PrefixLease, outcome: asyncio.Future[None]) -> None:
        try:
            await outcome
        except (CacheError, TimeoutError):
            return
        await self.give_back(lease)

    async def give_back(self, lease: PrefixLease, *, start: int = 0) -> None:
        """Do the release of a lease that is marked as released, from within the background."""
        peer = self._peer
        self._granted.pop(lease.request_id, None)
        size = peer.chunk_size
        try:
            if start < lease.chunks and self._are_ours(lease):
                locked = lease.tokens[: lease.chunks * size]
                key = peer.key(locked, lease.cache_salt, lease.request_id, start=start * size, worker_id=None)
                await peer.call(FREE_LOOKUP_LOCKS, key, _TP_SIZE, deadline=peer.timeouts.lookup)
        except (CacheError, ClosedError) as error:
            logger.warning("read locks are left to their time to live: %s", error)
        peer.end_session_soon(lease.request_id)

    def _are_ours(self, lease: PrefixLease) -> bool:
        # Locks that ran out, or went with a server that was restarted, may be another reader's by now.
        age = time.monotonic() - lease.granted
        return age < LATE_SECONDS and lease.connection == self._peer.requests.connections
