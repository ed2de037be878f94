"""The embedded engine as a server: loaded, connected to its cache, and listening."""

from __future__ import annotations

import asyncio
import os
import warnings
from types import TracebackType
from typing import Self

import anyio
import torch
from aiohttp import web

from ..._background import to_the_end
from ..._workers import Workers
from ...errors import ClosedError, InvalidRequestError
from .core import EngineCore
from .http import application
from .model import CausalModel
from .prefixes import PrefixCache, query_cache

__all__ = ["EmbeddedEngine"]

_CLOSE_SECONDS = 2.0
# Longer than one step takes on a slow machine.
_STEP_SECONDS = 20.0


class EmbeddedEngine:
    """vLLM's ``/v1/completions`` and ``/v1/models`` over a Hugging Face causal LM on the CPU.

    Args:
        model: a folder, a Hub id, or a model that is loaded already.
        host: address to listen on.
        port: TCP port; 0 takes a free one.
        served_model_name: the model's name in the API; by default that of ``model``.
        cache_url: an LMCache server's ``tcp://HOST:PORT``; without one nothing is cached.
        cache_http_url: its ``http://HOST:PORT``.
        dtype: of weights and KV; float32 by default. This and the next two are a loaded model's own.
        max_model_len: the longest sequence in tokens; by default what the model was made for.
        offload_queries: also store the queries of prompts that are computed whole, under
            ``<model>##query``.
        workers: threads that compute, each with torch's own threads; one is usually best.
        max_num_seqs: requests that are worked on at a time.

    Raises:
        InvalidRequestError: on entering, a model that cannot be loaded, or bad arguments.
        GeometryError: on entering, a model whose KV cannot be cached by tokens.
        CacheConnectError: on entering, no LMCache server.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | CausalModel,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        served_model_name: str | None = None,
        cache_url: str | None = None,
        cache_http_url: str | None = None,
        dtype: torch.dtype | None = None,
        max_model_len: int | None = None,
        offload_queries: bool = False,
        workers: int = 1,
        max_num_seqs: int = 64,
    ) -> None:
        if (cache_url is None) != (cache_http_url is None):
            raise InvalidRequestError("cache_url= and cache_http_url= belong together: give both or none")
        if offload_queries and cache_url is None:
            raise InvalidRequestError("offload_queries= needs a cache: give cache_url= and cache_http_url=")
        if min(workers, max_num_seqs) < 1:
            raise InvalidRequestError("workers= and max_num_seqs= must be at least 1")
        if isinstance(model, CausalModel) and (
            dtype is not None or max_model_len is not None or (offload_queries and not model.records_queries)
        ):
            raise InvalidRequestError(
                "dtype=, max_model_len= and records_queries= belong to CausalModel.load() where a loaded "
                "model is given"
            )
        self._source = model if isinstance(model, CausalModel) else os.fspath(model)
        self._host, self._port = host, port
        self._served_name = served_model_name
        self._urls = (cache_url, cache_http_url)
        self._dtype, self._max_model_len = dtype, max_model_len
        self._offloads_queries = offload_queries
        self._max_num_seqs = max_num_seqs
        self._workers = Workers("lmcache-stream engine", workers)
        self._caches: list[PrefixCache] = []
        self._core: EngineCore | None = None
        self._runner: web.AppRunner | None = None
        self._is_used = False

    @property
    def url(self) -> str:
        """Where it listens, ``http://HOST:PORT``."""
        if self._runner is None:
            raise ClosedError("the embedded engine is not running")
        host, port = self._runner.addresses[0][:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def core(self) -> EngineCore:
        """Model and counts.

        Raises:
            ClosedError: it is not running.
        """
        if self._core is None:
            raise ClosedError("the embedded engine is not running")
        return self._core

    async def __aenter__(self) -> Self:
        if self._is_used:
            raise ClosedError("an embedded engine is started once: make another one")
        self._is_used = True
        try:
            await self._open()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def _open(self) -> None:
        source = self._source
        if not isinstance(source, CausalModel):
            source = await self._workers.run(self._load, source)
        queries = prefixes = None
        url, http_url = self._urls
        if url is not None and http_url is not None:
            prefixes = await PrefixCache.open(url, http_url, source.name, source.geometry)
            self._caches.append(prefixes)
            if self._offloads_queries:
                queries = await query_cache(
                    url, http_url, source.name, source.geometry, source.num_query_heads
                )
                self._caches.append(queries)
        self._core = EngineCore(
            source,
            self._served_name or source.name,
            self._workers,
            prefixes=prefixes,
            queries=queries,
            max_num_seqs=self._max_num_seqs,
        )
        self._runner = web.AppRunner(
            application(self._core),
            access_log=None,
            # A request ends with its client.
            handler_cancellation=True,
            shutdown_timeout=_CLOSE_SECONDS,
        )
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            raise InvalidRequestError(
                f"the embedded engine cannot listen on {self._host}:{self._port}: {error.strerror}"
            ) from error

    def _load(self, source: str) -> CausalModel:
        return CausalModel.load(
            source,
            dtype=self._dtype or torch.float32,
            max_model_len=self._max_model_len,
            records_queries=self._offloads_queries,
        )

    async def aclose(self) -> None:
        """End every request and close everything; idempotent."""
        await to_the_end(self._close())

    async def _close(self) -> None:
        runner, self._runner = self._runner, None
        caches, self._caches = self._caches, []
        was_open, self._core = self._core is not None, None
        try:
            if runner is not None:
                await runner.cleanup()
            async with asyncio.TaskGroup() as group:
                for cache in caches:
                    group.create_task(cache.aclose())
        finally:
            self._workers.close()
            # What runs cannot be interrupted, and the process must not end during it; but a model that is
            # loaded, or downloaded, may take long.
            with anyio.move_on_after(_STEP_SECONDS if was_open else _CLOSE_SECONDS):
                await self._workers.settle()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if getattr(self, "_runner", None) is not None:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2)
