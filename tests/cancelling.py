"""Cancelling a coroutine at one chosen suspension, so that a test can walk through all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class CancelAt:
    """Awaits ``work`` and cancels the awaiting task when it suspends for the ``number``-th time.

    Attributes:
        reached: whether it suspended that often.
    """

    def __init__(self, work: Coroutine[Any, Any, T], number: int) -> None:
        self._work = work
        self._number = number
        self.reached = False

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = self._work.__await__()
        thrown: BaseException | None = None
        count = 0
        while True:
            try:
                waited_for = inner.throw(thrown) if thrown else inner.send(None)
            except StopIteration as end:
                return end.value
            count += 1
            if count == self._number:
                self.reached = True
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            thrown = None
            try:
                yield waited_for
            except BaseException as error:
                thrown = error


async def cancelled_at(work: Coroutine[Any, Any, Any], number: int) -> bool:
    """Run ``work`` in a task that is cancelled at its ``number``-th suspension.

    Returns False when it came through before that; then the walk is over.
    """
    cancelling = CancelAt(work, number)

    async def run() -> None:
        await cancelling

    task = asyncio.ensure_future(run())
    try:
        await task
    except asyncio.CancelledError:
        assert cancelling.reached
        return True
    # Reached, and yet it ended well: it was past the last point at which a cancel can arrive.
    return cancelling.reached
