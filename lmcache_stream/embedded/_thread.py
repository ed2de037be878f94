"""Servers on an event loop of their own, in a thread, so that whoever uses them may block."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

T = TypeVar("T")

__all__ = ["ServerThread"]


class ServerThread(Generic[T]):
    """Holds an asynchronous context open in a daemon thread, from ``start`` to ``stop``.

    An interpreter that exits without ``stop`` closes it first.
    """

    def __init__(self, name: str, open_servers: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self._host = _Host(open_servers)
        self._thread = threading.Thread(target=self._host.run, name=name, daemon=True)
        # At exit, too: what the servers hold (shared memory) outlives the process otherwise.
        self._stop = weakref.finalize(self, _stop, self._host, self._thread)

    def start(self) -> Future[T]:
        """Begin, and return what will be the context's value, or its error."""
        self._thread.start()
        return self._host.started

    def stop(self) -> None:
        """Close the context and wait for the thread; idempotent, blocks."""
        self._stop()


class _Host(Generic[T]):
    def __init__(self, open_servers: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self.started: Future[T] = Future()
        self._open = open_servers
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()

    def run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            if self.started.done():
                raise
            self.started.set_exception(error)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with self._open() as servers:
            self.started.set_result(servers)
            await self._stopping.wait()

    def end(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stopping.set)


def _stop(host: _Host[T], thread: threading.Thread) -> None:
    if thread.ident is None:
        return
    # What is being opened cannot be interrupted (a model that is loaded), only followed.
    host.started.exception()
    host.end()
    thread.join()
