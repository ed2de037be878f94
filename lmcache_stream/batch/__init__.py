"""Many streams as one batch: run, edited and reported together."""

from .batched import AsyncLMCacheBatchedStream
from .outcome import PhaseOutcome, StreamOutcome
from .report import BatchReport
from .stopped import BatchStoppedError

__all__ = ["AsyncLMCacheBatchedStream", "BatchReport", "BatchStoppedError", "PhaseOutcome", "StreamOutcome"]
