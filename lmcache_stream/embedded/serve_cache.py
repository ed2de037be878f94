"""A cache server that runs until it is told to stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import anyio

from .cache import EmbeddedCacheServer

__all__ = ["serve_cache"]


async def serve_cache(
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    http_port: int = 0,
    chunk_size: int = 256,
    size_gb: float = 1.0,
    shared_memory: bool = True,
    on_ready: Callable[[EmbeddedCacheServer], object] = lambda server: None,
) -> NoReturn:
    """Serve a cache until cancelled; then everything is let go of before the cancellation goes on.

    Args:
        host: see ``EmbeddedCacheServer``, as for the next five.
        port: for the operations; 0 takes a free one.
        http_port: for HTTP; 0 takes a free one.
        chunk_size: tokens of a chunk.
        size_gb: GiB of the pool.
        shared_memory: whether clients of this machine map the pool.
        on_ready: called once, with the server that answers from then on, e.g. to print its URLs.

    Raises:
        InvalidRequestError, CacheError: it cannot be started like that.
    """
    async with EmbeddedCacheServer(
        host=host,
        port=port,
        http_port=http_port,
        chunk_size=chunk_size,
        size_gb=size_gb,
        shared_memory=shared_memory,
    ) as server:
        on_ready(server)
        await anyio.sleep_forever()
    raise AssertionError("a sleep forever ended")
