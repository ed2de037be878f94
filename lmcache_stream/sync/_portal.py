"""One event loop a process, in a thread of its own, for everything that blocks."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar, cast

import anyio
from anyio.from_thread import BlockingPortal

from ..errors import ClosedError, InvalidRequestError

T = TypeVar("T")

# How long a blocking call that was interrupted waits for its cancellation to be through.
_CANCEL_SECONDS = 5.0
# How long the exiting interpreter waits for the loop; a server that is gone must not hold it up.
_EXIT_SECONDS = 1.0


class _Loop:
    """An event loop in a daemon thread, and the portal into it."""

    def __init__(self) -> None:
        started: Future[BlockingPortal] = Future()
        self.thread = threading.Thread(
            target=self._run, args=(started,), name="lmcache-stream loop", daemon=True
        )
        self.thread.start()
        self.portal = started.result()

    def _run(self, started: Future[BlockingPortal]) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            async with BlockingPortal() as portal:
                started.set_result(portal)
                await portal.sleep_until_stopped()

        try:
            anyio.run(main)
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    def stop(self, wait: float | None, *, cancel: bool) -> None:
        self.portal.start_task_soon(self.portal.stop, cancel)
        self.thread.join(wait)


class _Call:
    """One piece of work on the loop, which can be cancelled from outside before and after it starts."""

    def __init__(self, function: Callable[..., Awaitable[Any]], arguments: tuple[Any, ...]) -> None:
        self.over = threading.Event()
        self.result: Any = None
        self.failure: BaseException | None = None
        self._function = function
        self._arguments = arguments
        self._scope: anyio.CancelScope | None = None
        self._is_cancelled = False

    async def run(self) -> None:
        try:
            with anyio.CancelScope() as self._scope:
                if not self._is_cancelled:
                    self.result = await self._function(*self._arguments)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            # Handed over, not raised: a SystemExit of a callback would end the loop of everybody.
            self.failure = error
        finally:
            self.over.set()

    def cancel(self) -> None:
        self._is_cancelled = True
        if self._scope is None:
            self.over.set()
        else:
            self._scope.cancel()


class _Process:
    """The loop of this process while somebody holds a share of it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.holders = 0
        self.loop: _Loop | None = None

    def enter(self) -> _Loop:
        with self.lock:
            if self.loop is None or not self.loop.thread.is_alive():
                self.loop = _Loop()
                self.holders = 0
            self.holders += 1
            return self.loop

    def leave(self, loop: _Loop) -> None:
        with self.lock:
            if loop is not self.loop:
                return
            self.holders -= 1
            if self.holders:
                return
            self.loop = None
        loop.stop(None, cancel=False)

    def at_exit(self) -> None:
        loop, self.loop = self.loop, None
        if loop is not None and loop.thread.is_alive():
            loop.stop(_EXIT_SECONDS, cancel=True)

    def after_fork(self) -> None:
        # Only the thread that forked lives on in the child: the loop is not there.
        self.__init__()  # type: ignore[misc]


_process = _Process()
atexit.register(_process.at_exit)
os.register_at_fork(after_in_child=_process.after_fork)


class Portal:
    """One holder's share of the loop; the last one to be released ends the loop."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._pid = os.getpid()
        self._loop: _Loop | None = _process.enter()

    @property
    def is_open(self) -> bool:
        return self._loop is not None

    def call(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Run ``function`` on the loop and return its result; Ctrl-C cancels it there.

        Raises:
            ClosedError: released, or made before this process was forked.
            InvalidRequestError: called on the loop's own thread, which would wait for itself.
        """
        loop = self._loop
        if loop is None:
            raise ClosedError(f"{self._owner} is closed")
        if self._pid != os.getpid():
            raise ClosedError(f"{self._owner} was made before this process was forked: make a new one")
        self._refuse_own_thread(loop)
        call = _Call(function, arguments)
        try:
            loop.portal.start_task_soon(call.run).result()
            if call.failure is not None:
                raise call.failure
            return cast(T, call.result)
        except BaseException:
            # Either the work's own error, or an interrupt of this thread, wherever in the line above it
            # struck: then the work must learn of it, and be through before the caller goes on.
            if not call.over.is_set():
                loop.loop.call_soon_threadsafe(call.cancel)
                call.over.wait(_CANCEL_SECONDS)
            raise

    def _refuse_own_thread(self, loop: _Loop) -> None:
        if threading.current_thread() is loop.thread:
            raise InvalidRequestError(
                f"{self._owner} blocks and was called from the event loop's own thread: await the "
                "asynchronous names there"
            )

    def close(self, function: Callable[[], Awaitable[None]]) -> None:
        """Run ``function``, which closes the owner, and give the share back; idempotent.

        In a forked child there is nothing to close.
        """
        if self._loop is None:
            return
        self._refuse_own_thread(self._loop)
        try:
            if self._pid == os.getpid():
                self.call(function)
        finally:
            self.release()

    def release(self) -> None:
        """Give the share back; idempotent."""
        loop, self._loop = self._loop, None
        if loop is not None and self._pid == os.getpid():
            _process.leave(loop)
