"""The library without ``await``: the same names, blocking, over one event loop a process.

Works in a plain script, in threads, and in a notebook whose own loop is running.
"""

from ..cache.geometry import KVGeometry
from ..cache.peer import Timeouts
from ..completions import CompletionTimeouts, FinishEvent, TokenEvent
from ..dropping.keep import Keep, keep
from ..metrics import StreamPerfMetrics
from ._completions import VLLMCompletions
from ._context import LMCacheContext, connect
from ._stream import Generation, LMCacheStream, create_request

__all__ = [
    "CompletionTimeouts",
    "FinishEvent",
    "Generation",
    "KVGeometry",
    "Keep",
    "LMCacheContext",
    "LMCacheStream",
    "StreamPerfMetrics",
    "Timeouts",
    "TokenEvent",
    "VLLMCompletions",
    "connect",
    "create_request",
    "keep",
]
