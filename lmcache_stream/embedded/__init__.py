"""A whole stack in one process: a cache server, an engine, and what binds them."""

from __future__ import annotations

from .cache import EmbeddedCacheServer
from .engine import EmbeddedEngine
from .stack import EmbeddedStack

__all__ = ["EmbeddedCacheServer", "EmbeddedEngine", "EmbeddedStack"]
