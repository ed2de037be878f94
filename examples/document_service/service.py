"""The service: who is answered when, and the way of one answer from its document to its last token."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import anyio
from aiohttp import ClientSession
from anyio.streams.memory import MemoryObjectSendStream
from serving import Servers

import lmcache_stream as lms
from lmcache_stream.dropping import HFQueries

from .answers import Answer, Event
from .health import health_problems
from .metrics import ServiceMetrics
from .prompt import DocumentPrompt
from .requests import AnswerRequest, Problem, always_kept

__all__ = ["DocumentService", "Limits"]

logger = logging.getLogger(__name__)

Emit = Callable[[Event], Awaitable[None]]

# Events that may wait for a client that reads slowly.
_BUFFERED = 64
# For the last event of an answer that is ended from here.
_LAST_WORD_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the service takes on; times in seconds.

    Attributes:
        running: answers at a time.
        waiting: requests that may wait for their turn; further ones are refused.
        heartbeat: the longest silence on a connection.
        stall: how long a client may read nothing before its answer is ended.
    """

    running: int = 16
    waiting: int = 64
    heartbeat: float = 5.0
    stall: float = 60.0


class DocumentService:
    """Answers questions about documents; ``async with`` opens and closes it.

    Args:
        servers: the cache server and the engine.
        limits: what it takes on.
    """

    def __init__(self, servers: Servers, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.metrics = ServiceMetrics()
        self._servers = servers
        self._prompt = DocumentPrompt(servers.tokenizer, servers.cache.chunk_size)
        # A thread for the tokenizer, which is not made for several.
        self._thread = ThreadPoolExecutor(1, "document tokenizer")
        self._session = ClientSession()
        self._turns = asyncio.Semaphore(self.limits.running)
        self._works: set[anyio.CancelScope] = set()
        self._ends: set[Callable[[], None]] = set()
        # Loads its model at its first use, in a worker thread: a second copy, in this process.
        self._queries = HFQueries(servers.model, window=always_kept(servers.cache.chunk_size)[1])
        self._admitted = 0
        self._nobody = asyncio.Event()
        self._nobody.set()
        self._is_stopping = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self.drain(0)
            await self._session.close()
            self._thread.shutdown(wait=False, cancel_futures=True)

    @asynccontextmanager
    async def answer(self, body: bytes) -> AsyncIterator[Answer]:
        """Begin to answer ``POST /v1/answers``; leaving the block ends the work on it, wherever it is.

        Raises:
            Problem: there will be no answer.
        """
        try:
            request = self._admitted_request(body)
        except Problem as problem:
            raise self.refused(problem) from None
        send, receive = anyio.create_memory_object_stream[Event | Problem](_BUFFERED)
        answer = Answer(receive, self.limits.heartbeat)
        self._admitted += 1
        self._nobody.clear()
        raised: Exception | None = None
        is_deaf = False
        try:
            with receive:
                async with anyio.create_task_group() as group:

                    def end() -> None:
                        nonlocal is_deaf
                        is_deaf = True
                        group.cancel_scope.cancel()

                    self._ends.add(end)
                    group.start_soon(self._work, request, send, end)
                    try:
                        yield answer
                    except Exception as error:
                        # Kept, because a task group would wrap it.
                        raised = error
                    finally:
                        self._ends.discard(end)
                    group.cancel_scope.cancel()
        finally:
            self._admitted -= 1
            if not self._admitted:
                self._nobody.set()
            self.metrics.count(answer.outcome)
        if is_deaf:
            raise ConnectionResetError("the client did not read its answer in time")
        if raised is not None:
            raise raised

    def refused(self, problem: Problem) -> Problem:
        """Count a request that is not begun to be answered, and return its problem."""
        self.metrics.count(problem.outcome)
        return problem

    async def health(self) -> list[str]:
        """Return why requests cannot be answered now, a line a reason; nothing where they can."""
        if self._is_stopping:
            return [str(Problem.stopping())]
        return await health_problems(self._servers.cache, self._session, self._servers.engine_url)

    async def drain(self, grace: float) -> None:
        """Take no further request, give those in being ``grace`` seconds, and end what is left then."""
        self._is_stopping = True
        with anyio.move_on_after(grace):
            await self._nobody.wait()
        for scope in tuple(self._works):
            scope.cancel()
        with anyio.move_on_after(_LAST_WORD_SECONDS):
            await self._nobody.wait()
        for end in tuple(self._ends):
            end()
        await self._nobody.wait()

    def _admitted_request(self, body: bytes) -> AnswerRequest:
        if self._is_stopping:
            raise Problem.stopping()
        request = AnswerRequest.parse(body)
        if self._admitted >= self.limits.running + self.limits.waiting:
            raise Problem.busy(self._admitted - self.limits.running)
        return request

    async def _work(
        self,
        request: AnswerRequest,
        events: MemoryObjectSendStream[Event | Problem],
        end: Callable[[], None],
    ) -> None:
        """Put the events of an answer into ``events``, the last being ``done`` or a problem."""

        async def emit(event: Event | Problem) -> None:
            with anyio.move_on_after(self.limits.stall) as limit:
                await events.send(event)
            if limit.cancelled_caught:
                end()
                await anyio.sleep_forever()

        started = time.perf_counter()
        problem: Problem | None = None
        async with events:
            with anyio.CancelScope() as scope:
                self._works.add(scope)
                try:
                    async with self._turn():
                        await self._answer(request, emit, started)
                except Exception as error:
                    problem = Problem.of(error)
                    if problem.status == 500:
                        logger.exception("a request failed")
                    else:
                        logger.info("a request failed: %s: %s", problem.kind, problem)
                finally:
                    self._works.discard(scope)
            if scope.cancelled_caught:
                problem = Problem.stopping()
            if problem is not None:
                with anyio.move_on_after(_LAST_WORD_SECONDS):
                    await events.send(problem)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        with self.metrics.waiting.track_inprogress():
            await self._turns.acquire()
        try:
            with self.metrics.running.track_inprogress():
                yield
        finally:
            self._turns.release()

    async def _answer(self, request: AnswerRequest, emit: Emit, started: float) -> None:
        """Prefill, drop tokens, decode."""
        cache, engine = self._servers.cache, self._servers.engine
        loop = asyncio.get_running_loop()
        prompt = await loop.run_in_executor(self._thread, self._prompt, request.document, request.question)
        stream = lms.create_request(cache, engine, prompt)
        writer = _Writer(stream, emit, self.metrics, started)
        policy = request.drop_policy(cache.chunk_size)
        if policy is not None:
            # The engine computes the prompt's KV, which the cache server stores, and a first token.
            await writer.run_pass(1)
            if not stream.is_done() and request.max_tokens > 1:
                queries = self._queries if policy.needs_queries else None
                await stream.modify_kv(policy, queries=queries)
                edit = stream.edits[-1]
                self.metrics.observe_edit(request.policy, edit)
                await emit(Event("edit", _told(edit)))
        left = request.max_tokens - stream.decoded_tokens()
        if left and not stream.is_done():
            await writer.run_pass(left)
        await emit(Event("done", writer.summary(len(prompt))))


class _Writer:
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

    async def run_pass(self, max_tokens: int) -> None:
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
