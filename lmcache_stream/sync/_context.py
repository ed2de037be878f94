"""The blocking face of the cache context."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch

from ..cache.connect import connect as connect_async
from ..cache.context import AsyncLMCacheContext
from ..cache.geometry import KVGeometry
from ..cache.stores import StoreResult
from ..cache.timeouts import Timeouts
from ..rope import RopeConfig
from ._portal import Portal


class LMCacheContext:
    """``AsyncLMCacheContext`` without ``await``; made by ``sync.connect``."""

    def __init__(self, portal: Portal, context: AsyncLMCacheContext) -> None:
        self._portal = portal
        self._context = context

    @property
    def chunk_size(self) -> int:
        """Tokens of one chunk."""
        return self._context.chunk_size

    @property
    def geometry(self) -> KVGeometry:
        """The KV's shape."""
        return self._context.geometry

    @property
    def model_name(self) -> str:
        """The model's name on the cache server."""
        return self._context.model_name

    @property
    def url(self) -> str:
        """The cache server's ZeroMQ address."""
        return self._context.url

    @property
    def rope(self) -> RopeConfig:
        """The model's rotary embedding; see ``AsyncLMCacheContext.rope``."""
        return self._context.rope

    @property
    def layout_spread(self) -> float | None:
        """What the check of layout and RoPE measured; see ``AsyncLMCacheContext.layout_spread``."""
        return self._context.layout_spread

    def lookup(self, tokens: Sequence[int], cache_salt: str = "") -> int:
        """See ``AsyncLMCacheContext.lookup``."""
        return self._portal.call(self._context.lookup, tokens, cache_salt)

    def retrieve(self, tokens: Sequence[int], cache_salt: str = "") -> torch.Tensor | None:
        """See ``AsyncLMCacheContext.retrieve``."""
        return self._portal.call(self._context.retrieve, tokens, cache_salt)

    def store(self, kv: torch.Tensor, tokens: Sequence[int], cache_salt: str = "") -> StoreResult:
        """See ``AsyncLMCacheContext.store``."""
        return self._portal.call(self._context.store, kv, tokens, cache_salt)

    def close(self) -> None:
        """Unregister and close everything; idempotent."""
        self._portal.close(self._context.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        portal = getattr(self, "_portal", None)
        if portal is not None and portal.is_open:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2)

    def __repr__(self) -> str:
        return f"<LMCacheContext {self._context.model_name!r}>"


def connect(
    url: str,
    http_url: str,
    model_name: str,
    *,
    geometry: KVGeometry | None = None,
    model_config: Any = None,
    max_model_len: int | None = None,
    queries: bool = False,
    rope: RopeConfig | None = None,
    layout: str | None = None,
    check_layout: bool = True,
    timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
) -> LMCacheContext:
    """Connect to a running LMCache server; see ``lmcache_stream.connect``."""
    opening = connect_async(
        url,
        http_url,
        model_name,
        geometry=geometry,
        model_config=model_config,
        max_model_len=max_model_len,
        queries=queries,
        rope=rope,
        layout=layout,
        check_layout=check_layout,
        timeouts=timeouts,
    )

    async def open_context() -> AsyncLMCacheContext:
        return await opening

    portal = Portal("the LMCache context")
    try:
        return LMCacheContext(portal, portal.call(open_context))
    except BaseException:
        portal.release()
        raise
