"""The service: who is answered when, and what ends an answer early."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import anyio
from aiohttp import ClientSession
from anyio.streams.memory import MemoryObjectSendStream
from serving import Servers

from .answerer import Answerer
from .answers import Answer, Event
from .health import health_problems
from .metrics import ServiceMetrics
from .requests import AnswerRequest, Problem

__all__ = ["DocumentService", "Limits"]

logger = logging.getLogger(__name__)

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
        self._answerer = Answerer(servers, self.metrics)
        self._session = ClientSession()
        self._turns = asyncio.Semaphore(self.limits.running)
        self._works: set[anyio.CancelScope] = set()
        self._ends: set[Callable[[], None]] = set()
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
            self._answerer.close()

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
                        await self._answerer.answer(request, emit, started)
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
