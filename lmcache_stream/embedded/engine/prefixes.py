"""The engine as a client of an LMCache server: prefixes are loaded from it, prompts offloaded to it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Self

from torch import Tensor

from ..._background import Background, to_the_end
from ...cache.discovery import discover
from ...cache.geometry import KVGeometry
from ...cache.http import CacheHTTP
from ...cache.lookups import Lookups
from ...cache.messages import GET_CHUNK_SIZE
from ...cache.peer import Peer
from ...cache.requests import RequestClient
from ...cache.server_queries import QUERY_MARK
from ...cache.threads import tensor_workers
from ...cache.timeouts import Timeouts
from ...cache.transfers import Transfers
from ...errors import ClosedError, InvalidRequestError, LMCacheStreamError

__all__ = ["PrefixCache", "query_cache"]

logger = logging.getLogger(__name__)

_CLOSE_GRACE = 2.0
# Well within the hour after which the server forgets a silent client, and soon after its own restart.
_RENEWAL_SECONDS = 60.0


class PrefixCache:
    """What one engine keeps in one LMCache server, registered under the engine's own model name.

    A server that is gone or full costs time, never an answer: then the engine computes.
    """

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._workers = tensor_workers("lmcache-stream offload")
        self._lookups = Lookups(peer)
        self._transfers = Transfers(peer, self._lookups, self._workers)
        self._renewal = Background(f"registration of {peer.model_name}")

    @classmethod
    async def open(cls, url: str, http_url: str, model_name: str, geometry: KVGeometry) -> Self:
        """Connect and register.

        Raises:
            InvalidRequestError: a name that the cache refuses, by silence.
            GeometryError: an engine whose KV looks otherwise has registered the name.
            CacheConnectError, CacheTimeoutError: no server, or silence.
        """
        if "@" in model_name:
            raise InvalidRequestError(
                f"the model's name {model_name!r} holds '@', which LMCache refuses: serve it from "
                "another path"
            )
        timeouts = Timeouts()
        requests = RequestClient(url, connect_timeout=timeouts.connect)
        http = CacheHTTP(http_url, deadline=timeouts.connect)
        peer: Peer | None = None
        try:
            await requests.start()
            # To register a live engine's name would replace the layout that its lookups use.
            discover(await http.status(), model_name, None, geometry)
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
        cache = cls(peer)
        await cache._renewal.start()
        cache._renewal.spawn(cache._keep_registered())
        return cache

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
        # Requests must not wait for a server that is gone, one after another.
        if not whole or not self._peer.requests.is_up:
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
        if not self._peer.requests.is_up:
            return
        try:
            filling = self._transfers.given(await make())
            await self._transfers.write(filling, tokens, cache_salt, deadline=self._peer.timeouts.store)
        except LMCacheStreamError as error:
            logger.warning("a prompt was not offloaded: %s", error)
        except Exception:
            # Nobody waits for this: without a word the next lookup would just find nothing.
            logger.exception("a prompt was not offloaded")

    async def _keep_registered(self) -> None:
        while True:
            await asyncio.sleep(_RENEWAL_SECONDS)
            with contextlib.suppress(LMCacheStreamError):
                await self._peer.ensure_registered()

    async def aclose(self) -> None:
        """Wait a moment for what is being stored, unregister and close."""
        try:
            await self._renewal.aclose()
            await self._peer.aclose(grace=_CLOSE_GRACE)
        finally:
            self._workers.close()


async def query_cache(
    url: str, http_url: str, model_name: str, geometry: KVGeometry, num_query_heads: int
) -> PrefixCache:
    """Open the cache of a model's queries, which LMCache keeps as one plane under a name of its own."""
    queries = replace(geometry, num_kv_heads=num_query_heads, layout="queries")
    return await PrefixCache.open(url, http_url, model_name + QUERY_MARK, queries)
