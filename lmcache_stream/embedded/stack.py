"""The embedded stack: a cache server and an engine in this process, for a laptop, a test, a first try."""

from __future__ import annotations

import asyncio
import os
import warnings
from types import TracebackType
from typing import Any, Self

import torch

import lmcache_stream as lms

from .._background import to_the_end
from ..errors import ClosedError
from ._thread import ServerThread
from .engine import CausalModel
from .servers import Servers, StackOptions, open_servers

__all__ = ["EmbeddedStack", "StackBase"]


class StackBase:
    """What an embedded stack says of itself while it runs."""

    def __init__(
        self,
        model: str | os.PathLike[str] | CausalModel | None = None,
        *,
        chunk_size: int = 32,
        cache_gb: float = 2.0,
        shared_memory: bool | None = None,
        dtype: torch.dtype | None = None,
        max_model_len: int | None = None,
        offload_queries: bool = False,
        workers: int = 1,
        max_num_seqs: int = 64,
    ) -> None:
        options = StackOptions(
            model=model,
            chunk_size=chunk_size,
            cache_gb=cache_gb,
            shared_memory=shared_memory,
            dtype=dtype,
            max_model_len=max_model_len,
            offload_queries=offload_queries,
            workers=workers,
            max_num_seqs=max_num_seqs,
        )
        self._thread = ServerThread("lmcache-stream embedded", lambda: open_servers(options))
        self._servers: Servers | None = None

    def _running(self) -> Servers:
        if self._servers is None:
            raise ClosedError("the embedded stack is not running: use it in a `with` block")
        return self._servers

    @property
    def url(self) -> str:
        """The cache server's ``tcp://HOST:PORT``."""
        return self._running().cache.url

    @property
    def http_url(self) -> str:
        """The cache server's ``http://HOST:PORT``."""
        return self._running().cache.http_url

    @property
    def engine_url(self) -> str:
        """The engine's ``http://HOST:PORT``."""
        return self._running().engine.url

    @property
    def model_name(self) -> str:
        """The model's name, on the cache server and in the engine's API alike."""
        return self._running().model.name

    @property
    def tokenizer(self) -> Any:
        """The model's transformers tokenizer."""
        return self._running().tokenizer

    @property
    def max_model_len(self) -> int:
        """The longest sequence, in tokens."""
        return self._running().model.max_model_len

    @property
    def geometry(self) -> lms.KVGeometry:
        """The KV's shape and dtype."""
        return self._running().model.geometry

    def _connection(self) -> dict[str, Any]:
        model = self._running().model
        return {
            "url": self.url,
            "http_url": self.http_url,
            "model_name": model.name,
            "geometry": model.geometry,
            "model_config": model.config,
            "max_model_len": model.max_model_len,
        }

    def __repr__(self) -> str:
        try:
            state = f"{self.model_name!r} at {self.engine_url}"
        except ClosedError:
            state = "not running"
        return f"<{type(self).__name__} {state}>"

    def __del__(self) -> None:
        if getattr(self, "_servers", None) is not None:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2)


class EmbeddedStack(StackBase):
    """A cache server and an engine in a thread of this process, on free loopback ports.

    Both speak the protocols of the real ones, so that what runs on an embedded stack runs on a remote
    vLLM and LMCache as it is. Use it with ``async with``; it is ready when entered. The blocking one is
    ``lmcache_stream.embedded.sync.EmbeddedStack``.

    Args:
        model: a folder or Hub id of a causal LM; by default a small one that can follow instructions.
        chunk_size: tokens of one chunk of the cache.
        cache_gb: memory of the cache.
        shared_memory: whether KV goes through shared memory or as pickles; by default as there is room.
        dtype: of weights and KV; float32 by default.
        max_model_len: the longest sequence in tokens; by default what the model was made for.
        offload_queries: also store queries, under ``<model>##query``.
        workers: threads that compute, each with torch's own threads.
        max_num_seqs: requests that are worked on at a time.

    Raises:
        InvalidRequestError: on entering, a model that cannot be loaded, or a missing extra.
        GeometryError: on entering, a model whose KV cannot be cached by tokens.
    """

    _completions: lms.VLLMCompletions | None = None

    @property
    def post_completion(self) -> lms.VLLMCompletions:
        """The engine, for ``create_request``; it closes with the stack."""
        self._running()
        assert self._completions is not None
        return self._completions

    def connect(self, **options: Any) -> lms.connect:
        """Connect to the cache server: ``await`` it or use it with ``async with``.

        Args:
            options: those of ``lmcache_stream.connect``, e.g. ``timeouts``.
        """
        return lms.connect(**{**self._connection(), **options})

    async def __aenter__(self) -> Self:
        started = self._thread.start()
        try:
            # Shielded: a cancelled future could not be told that the servers are up. And marked as seen:
            # one that is stopped while it starts has an error that nobody waits for.
            waiting = asyncio.wrap_future(started)
            waiting.add_done_callback(lambda future: future.cancelled() or future.exception())
            self._servers = await asyncio.shield(waiting)
            self._completions = lms.VLLMCompletions(self.engine_url, self.model_name)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def aclose(self) -> None:
        """Stop both servers; idempotent."""
        await to_the_end(self._close())

    async def _close(self) -> None:
        completions, self._completions = self._completions, None
        self._servers = None
        try:
            if completions is not None:
                await completions.aclose()
        finally:
            await asyncio.to_thread(self._thread.stop)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()
