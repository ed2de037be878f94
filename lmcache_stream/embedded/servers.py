"""The two servers of an embedded stack, opened together."""

from __future__ import annotations

import asyncio
import copy
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._workers import Workers
from .cache import EmbeddedCacheServer
from .default_model import default_model
from .engine import CausalModel, EmbeddedEngine

__all__ = ["Servers", "StackOptions", "open_servers"]

logger = logging.getLogger(__name__)

_SHARED = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackOptions:
    """What an embedded stack is made of; see ``EmbeddedStack``."""

    model: str | os.PathLike[str] | CausalModel | None = None
    chunk_size: int = 32
    cache_gb: float = 2.0
    shared_memory: bool | None = None
    dtype: torch.dtype | None = None
    max_model_len: int | None = None
    offload_queries: bool = False
    workers: int = 1
    max_num_seqs: int = 64


@dataclass(frozen=True, slots=True)
class Servers:
    """A running pair.

    Attributes:
        cache: the cache server.
        engine: the engine, a client of it.
        tokenizer: the model's, for others than the engine, whose threads use its own.
    """

    cache: EmbeddedCacheServer
    engine: EmbeddedEngine
    tokenizer: Any

    @property
    def model(self) -> CausalModel:
        """What the engine serves."""
        return self.engine.core.model


@asynccontextmanager
async def open_servers(options: StackOptions) -> AsyncIterator[Servers]:
    """Open the cache server and the engine on free ports of the loopback interface."""
    model = await _default_model() if options.model is None else options.model
    async with (
        EmbeddedCacheServer(
            chunk_size=options.chunk_size,
            size_gb=options.cache_gb,
            shared_memory=_takes_shared_memory(options),
        ) as cache,
        EmbeddedEngine(
            model,
            cache_url=cache.url,
            cache_http_url=cache.http_url,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            offload_queries=options.offload_queries,
            workers=options.workers,
            max_num_seqs=options.max_num_seqs,
        ) as engine,
    ):
        yield Servers(cache, engine, await asyncio.to_thread(copy.deepcopy, engine.core.model.tokenizer))


async def _default_model() -> str:
    workers = Workers("lmcache-stream default model", 1)
    try:
        return await workers.run(default_model)
    finally:
        workers.close()


def _takes_shared_memory(options: StackOptions) -> bool:
    if options.shared_memory is not None:
        return options.shared_memory
    try:
        found = os.statvfs(_SHARED)
    except OSError:
        return False
    room = found.f_bavail * found.f_frsize
    if room >= options.cache_gb * 2**30:
        return True
    # Containers often have 64 MB of it.
    logger.warning(
        "%s has %.1f GB left, less than cache_gb=%g: KV is sent as pickles instead",
        _SHARED,
        room / 2**30,
        options.cache_gb,
    )
    return False
