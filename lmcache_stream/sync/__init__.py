"""The library without ``await``: the same names, blocking, over one event loop a process.

Works in a plain script, in threads, and in a notebook whose own loop is running.
"""

from .._editing import KVEdit
from .._state import EditReport
from .._version import __version__
from ..batch import BatchReport, BatchStoppedError, PhaseOutcome, StreamOutcome
from ..cache.geometry import KVGeometry
from ..cache.stores import StoreResult
from ..cache.timeouts import Timeouts
from ..completions import CompletionTimeouts, FinishEvent, PostCompletion, ServedModel, TokenEvent
from ..dropping.keep import Keep, keep
from ..errors import (
    CacheConnectError,
    CacheError,
    CacheLostError,
    CacheTimeoutError,
    CallerError,
    ClosedError,
    EngineConnectError,
    EngineError,
    EngineStatusError,
    EngineStreamError,
    EngineTimeoutError,
    GeometryError,
    InvalidRequestError,
    KVNotReadyError,
    LayoutError,
    LMCacheStreamError,
    StoreIncompleteError,
    StreamBusyError,
    TruncatedStreamError,
)
from ..metrics import Distribution, StreamPerfMetrics
from ..rope import RopeConfig
from ._batch import LMCacheBatchedStream
from ._completions import SyncPostCompletion, VLLMCompletions, find_model
from ._context import LMCacheContext, connect
from ._stream import Generation, LMCacheStream, create_request

__all__ = [
    "BatchReport",
    "BatchStoppedError",
    "CacheConnectError",
    "CacheError",
    "CacheLostError",
    "CacheTimeoutError",
    "CallerError",
    "ClosedError",
    "CompletionTimeouts",
    "Distribution",
    "EditReport",
    "EngineConnectError",
    "EngineError",
    "EngineStatusError",
    "EngineStreamError",
    "EngineTimeoutError",
    "FinishEvent",
    "Generation",
    "GeometryError",
    "InvalidRequestError",
    "KVEdit",
    "KVGeometry",
    "KVNotReadyError",
    "Keep",
    "LMCacheBatchedStream",
    "LMCacheContext",
    "LMCacheStream",
    "LMCacheStreamError",
    "LayoutError",
    "PhaseOutcome",
    "PostCompletion",
    "RopeConfig",
    "ServedModel",
    "StoreIncompleteError",
    "StoreResult",
    "StreamBusyError",
    "StreamOutcome",
    "StreamPerfMetrics",
    "SyncPostCompletion",
    "Timeouts",
    "TokenEvent",
    "TruncatedStreamError",
    "VLLMCompletions",
    "__version__",
    "connect",
    "create_request",
    "find_model",
    "keep",
]
