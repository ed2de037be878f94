"""A home for work that may outlive the call that began it.

anyio's shields do not hold against ``Task.cancel()`` of asyncio itself, which is what
``asyncio.wait_for``, ``asyncio.timeout`` and a web server's disconnect use. What must be brought to
its end therefore runs as a task of its own, in one task group a resource, and the caller waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio

from .errors import ClosedError

T = TypeVar("T")
logger = logging.getLogger(__name__)


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work``, which closes something, and let no cancellation cut it short.

    A cancellation that comes meanwhile goes on when the work is through.
    """
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        task = asyncio.ensure_future(work)
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled():
        # Marks it as seen: the cancellation goes first.
        task.exception()
    raise cancelled


class Background:
    """A task group that is open from ``start`` to ``aclose``, whichever tasks call these.

    An exception of one task reaches whoever waits for it and nobody else.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._group: asyncio.TaskGroup | None = None
        self._host: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Open the group in a task of its own."""
        opened = asyncio.Event()
        self._host = asyncio.create_task(self._run(opened), name=f"{self._name}: home")
        await opened.wait()

    async def _run(self, opened: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            opened.set()
            await self._closing.wait()
            self._group = None

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Begin ``work`` and return what it will give; dropping the result does not stop it.

        Raises:
            ClosedError: the home is not open.
        """
        group = self._group
        if group is None or self._closing.is_set():
            work.close()
            raise ClosedError(f"{self._name} is closed")
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        task = group.create_task(
            self._guard(work, outcome), name=f"{self._name}: {getattr(work, '__name__', 'work')}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before its first step never reaches its own clean-up.
        task.add_done_callback(lambda _: self._abandon(work, outcome))
        return outcome

    async def _guard(self, work: Coroutine[Any, Any, T], outcome: asyncio.Future[T]) -> None:
        try:
            result = await work
        except asyncio.CancelledError:
            # `_abandon` tells who waits.
            raise
        except BaseException as error:
            if outcome.cancelled():
                logger.debug("%s: an error that nobody waits for", self._name, exc_info=True)
            else:
                outcome.set_exception(error)
                # Marks it as seen: where nobody waits any more, that is no news.
                outcome.exception()
        else:
            if not outcome.cancelled():
                outcome.set_result(result)

    def _abandon(self, work: Coroutine[Any, Any, T], outcome: asyncio.Future[T]) -> None:
        work.close()
        # Not a cancellation: who waits was not cancelled, and a task group would swallow it.
        if not outcome.done():
            outcome.set_exception(ClosedError(f"{self._name} was closed before this came to its end"))
            outcome.exception()

    async def finish(
        self, work: Coroutine[Any, Any, T], *, deadline: float | None = None, grace: float = 2.0
    ) -> T:
        """Run ``work`` to its end, whatever becomes of the caller, and return its result.

        A cancelled caller waits for the end, at most ``grace`` seconds, so that in the usual case
        everything is given back when the cancellation goes on; after that the work goes on alone.
        So it does after ``deadline`` seconds, which raise TimeoutError.
        """
        outcome = self.spawn(work)
        try:
            with anyio.fail_after(deadline):
                return await asyncio.shield(outcome)
        except asyncio.CancelledError:
            if not outcome.done():
                with anyio.CancelScope(shield=True):
                    await asyncio.wait({outcome}, timeout=grace)
            raise

    async def settle(self, grace: float) -> int:
        """Wait ``grace`` seconds for what runs and return how many of it still do."""
        end = anyio.current_time() + grace
        # What runs may begin more.
        while self._tasks and (time_left := end - anyio.current_time()) > 0:
            await asyncio.wait(self._tasks, timeout=time_left)
        return len(self._tasks)

    async def aclose(self, *, grace: float = 0.0) -> int:
        """Wait ``grace`` seconds for what runs, cancel the rest and return how many that were."""
        if self._host is None:
            return 0
        with anyio.CancelScope(shield=True):
            await self.settle(grace)
            left = list(self._tasks)
            for task in left:
                task.cancel()
            self._closing.set()
            await asyncio.wait({self._host})
        return len(left)
