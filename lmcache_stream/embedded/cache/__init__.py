"""A cache server that speaks the protocol of LMCache's multiprocess server, on any event loop."""

from __future__ import annotations

from .options import CacheOptions
from .server import EmbeddedCacheServer

__all__ = ["CacheOptions", "EmbeddedCacheServer"]
