"""Servers on an event loop of their own, in a thread, so that whoever uses them may block."""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

from ..errors import ClosedError

T = TypeVar("T")

__all__ = ["ServerThread"]

# How long the exiting interpreter waits for servers that nobody stopped.
_EXIT_SECONDS = 5.0


class ServerThread(Generic[T]):
    """Holds an asynchronous context open in a daemon thread, from ``start`` to ``stop``.

    One that is forgotten is told to stop; an interpreter that exits waits a while for it.
    """

    def __init__(self, name: str, open_servers: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self._host = _Host(name, open_servers)
        weakref.finalize(self, self._host.end).atexit = False

    def start(self) -> Future[T]:
        """Begin, and return what will be the context's value, or its error.

        Raises:
            ClosedError: it was started before.
        """
        self._host.start()
        return self._host.started

    def stop(self) -> None:
        """Close the context, or give its opening up, and wait for the thread; idempotent, blocks."""
        self._host.end()
        self._host.join(None)


class _Host(Generic[T]):
    def __init__(self, name: str, open_servers: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self.started: Future[T] = Future()
        self._open = open_servers
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[None] | None = None
        self._is_ended = False

    def start(self) -> None:
        if self._thread.ident is not None or self._is_ended:
            raise ClosedError("an embedded stack is started once: make another one")
        self._thread.start()

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            if self.started.done():
                raise
            self.started.set_exception(error)

    async def _main(self) -> None:
        with self._lock:
            self._loop = asyncio.get_running_loop()
            self._serving = asyncio.current_task()
            is_ended = self._is_ended
        try:
            if not is_ended:
                await self._serve()
        except asyncio.CancelledError:
            pass
        if not self.started.done():
            self.started.set_exception(ClosedError("the embedded stack was stopped before it had started"))

    async def _serve(self) -> None:
        async with self._open() as servers:
            _running.add(self)
            # Behind the exit handlers of what was opened, so that this one runs before them.
            atexit.unregister(_at_exit)
            atexit.register(_at_exit)
            self.started.set_result(servers)
            await asyncio.Event().wait()

    def end(self) -> None:
        """Let the thread close everything; from any thread, idempotent."""
        with self._lock:
            if self._is_ended:
                return
            self._is_ended = True
            loop, serving = self._loop, self._serving
            if loop is not None and serving is not None and not loop.is_closed():
                loop.call_soon_threadsafe(serving.cancel)

    def join(self, seconds: float | None) -> None:
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)


_running: weakref.WeakSet[_Host[Any]] = weakref.WeakSet()


def _at_exit() -> None:
    hosts = list(_running)
    for host in hosts:
        host.end()
    for host in hosts:
        host.join(_EXIT_SECONDS)
