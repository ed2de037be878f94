"""The worker loop that batches and jobs share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import lmcache_stream as lms
from lmcache_stream.batch.side_by_side import as_they_come, party_of, side_by_side


def outcome(**fields: Any) -> lms.StreamOutcome:
    usual: dict[str, Any] = {"stream_id": "s", "token_ids": (), "text": "", "error": None, "phases": ()}
    return lms.StreamOutcome(**{**usual, "queue_time": 0.0, "seconds": 0.0, **fields})


async def test_items_are_asked_for_when_there_is_room_for_them() -> None:
    asked = done = most = 0

    async def items() -> AsyncIterator[int]:
        nonlocal asked
        # Without an end.
        while True:
            asked += 1
            yield asked

    async def work(item: int) -> lms.StreamOutcome:
        nonlocal done, most
        most = max(most, asked - done)
        await asyncio.sleep(0)
        done += 1
        return outcome(is_outage=item == 50, stream_id=str(item))

    outage = await side_by_side(items(), work, limit=4)
    assert outage is not None
    assert outage.stream_id == "50"
    # Those at work, and the one that is asked for by a worker that has just come free.
    assert most <= 5
    assert asked < 60


async def test_all_is_worked_on_and_none_twice() -> None:
    seen: list[int] = []

    async def work(item: int) -> lms.StreamOutcome:
        await asyncio.sleep(0.001 * (item % 3))
        seen.append(item)
        return outcome()

    assert await side_by_side(as_they_come(range(100)), work, limit=7) is None
    assert sorted(seen) == list(range(100))


@pytest.mark.parametrize("where", ["items", "work"])
async def test_an_error_is_raised_as_it_is_and_ends_the_others(where: str) -> None:
    cancelled: list[int] = []

    async def items() -> AsyncIterator[int]:
        for item in range(5):
            yield item
        if where == "items":
            raise OSError("it broke")
        await asyncio.sleep(30)

    async def work(item: int) -> lms.StreamOutcome:
        if where == "work" and item == 4:
            raise OSError("it broke")
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.append(item)
            raise
        return outcome()

    with pytest.raises(OSError, match="it broke") as caught:
        await asyncio.wait_for(side_by_side(items(), work, limit=6), 5)
    # Its traceback does not begin with that of a group.
    assert caught.value.__suppress_context__
    assert len(cancelled) == (5 if where == "items" else 4)


def test_who_is_down_is_told_by_the_error() -> None:
    assert party_of(lms.EngineConnectError("x")) == "engine"
    assert party_of(lms.EngineTimeoutError("x")) == "engine"
    assert party_of(lms.CacheConnectError("x")) == "cache"
