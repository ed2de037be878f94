"""The way of one answer from its document to its last token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from serving import Servers

import lmcache_stream as lms
from lmcache_stream.dropping import HFQueries

from .answers import Event
from .metrics import ServiceMetrics
from .prompt import DocumentPrompt
from .requests import AnswerRequest, always_kept

__all__ = ["Answerer"]

Emit = Callable[[Event], Awaitable[None]]


class Answerer:
    """Answers requests, any number at a time; to be closed.

    Args:
        servers: the cache server and the engine.
        metrics: where figures are counted.
    """

    def __init__(self, servers: Servers, metrics: ServiceMetrics) -> None:
        self._servers = servers
        self._metrics = metrics
        self._prompt = DocumentPrompt(servers.tokenizer, servers.cache.chunk_size)
        # A thread for the tokenizer, which is not made for several.
        self._thread = ThreadPoolExecutor(1, "document tokenizer")
        # Loads its model at its first use, in a worker thread: a second copy, in this process.
        self._queries = HFQueries(servers.model, window=always_kept(servers.cache.chunk_size)[1])

    def close(self) -> None:
        """End its thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def answer(self, request: AnswerRequest, emit: Emit, started: float) -> None:
        """Prefill, drop tokens, decode; cancelling ends it wherever it is.

        Args:
            request: what is asked.
            emit: takes the events ``token``, ``edit`` and, last, ``done``.
            started: when the request came, by ``time.perf_counter()``.
        """
        cache, engine = self._servers.cache, self._servers.engine
        loop = asyncio.get_running_loop()
        prompt = await loop.run_in_executor(self._thread, self._prompt, request.document, request.question)
        stream = lms.create_request(cache, engine, prompt)
        passes = _Passes(stream, emit, self._metrics, started)
        policy = request.drop_policy(cache.chunk_size)
        if policy is not None:
            # The engine computes the prompt's KV, which the cache server stores, and a first token.
            await passes.run(1)
            if not stream.is_done() and request.max_tokens > 1:
                await stream.modify_kv(policy, queries=self._queries if policy.needs_queries else None)
                edit = stream.edits[-1]
                self._metrics.observe_edit(request.policy, edit)
                await emit(Event("edit", _told(edit)))
        left = request.max_tokens - stream.decoded_tokens()
        if left and not stream.is_done():
            await passes.run(left)
        await emit(Event("done", passes.summary(len(prompt))))


class _Passes:
    """Runs the passes of a stream and emits their text as it comes."""

    def __init__(
        self, stream: lms.AsyncLMCacheStream, emit: Emit, metrics: ServiceMetrics, started: float
    ) -> None:
        self._stream = stream
        self._emit = emit
        self._metrics = metrics
        self._started = started
        self._sent = 0
        self._ttft: float | None = None
        self._last: lms.StreamPerfMetrics | None = None

    async def run(self, max_tokens: int) -> None:
        params = {"max_tokens": max_tokens, "temperature": 0}
        async with self._stream.open_generation(params) as generation:
            async for event in generation:
                if self._ttft is None:
                    self._ttft = time.perf_counter() - self._started
                    self._metrics.ttft.observe(self._ttft)
                await self._send(event.text)
        # What the engine sent behind the last token.
        await self._send(self._stream.output_text()[self._sent :])
        self._last = generation.metrics
        self._metrics.observe_pass(generation.metrics)

    async def _send(self, text: str) -> None:
        # Of a character that several tokens make up, all but the last have no text.
        if text:
            self._sent += len(text)
            await self._emit(Event("token", {"text": text}))

    def summary(self, prompt_tokens: int) -> dict[str, Any]:
        """Return what ``done`` says; times in seconds."""
        last = self._last
        return {
            "text": self._stream.output_text(),
            "finish_reason": last.finish_reason if last else None,
            "prompt_tokens": prompt_tokens,
            "cached_tokens": last.cached_tokens if last else None,
            "output_tokens": self._stream.decoded_tokens(),
            "ttft": self._ttft,
            "tpot": last.tpot if last else None,
            "duration": time.perf_counter() - self._started,
        }


def _told(edit: lms.EditReport) -> dict[str, Any]:
    return {
        "tokens_before": edit.tokens_before,
        "tokens_after": edit.tokens_after,
        "kept_share": round(edit.tokens_after / edit.tokens_before, 4),
        "bytes_before": edit.bytes_before,
        "bytes_after": edit.bytes_after,
        "seconds": edit.seconds,
    }
