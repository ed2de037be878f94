"""The context: lookup, retrieve and store of KV by token ids on one LMCache server."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import torch

from .._checks import checked_salt, checked_token_ids
from .._workers import Workers
from ..errors import GeometryError, InvalidRequestError
from ..rope import RopeConfig
from .discovery import Discovery
from .geometry import KVGeometry
from .held import HeldPrefix
from .knowledge import Knowledge
from .kv_check import check_kv
from .lifecycle import Lifecycle
from .lookups import PrefixLease
from .messages import ChunkMismatchError
from .model_config import ModelConfig
from .peer import Peer
from .prints import fingerprint, is_finite_kv
from .stores import StoreResult, Stores
from .transfers import Transfers

__all__ = ["AsyncLMCacheContext"]

logger = logging.getLogger(__name__)


class AsyncLMCacheContext(Lifecycle):
    """KV of one model on one LMCache server; made by ``connect``.

    Every method may be called by many tasks at once. Salts and token ids are checked before anything
    is sent. Cancelling is safe at any point: locks are given back, begun stores are completed.
    """

    def __init__(
        self,
        peer: Peer,
        discovery: Discovery,
        config: ModelConfig | None,
        *,
        max_model_len: int | None,
        rope: RopeConfig | None,
        check_layout: bool = True,
    ) -> None:
        super().__init__(peer)
        self._transfers = Transfers(peer, self._lookups, self._workers)
        self._stores = Stores(peer, self._lookups, self._transfers, self._workers)
        self._knowledge = Knowledge(
            peer,
            discovery,
            config,
            self._workers,
            max_model_len=max_model_len,
            rope=rope,
            check_layout=check_layout,
        )

    @property
    def chunk_size(self) -> int:
        """Tokens of one chunk: what the server stores and finds is whole chunks."""
        return self._peer.chunk_size

    @property
    def geometry(self) -> KVGeometry:
        """The KV's shape; where it was assumed, the first retrieve may still correct the dtype."""
        return self._peer.geometry

    @property
    def model_name(self) -> str:
        """The model's name on the cache server."""
        return self._peer.model_name

    @property
    def url(self) -> str:
        """The cache server's ZeroMQ address."""
        return self._peer.requests.url

    @property
    def edit_workers(self) -> Workers:
        """The threads that edits run in."""
        return self._edit_workers

    @property
    def caller_workers(self) -> Workers:
        """The threads that callers' functions run in."""
        return self._caller_workers

    @property
    def rope(self) -> RopeConfig:
        """The model's rotary embedding.

        Raises:
            GeometryError: no model configuration is known, or its RoPE is not supported.
        """
        return self._knowledge.rope

    @property
    def layout_spread(self) -> float | None:
        """What the check of layout and RoPE measured, nearly 0 for right ones; None where it was not made."""
        return self._knowledge.spread

    async def lookup(self, tokens: Sequence[int], cache_salt: str = "") -> int:
        """Return how many leading tokens of ``tokens`` have their KV in the cache, in whole chunks.

        Raises:
            InvalidRequestError: bad token ids or salt.
            CacheConnectError, CacheTimeoutError: no server, or silence.
        """
        lease = await self.pin(tokens, cache_salt)
        await self.unpin(lease)
        return lease.chunks * self.chunk_size

    async def retrieve(self, tokens: Sequence[int], cache_salt: str = "") -> torch.Tensor | None:
        """Return the KV of the longest cached prefix of ``tokens``, or None if there is none.

        Returns ``[2, L, T, D]`` of the cache's dtype on the CPU, private and writable, K rotated at
        its positions; T is a multiple of the chunk size. MLA models give ``[1, L, T, D]``.

        Raises:
            InvalidRequestError: bad token ids or salt.
            GeometryError: the chunks have another shape than the model's configuration says.
            LayoutError: their layer-0 keys are not what layout and RoPE make of equal tokens.
            CacheConnectError, CacheTimeoutError: no server, or silence.
        """
        lease = await self.pin(tokens, cache_salt)
        if lease.chunks == 0:
            await self.unpin(lease)
            return None
        return await self.read(lease)

    async def store(
        self,
        kv: torch.Tensor,
        tokens: Sequence[int],
        cache_salt: str = "",
        *,
        own_salt: bool = False,
        deadline: float | None = None,
    ) -> StoreResult:
        """Store the KV of ``tokens``; tokens beyond the last whole chunk are left out.

        Args:
            kv: ``[2, L, T, D]`` of the geometry's dtype, K rotated at positions 0 to T - 1. It is read
                until the store is over, which may be after a cancelled call: do not write into it.
            tokens: T token ids.
            cache_salt: the salt that the KV is to be found under.
            own_salt: nobody else stores under this salt, so that what is found there needs no
                comparison of bytes.
            deadline: seconds for the transfer, where that is less than ``Timeouts.store``.

        Raises:
            InvalidRequestError: a wrong shape, dtype, length, id or salt, or KV that is not finite; nothing
                was sent.
            GeometryError: the engine's dtype is not known yet; retrieve first or pass geometry=.
            CacheConnectError, CacheTimeoutError: no server, or silence.
        """
        ids = checked_token_ids(tokens, "tokens")
        checked_salt(cache_salt)
        self._check_open()
        self.check_kv(kv, len(ids))
        whole = len(ids) // self.chunk_size * self.chunk_size
        if whole == 0:
            raise InvalidRequestError(
                f"{len(ids)} tokens are less than one chunk of {self.chunk_size}: nothing can be stored"
            )
        if not await self._edit_workers.run(is_finite_kv, kv):
            raise InvalidRequestError("kv holds NaN or infinities: an engine would decode nonsense from it")
        return await self._stores.store(
            kv.detach()[:, :, :whole],
            ids[:whole],
            cache_salt,
            own_salt=own_salt,
            deadline=_shorter(self._peer.timeouts.store, deadline),
        )

    def check_kv(self, kv: torch.Tensor, num_tokens: int) -> None:
        """Raise unless ``kv`` is ``[2, L, T, D]`` of ``num_tokens`` tokens, of the cache's dtype.

        Raises:
            InvalidRequestError: another shape or dtype.
            GeometryError: the engine's dtype is not known yet; retrieve first or pass geometry=.
            LayoutError: KV of a model that can only be retrieved.
        """
        if self._knowledge.is_assumed:
            raise GeometryError(
                "the engine's KV dtype is not known before something was retrieved: retrieve first, or "
                "pass geometry= to connect()"
            )
        if self._knowledge.is_layout_open:
            raise GeometryError(
                "layout='auto': the layout is not known before something was retrieved: retrieve first, or "
                "name it to connect()"
            )
        check_kv(kv, num_tokens, self.geometry, self.model_name)

    async def pin(
        self, tokens: Sequence[int], cache_salt: str = "", *, deadline: float | None = None
    ) -> PrefixLease:
        """Look ``tokens`` up and keep what is found from being evicted until ``unpin`` or ``read``."""
        ids = checked_token_ids(tokens, "tokens")
        checked_salt(cache_salt)
        self._check_open()
        whole = ids[: len(ids) // self.chunk_size * self.chunk_size]
        if not whole:
            return PrefixLease([], cache_salt, "", released=True)
        return await self._lookups.acquire(
            whole, cache_salt, deadline=_shorter(self._peer.timeouts.lookup, deadline)
        )

    async def unpin(self, lease: PrefixLease) -> None:
        """Give the locks of ``lease`` back, once; further calls do nothing."""
        await self._lookups.release(lease)

    def unpin_soon(self, lease: PrefixLease) -> None:
        """As ``unpin``, in the background."""
        self._lookups.release_soon(lease)

    async def read(self, lease: PrefixLease) -> torch.Tensor | None:
        """Return the KV that ``lease`` holds and use it up; None where it was gone after all."""
        async with self.hold(lease) as held:
            return None if held is None else await held.kv()

    @asynccontextmanager
    async def hold(self, lease: PrefixLease) -> AsyncIterator[HeldPrefix | None]:
        """Open the KV that ``lease`` holds where it lies, and use the lease up; None where it was gone.

        Raises as ``retrieve``.
        """
        holds = self._transfers.holds
        async with AsyncExitStack() as stack:
            found = lease.tokens[: lease.chunks * self.chunk_size]
            try:
                held = await stack.enter_async_context(holds.hold(lease))
            except ChunkMismatchError as mismatch:
                await self._knowledge.correct(mismatch)
                # Whoever counts on what was found first must be given neither less nor more.
                lease = await self.pin(found, lease.cache_salt)
                held = await stack.enter_async_context(holds.hold(lease))
            if held.chunks is None or len(held.chunks) * self.chunk_size < len(found):
                yield None
                return
            tokens = lease.tokens[: len(held.chunks) * self.chunk_size]
            await self._knowledge.check_layout(held.chunks, tokens)
            yield HeldPrefix(held.chunks, tokens, held.granted, self._peer, self._stores, self._workers)

    async def fingerprint(self, kv: torch.Tensor) -> torch.Tensor:
        """Return sums over the bits of each chunk of ``kv`` (``[2, L, T, D]``): int64 ``[T / c, 2]``."""
        return await self._edit_workers.run(fingerprint, kv, self.chunk_size, self.geometry.head_size)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else self.url
        return f"<AsyncLMCacheContext {self.model_name!r} {state}>"


def _shorter(usual: float, deadline: float | None) -> float:
    return usual if deadline is None else min(usual, deadline)
