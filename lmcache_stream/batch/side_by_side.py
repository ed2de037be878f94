"""The worker loop of batches and jobs: any number of items, some at a time, and an outage that ends all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

from ..errors import EngineError
from .outcome import StreamOutcome

__all__ = ["as_they_come", "party_of", "side_by_side"]

T = TypeVar("T")


class _OutageError(Exception):
    """Ends the task group: the engine or the cache is down."""

    def __init__(self, outcome: StreamOutcome) -> None:
        super().__init__()
        self.outcome = outcome


async def as_they_come(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield ``items``, each when it is asked for."""
    for item in items:
        yield item


async def side_by_side(
    items: AsyncIterator[T], work: Callable[[T], Awaitable[StreamOutcome]], *, limit: int
) -> StreamOutcome | None:
    """Work on every item, at most ``limit`` at once; each is asked for when there is room for it.

    An outcome that is an outage ends all, and is returned; None where there was none. So does an error of
    ``items`` or ``work``, which is raised as it is.
    """
    turn = asyncio.Lock()

    async def worker() -> None:
        while True:
            # One at a time, because an async generator cannot be asked twice at once.
            async with turn:
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
            outcome = await work(item)
            if outcome.is_outage:
                raise _OutageError(outcome)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(limit):
                group.create_task(worker())
    except BaseExceptionGroup as failed:
        # The others came of the end that the first one made.
        first = failed.exceptions[0]
        if isinstance(first, _OutageError):
            return first.outcome
        raise first from None
    return None


def party_of(outage: BaseException | None) -> str:
    """Return who is down: ``engine`` or ``cache``."""
    return "engine" if isinstance(outage, EngineError) else "cache"
