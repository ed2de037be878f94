"""What a job runs on, what it does with every row, and how many rows there were."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .._editing import Queries
from ..batch.retries import RetryPolicy
from ..cache.context import AsyncLMCacheContext
from ..completions import PostCompletion
from ..dropping import Policy

__all__ = ["Counts", "Plan", "Servers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """What a job runs on.

    Attributes:
        context: the cache.
        engine: the engine.
        model: the model's name in the engine.
        load_tokenizer: gives a transformers tokenizer; called once, when the job begins, in a thread.
        vocab_size: of the model, where it is known.
        max_model_len: of the model, where it is known.
    """

    context: AsyncLMCacheContext
    engine: PostCompletion
    model: str
    load_tokenizer: Callable[[], Any]
    vocab_size: int | None = None
    max_model_len: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is done with every row.

    Attributes:
        policy: what edits the KV; None decodes from the whole.
        sampling_params: of the decoding, under the engine's names.
        queries: for policies that need them.
        baseline: whether to decode from the whole KV as well.
        limit: rows that are worked on at once.
        retries: which failures are tried again.
    """

    policy: Policy | None
    sampling_params: Mapping[str, Any]
    queries: Queries | None = None
    baseline: bool = False
    limit: int = 64
    retries: RetryPolicy = field(default_factory=RetryPolicy)


@dataclass(slots=True)
class Counts:
    """Rows of a job.

    Attributes:
        done: those that came to their end.
        failed: those that failed in a stream; they are in the output too.
        bad: those that could not be read, or are no prompt for the model.
        skipped: those that were in the output before.
        first_failure: the line and the error of the first that failed.
    """

    done: int = 0
    failed: int = 0
    bad: int = 0
    skipped: int = 0
    first_failure: str | None = None
