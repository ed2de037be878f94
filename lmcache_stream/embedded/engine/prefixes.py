"""The engine as a client of an LMCache server: prefixes are loaded from it, prompts offloaded to it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Self

from torch import Tensor

from ..._background import to_the_end
from ..._workers import Workers
from ...cache.geometry import KVGeometry
from ...cache.http import CacheHTTP
from ...cache.lookups import Lookups
from ...cache.messages import GET_CHUNK_SIZE
from ...cache.peer import Peer, Timeouts
from ...cache.requests import RequestClient
from ...cache.transfers import Transfers
from ...errors import ClosedError, LMCacheStreamError

__all__ = ["PrefixCache", "query_cache"]

logger = logging.getLogger(__name__)

_CLOSE_GRACE = 2.0
_QUERY_MARK = "##query"


class PrefixCache:
    """What one engine keeps in one LMCache server, registered under the engine's own model name.

    A server that is gone or full costs time, never an answer: then the engine computes.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._workers = Workers("lmcache-stream offload")
        self._lookups = Lookups(peer)
        self._transfers = Transfers(peer, self._lookups, self._workers)

    @classmethod
    async def open(cls, url: str, http_url: str, model_name: str, geometry: KVGeometry) -> Self:
        """Connect and register.

        Raises:
            CacheConnectError, CacheTimeoutError: no server, or silence.
        """
        timeouts = Timeouts()
        requests = RequestClient(url, connect_timeout=timeouts.connect)
        http = CacheHTTP(http_url, deadline=timeouts.connect)
        peer: Peer | None = None
        try:
            await requests.start()
            chunk_size = await requests.call(GET_CHUNK_SIZE, deadline=timeouts.connect)
            peer = Peer(
                requests, http, model_name=model_name, chunk_size=chunk_size, timeouts=timeouts, alone=True
            )
            await peer.background.start()
            await peer.register(geometry)
        except BaseException:
            if peer is not None:
                await to_the_end(peer.aclose(grace=0))
            await to_the_end(requests.aclose())
            await to_the_end(http.aclose())
            raise
        return cls(peer)

    @property
    def chunk_size(self) -> int:
        """Tokens of a chunk."""
        return self._peer.chunk_size

    def whole(self, num_tokens: int) -> int:
        """Return how many of that many tokens are in whole chunks."""
        return num_tokens // self.chunk_size * self.chunk_size

    async def load(self, tokens: Sequence[int], cache_salt: str) -> Tensor | None:
        """Return the KV of the longest cached prefix, ``[2, L, T, D]``, or None."""
        whole = list(tokens[: self.whole(len(tokens))])
        if not whole:
            return None
        try:
            lease = await self._lookups.acquire(whole, cache_salt, deadline=self._peer.timeouts.lookup)
            if not lease.chunks:
                await self._lookups.release(lease)
                return None
            return await self._transfers.read(lease)
        except LMCacheStreamError as error:
            logger.warning("a prefix is computed, because it could not be loaded: %s", error)
            return None

    def offload_soon(
        self, make: Callable[[], Awaitable[Tensor]], tokens: Sequence[int], cache_salt: str
    ) -> None:
        """Store, in the background, the KV that ``make`` gives for ``tokens``, which are whole chunks."""
        try:
            self._peer.background.spawn(self._offload(make, list(tokens), cache_salt))
        except ClosedError:
            logger.debug("closing: a prompt is not offloaded")

    async def _offload(
        self, make: Callable[[], Awaitable[Tensor]], tokens: list[int], cache_salt: str
    ) -> None:
        try:
            await self._transfers.write(await make(), tokens, cache_salt, deadline=self._peer.timeouts.store)
        except LMCacheStreamError as error:
            logger.warning("a prompt was not offloaded: %s", error)

    async def aclose(self) -> None:
        """Wait a moment for what is being stored, unregister and close."""
        try:
            await self._peer.aclose(grace=_CLOSE_GRACE)
        finally:
            self._workers.close()


async def query_cache(
    url: str, http_url: str, model_name: str, geometry: KVGeometry, num_query_heads: int
) -> PrefixCache:
    """Open the cache of a model's queries, which LMCache keeps as one plane under a name of its own."""
    queries = replace(geometry, num_kv_heads=num_query_heads, layout="queries")
    return await PrefixCache.open(url, http_url, model_name + _QUERY_MARK, queries)
