"""The demo itself: the same question answered from the whole KV and from KV with a gap."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import lmcache_stream as lms

from .documents import Document, Prompt, build_prompt
from .plan import check_length, kept_indices, plan_drop

__all__ = ["Answer", "Comparison", "Options", "Stack", "Step", "run_demo"]

Phase = Literal["prefill", "answer from the whole KV", "edit", "answer from the edited KV"]


class Stack(Protocol):
    """What the demo needs of an ``EmbeddedStack``."""

    @property
    def tokenizer(self) -> Any:
        """A transformers tokenizer."""

    @property
    def post_completion(self) -> lms.PostCompletion:
        """The engine."""

    @property
    def max_model_len(self) -> int:
        """The longest sequence of the model, in tokens."""

    def connect(self) -> AbstractAsyncContextManager[lms.AsyncLMCacheContext]:
        """Return a new context, to be used with ``async with``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What can be chosen.

    Attributes:
        ratio: the share of the prompt to drop, between 0 and 1.
        max_tokens: tokens of an answer; at least 2, of which the prefill decodes the first.
    """

    ratio: float = 0.5
    max_tokens: int = 60

    def __post_init__(self) -> None:
        if not 0 < self.ratio < 1:
            raise lms.InvalidRequestError(
                f"the share to drop is {self.ratio}, but it must lie between 0 and 1"
            )
        if self.max_tokens < 2:
            raise lms.InvalidRequestError(f"max_tokens is {self.max_tokens}, but an answer takes at least 2")


@dataclass(frozen=True, slots=True)
class Step:
    """Where the demo is: the document's index, what is being done, and tokens decoded so far of both
    answers together."""

    document: int
    phase: Phase
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer and the figures of the pass that decoded it from cached KV.

    Attributes:
        text: the answer; its first token was decoded by the prefill, which has the whole KV.
        token_ids: the same as ids.
        prefill_seconds: the pass in which the engine computed the prompt's KV.
        ttft: seconds to the first token of the decoding pass.
        tokens_per_second: of decoding, without the first token; None for a single one.
        cached_tokens: tokens whose KV the engine took from the cache.
        finish_reason: the engine's.
    """

    text: str
    token_ids: tuple[int, ...]
    prefill_seconds: float
    ttft: float | None
    tokens_per_second: float | None
    cached_tokens: int | None
    finish_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Both answers to one document.

    Attributes:
        document: the document.
        prompt_token_ids: the prompt of both.
        dropped: indices of the prompt that the edit dropped.
        edit: the report of the edit.
        whole: decoded from the KV of the whole prompt.
        edited: decoded from the KV without the dropped tokens.
    """

    document: Document
    prompt_token_ids: tuple[int, ...]
    dropped: range
    edit: lms.EditReport
    whole: Answer
    edited: Answer

    @property
    def kept_tokens(self) -> int:
        """Tokens of the prompt that were not dropped."""
        return len(self.prompt_token_ids) - len(self.dropped)


async def run_demo(
    stack: Stack,
    documents: Sequence[Document],
    options: Options,
    on_step: Callable[[Step], None] = lambda _: None,
) -> AsyncGenerator[Comparison, None]:
    """Yield a comparison a document, in order; close the iterator if it is left early.

    Decoding is greedy, and every stream has a salt of its own: none is served what another computed.

    Raises:
        InvalidRequestError: a text is too short or too long; nothing has been computed then.
        LMCacheStreamError: what streams raise.
    """
    async with stack.connect() as context:
        prompts = [await asyncio.to_thread(build_prompt, stack.tokenizer, one) for one in documents]
        gaps = [_checked_gap(stack, context, prompt, options) for prompt in prompts]
        for index, (document, prompt, gap) in enumerate(zip(documents, prompts, gaps, strict=True)):
            steps = _Steps(index, on_step)
            whole = _open(stack, context, prompt)
            first = await _prefill(whole, steps)
            # Engines offload in the background: without this wait the prompt would be computed again.
            await whole.retrieve_kv()
            whole_answer = await _answer(whole, first, options, steps, "answer from the whole KV")

            edited = _open(stack, context, prompt)
            first = await _prefill(edited, steps)
            steps.begin("edit")
            cached = len(prompt.token_ids) // context.chunk_size * context.chunk_size
            await edited.modify_kv(lms.keep(kept_indices(gap, cached)))
            edited_answer = await _answer(edited, first, options, steps, "answer from the edited KV")
            yield Comparison(
                document=document,
                prompt_token_ids=prompt.token_ids,
                dropped=gap,
                edit=edited.edits[-1],
                whole=whole_answer,
                edited=edited_answer,
            )


class _Steps:
    """Reports the steps of one document."""

    def __init__(self, document: int, on_step: Callable[[Step], None]) -> None:
        self._document = document
        self._on_step = on_step
        self._phase: Phase = "prefill"
        self._tokens = 0

    def begin(self, phase: Phase) -> None:
        self._phase = phase
        self._on_step(Step(self._document, phase, self._tokens))

    def count(self) -> None:
        self._tokens += 1
        self.begin(self._phase)


def _checked_gap(stack: Stack, context: lms.AsyncLMCacheContext, prompt: Prompt, options: Options) -> range:
    count = len(prompt.token_ids)
    check_length(prompt_tokens=count, max_tokens=options.max_tokens, max_model_len=stack.max_model_len)
    return plan_drop(
        prompt_tokens=count,
        question_start=prompt.question_start,
        chunk_size=context.chunk_size,
        ratio=options.ratio,
    )


def _open(stack: Stack, context: lms.AsyncLMCacheContext, prompt: Prompt) -> lms.AsyncLMCacheStream:
    salt = f"demo-{secrets.token_hex(8)}"
    return lms.create_request(context, stack.post_completion, prompt.token_ids, salt)


async def _prefill(stream: lms.AsyncLMCacheStream, steps: _Steps) -> lms.StreamPerfMetrics:
    steps.begin("prefill")
    metrics = await stream.generate({"max_tokens": 1, "temperature": 0})
    steps.count()
    return metrics


async def _answer(
    stream: lms.AsyncLMCacheStream,
    first: lms.StreamPerfMetrics,
    options: Options,
    steps: _Steps,
    phase: Phase,
) -> Answer:
    """Decode from cached KV, unless the prefill's token ended the answer already."""
    metrics = first
    steps.begin(phase)
    if first.finish_reason in ("length", None):
        params = {"max_tokens": options.max_tokens - 1, "temperature": 0}
        async with stream.open_generation(params) as generation:
            async for _ in generation:
                steps.count()
        metrics = generation.metrics
    return Answer(
        text=stream.output_text().strip(),
        token_ids=tuple(stream.output_tokens()),
        prefill_seconds=first.duration,
        ttft=metrics.ttft,
        tokens_per_second=1 / metrics.tpot if metrics.tpot else None,
        cached_tokens=metrics.cached_tokens,
        finish_reason=metrics.finish_reason,
    )
