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
import torch

from ._editing import fingerprint
from ._state import StreamState
from ._turns import Turns
from ._verdict import FAILURES, is_done, refuse_failure, refuse_odd_token, unused_edit
from .cache.context import AsyncLMCacheContext
from .cache.lookups import PrefixLease
from .completions import FinishEvent, PostCompletion, TokenEvent
from .errors import (
    CacheLostError,
    ClosedError,
    EngineStreamError,
    InvalidRequestError,
    LMCacheStreamError,
    StreamBusyError,
)
from .metrics import StreamPerfMetrics

__all__ = ["Generation"]

# What is left to do when edited KV is gone.
_ADVICE = "Store the edit again with update_kv(), or open a new stream"


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
        self._lease: PrefixLease | None = None
        self._prompt: list[int] = []
        self._edited = 0
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
                if isinstance(error, EngineStreamError):
                    await self._blame_the_cache(error)
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
        self._edited = state.edited
        if self._edited:
            await self._pin_edited()
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

    async def _pin_edited(self) -> None:
        state, context = self._state, self._context
        if state.unconfirmed and not state.lost:
            await self._compare_edited()
        if not state.lost:
            self._lease = await context.pin(state.tokens[: self._edited], state.cache_salt)
            found = self._lease.chunks * context.chunk_size
            if found >= self._edited:
                return
            state.lost = (
                f"{found} of {self._edited} edited tokens are left in LMCache under the salt "
                f"{state.cache_salt!r} (cleared, evicted or restarted); nothing was sent"
            )
        raise CacheLostError(f"{state.lost}. {_ADVICE}")

    async def _compare_edited(self) -> None:
        """Look at the bytes where an earlier pass was left before its end.

        Had the edited KV been gone then, the engine would have stored plain KV in its place.
        """
        state, context = self._state, self._context
        kv = await context.retrieve(state.tokens[: self._edited], state.cache_salt)
        if kv is not None and kv.shape[2] == self._edited and state.fingerprint is not None:
            found = await context.edit_workers.run(fingerprint, kv, context.chunk_size)
            if not torch.equal(found, state.fingerprint):
                state.lost = (
                    f"what LMCache has under the salt {state.cache_salt!r} is no longer the edited KV, so "
                    "that the last answer, which was left before its end, may not be the edit's"
                )
        state.unconfirmed = False

    async def _next_token(self) -> TokenEvent | None:
        source = self._source
        assert source is not None
        if not self._started:
            self._started = time.perf_counter()
            self._state.unconfirmed = bool(self._edited)
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
            self._unpin()

    def _unpin(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            # Neither the first token nor a cancellation waits for the cache server.
            self._context.unpin_soon(lease)

    def _conclude(self) -> None:
        """The engine came to its end: check what it says of it, then believe it."""
        state = self._state
        self._ended = time.perf_counter()
        refuse_failure(self._finish, self._ids, len(self._prompt))
        if self._edited:
            self._confirm_edited()
        state.done = is_done(self._finish, len(self._ids), self._params)

    async def _blame_the_cache(self, error: EngineStreamError) -> None:
        """Raise CacheLostError where the engine failed because the edited KV went away under it.

        vLLM calls a failed load of KV an internal server error.
        """
        if not self._edited:
            return
        context, state = self._context, self._state
        try:
            found = await context.lookup(self._prompt[: self._edited], state.cache_salt)
        except LMCacheStreamError:
            return
        if found < self._edited:
            if self._lease is not None:
                # The locks went with the chunks; what is there now is somebody else's.
                self._lease.chunks = 0
            state.lost = (
                f"the engine failed ({error}), and {found} of {self._edited} edited tokens are left in "
                f"LMCache under the salt {state.cache_salt!r}"
            )
            raise CacheLostError(f"{state.lost}. {_ADVICE}") from error

    def _confirm_edited(self) -> None:
        state = self._state
        cached = self._finish.cached_tokens if self._finish else None
        if cached is None:
            warnings.warn(
                "the engine does not report cached tokens, so that nothing confirms that it decoded from "
                "the edited KV: start vLLM with --enable-prompt-tokens-details",
                RuntimeWarning,
                stacklevel=4,
            )
            return
        state.unconfirmed = False
        state.lost = unused_edit(cached, self._edited, len(self._prompt), state.cache_salt)
        if state.lost:
            raise CacheLostError(f"{state.lost}. {_ADVICE}")

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
                    self._unpin()
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
        if self._lease is not None and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._context.unpin_soon, self._lease)
