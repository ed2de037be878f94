"""Edit the KV cache of a running vLLM + LMCache from asyncio: prefill, drop tokens, decode."""

from ._editing import KVEdit
from ._state import EditReport
from ._version import __version__
from .batch import (
    AsyncLMCacheBatchedStream,
    BatchReport,
    BatchStoppedError,
    PhaseOutcome,
    StreamOutcome,
)
from .cache.connect import connect
from .cache.context import AsyncLMCacheContext
from .cache.geometry import KVGeometry
from .cache.stores import StoreResult
from .cache.timeouts import Timeouts
from .completions import (
    CompletionTimeouts,
    FinishEvent,
    PostCompletion,
    ServedModel,
    TokenEvent,
    VLLMCompletions,
    find_model,
)
from .dropping.keep import Keep, keep
from .errors import (
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
from .generation import Generation
from .metrics import Distribution, StreamPerfMetrics
from .rope import RopeConfig
from .stream import AsyncLMCacheStream, create_request
from .sync import LMCacheBatchedStream, LMCacheStream

__all__ = [
    "AsyncLMCacheBatchedStream",
    "AsyncLMCacheContext",
    "AsyncLMCacheStream",
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
