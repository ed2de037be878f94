"""One pass of a stream: the engine's events, taken into the stream's state as they are given out."""

from __future__ import annotations

import asyncio
import inspect
import time
import warnings
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import anyio

from ._edited import EditedPrefix
from ._state import StreamState
from ._turns import Turns
from ._verdict import FAILURES, is_done, refuse_failure, refuse_odd_token
from .cache.context import AsyncLMCacheContext
from .completions import FinishEvent, PostCompletion, TokenEvent
from .errors import (
    ClosedError,
    EngineError,
    InvalidRequestError,
    StreamBusyError,
)
from .metrics import StreamPerfMetrics

__all__ = ["Generation"]


class Generation:
    """The tokens of one pass as they come; made by ``AsyncLMCacheStream.open_generation``.

    Iterate it within ``async with``. Every id that it yields belongs to the stream, whatever happens
    afterwards; leaving early aborts the pass in the engine.
    """

    def __init__(
        self,
        context: AsyncLMCacheContext,
        post_completion: PostCompletion,
        state: StreamState,
        sampling_params: Mapping[str, Any],
        suffix_tokens: Sequence[int],
        turns: Turns,
    ) -> None:
        self._context = context
        self._post_completion = post_completion
        self._state = state
        self._params = dict(sampling_params)
        self._extra = list(suffix_tokens)
        self._turns = turns
        self._end_turn: Callable[[], None] | None = None
        self._source: AsyncIterator[TokenEvent | FinishEvent] | None = None
        self._prefix = EditedPrefix(context, state)
        self._prompt: list[int] = []
        self._arrivals: list[float] = []
        self._ids: list[int] = []
        self._finish: FinishEvent | None = None
        self._started = 0.0
        self._is_taken = False
        self._is_closed = False
        self._is_stopped = False
        self._over = asyncio.Event()
        self._pending: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended = 0.0
        self._metrics: StreamPerfMetrics | None = None

    @property
    def metrics(self) -> StreamPerfMetrics:
        """Figures of the pass, once it has ended, in whatever way.

        Raises:
            ClosedError: it has not ended.
        """
        if self._metrics is None:
            raise ClosedError("a generation has metrics once it has ended")
        return self._metrics

    @property
    def finish_reason(self) -> str | None:
        """The engine's reason, None before the end and where it gave none."""
        return self._finish.reason if self._finish else None

    async def __aenter__(self) -> Self:
        try:
            await self._begin()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent:
        if self._is_closed:
            raise StopAsyncIteration
        if self._pending is not None:
            raise StreamBusyError("two tasks iterate one generation: one at a time")
        self._pending = task = asyncio.current_task()
        try:
            await self._begin()
            event = await self._next_token()
            if event is None:
                self._conclude()
        except BaseException as error:
            try:
                if isinstance(error, EngineError):
                    await self._prefix.blame(error)
            finally:
                await self.aclose()
            if self._is_stopped and isinstance(error, asyncio.CancelledError):
                # Not this task's cancellation, but another's `aclose`: for this one it is the end.
                assert task is not None
                task.uncancel()
                raise StopAsyncIteration from None
            raise
        finally:
            self._pending = None
        if event is None:
            await self.aclose()
            raise StopAsyncIteration
        return event

    async def _begin(self) -> None:
        if self._is_closed:
            raise ClosedError("this generation is over: open another one")
        if self._end_turn is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._end_turn = self._turns.take("a generation")
        state = self._state
        self._prompt = state.prompt(self._extra)
        self._prefix = EditedPrefix(self._context, state)
        await self._prefix.pin()
        # Copies, because what a PostCompletion does to its arguments is not the stream's business.
        source: Any = self._post_completion(list(self._prompt), dict(self._params), state.cache_salt)
        if not hasattr(source, "__aiter__"):
            if inspect.iscoroutine(source):
                source.close()
            raise InvalidRequestError(
                "post_completion must return an async iterator (an async generator function will do), "
                f"not {type(source).__name__}"
            )
        self._source = aiter(source)

    async def _next_token(self) -> TokenEvent | None:
        source = self._source
        assert source is not None
        if not self._started:
            self._started = time.perf_counter()
            self._prefix.begin()
        while True:
            try:
                event = await anext(source)
            except StopAsyncIteration:
                return None
            if isinstance(event, TokenEvent):
                refuse_odd_token(event)
                arrived = time.perf_counter() if event.arrived is None else event.arrived
                self._take()
                self._arrivals.append(arrived)
                self._ids.append(event.token_id)
                self._state.append(event.token_id, event.text)
                return event
            if not isinstance(event, FinishEvent):
                raise InvalidRequestError(
                    f"post_completion yielded a {type(event).__name__}, not a TokenEvent or FinishEvent"
                )
            self._finish = event
            if event.reason is not None and event.reason not in FAILURES:
                self._take()
            if event.text:
                self._state.text.append(event.text)

    def _take(self) -> None:
        if not self._is_taken:
            self._is_taken = True
            self._state.take(self._extra)
            self._prefix.unpin()

    def _conclude(self) -> None:
        """The engine came to its end: check what it says of it, then believe it."""
        state = self._state
        self._ended = time.perf_counter()
        refuse_failure(self._finish, self._ids, len(self._prompt))
        cached = self._finish.cached_tokens if self._finish else None
        self._prefix.confirm(cached, len(self._prompt))
        state.done = is_done(self._finish, len(self._ids), self._params)

    async def aclose(self) -> None:
        """End the pass: abort it in the engine if it still runs, give everything back. Idempotent.

        May be called while another task waits for the next token: for that one the pass is over.
        """
        pending = self._pending
        if pending is not None and pending is not asyncio.current_task():
            self._is_stopped = True
            pending.cancel()
            with anyio.CancelScope(shield=True):
                await self._over.wait()
            return
        if self._is_closed:
            return
        self._is_closed = True
        try:
            with anyio.CancelScope(shield=True):
                try:
                    close = getattr(self._source, "aclose", None)
                    if close is not None:
                        await close()
                finally:
                    self._prefix.unpin()
        finally:
            self._over.set()
            if self._end_turn is not None:
                self._end_turn()
            self._metrics = StreamPerfMetrics.from_arrivals(
                started=self._started,
                ended=(self._ended or time.perf_counter()) if self._started else 0.0,
                arrivals=self._arrivals,
                input_tokens=len(self._prompt),
                cached_tokens=self._finish.cached_tokens if self._finish else None,
                finish_reason=self.finish_reason,
            )

    def __del__(self) -> None:
        if getattr(self, "_end_turn", None) is None or self._is_closed:
            return
        assert self._end_turn is not None
        warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2)
        # Left by a bare `break`: the stream must be usable again, and the locks go back.
        self._end_turn()
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._prefix.unpin)
