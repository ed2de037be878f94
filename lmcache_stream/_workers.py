"""Worker threads for tensor work and for callers' code, which must not hold the event loop."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
U = TypeVar("U")
_Job = tuple[Callable[[], Any], Callable[[Any, BaseException | None], None]]

# An interpreter that ends while a thread is inside torch is aborted. It waits, but no longer than this.
_EXIT_SECONDS = 1.0
_PAUSE = 0.005
_all: weakref.WeakSet[Workers] = weakref.WeakSet()


class Workers:
    """At most ``limit`` daemon threads, made as they are needed, that end with their owner.

    anyio's worker threads would live on until the event loop ends. For those of an executor of the standard
    library an exiting interpreter waits, however long a caller's code takes.

    Args:
        name: of the threads.
        limit: the most of them; one a core and at most 8 by default.
        on_start: called first in each.
    """

    def __init__(
        self, name: str, limit: int | None = None, *, on_start: Callable[[], Any] | None = None
    ) -> None:
        self._name = name
        self._on_start = on_start
        self._limit = limit or min(8, os.cpu_count() or 1)
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads = 0
        self._under_way = 0
        self._when_idle: list[Callable[[], Any]] = []
        self._lock = threading.Lock()
        self._is_closed = False
        _all.add(self)

    @property
    def is_busy(self) -> bool:
        """Whether anything runs or waits to."""
        return self._under_way > 0

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run ``function`` in a thread; a cancelled caller leaves at once, the thread goes on."""
        return await self._begin(function, *arguments)

    def _begin(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if outcome.done():
                return
            if error is None:
                outcome.set_result(result)
            else:
                outcome.set_exception(error)

        def report(result: Any, error: BaseException | None) -> None:
            # Where the loop is closed nobody waits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, result, error)

        context = contextvars.copy_context()
        self._submit(partial(context.run, _guarded, outcome, function, *arguments), report)
        return outcome

    async def run_each(self, function: Callable[[U], T], arguments: Iterable[U]) -> list[T]:
        """Run ``function`` on each argument, side by side, and return the results in order.

        Waits for all of them, and then raises the error of the first argument that has one. A cancelled
        caller leaves at once: what runs goes on, what has not begun never does.
        """
        outcomes = [self._begin(function, one) for one in arguments]
        try:
            if outcomes:
                await asyncio.wait(outcomes)
        finally:
            # Only a cancelled caller leaves any undone.
            for one in outcomes:
                one.cancel()
        errors = [error for one in outcomes if (error := one.exception()) is not None]
        if errors:
            raise errors[0]
        return [one.result() for one in outcomes]

    def submit(self, function: Callable[[], Any]) -> None:
        """Run ``function`` behind all that was given before; nobody learns what comes of it."""
        self._submit(function, lambda result, error: None)

    def _submit(self, work: Callable[[], Any], report: Callable[[Any, BaseException | None], None]) -> None:
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"{self._name} is closed")
            self._under_way += 1
            if self._under_way > self._threads < self._limit:
                self._threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
            # Under the lock, so that no job comes behind the end of the threads.
            self._jobs.put((work, report))

    def _work(self) -> None:
        broken: BaseException | None = None
        try:
            if self._on_start is not None:
                self._on_start()
        except BaseException as error:
            # Of every job that comes here: a thread that ended would leave its job without an answer.
            broken = error
        while (job := self._jobs.get()) is not None:
            work, report = job
            result, failure = None, None
            try:
                if broken is not None:
                    raise broken
                result = work()
            except BaseException as error:
                failure = error
            with self._lock:
                self._under_way -= 1
                calls = [] if self.is_busy else self._when_idle
                if calls:
                    self._when_idle = []
            report(result, failure)
            for call in calls:
                # Where that loop is closed nobody waits any more.
                with contextlib.suppress(RuntimeError):
                    call()
            del job, work, report, result, failure, calls

    def close(self) -> None:
        """Let the threads end when they are through with what they were given; idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for _ in range(self._threads):
                self._jobs.put(None)

    async def settle(self) -> None:
        """Wait until nothing runs any more."""
        loop, idle = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            if not self.is_busy:
                return
            self._when_idle.append(lambda: loop.call_soon_threadsafe(idle.set))
        await idle.wait()


def wait_at_exit() -> bool:
    """Wait for all threads, but not for long; return whether they are through."""
    end = time.monotonic() + _EXIT_SECONDS
    while is_busy := any(one.is_busy for one in list(_all)):
        if time.monotonic() >= end:
            break
        time.sleep(_PAUSE)
    return not is_busy


atexit.register(wait_at_exit)


def _guarded(outcome: asyncio.Future[T], function: Callable[..., T], *arguments: Any) -> T | None:
    if outcome.cancelled():
        return None
    try:
        return function(*arguments)
    except (StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit) as error:
        # No future can carry the first, and the others would end the loop of everybody.
        raise RuntimeError(f"{function!r} raised {type(error).__name__}: {error}") from error
