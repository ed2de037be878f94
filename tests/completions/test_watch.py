"""When a watch goes off, and when it must not."""

from __future__ import annotations

import asyncio

import pytest

from lmcache_stream.completions.watch import Watch


class Bell:
    def __init__(self) -> None:
        self.rung = asyncio.Event()

    def __call__(self) -> None:
        assert not self.rung.is_set()
        self.rung.set()


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_a_wait_that_is_too_long() -> None:
    watch = Watch(bell := Bell())
    watch.restart(0.05)
    watch.since = now()
    await asyncio.wait_for(bell.rung.wait(), 5)
    assert watch.expired
    assert now() - watch.since >= 0.045


async def test_it_counts_from_the_beginning_of_the_wait() -> None:
    watch = Watch(bell := Bell())
    watch.restart(0.3)
    await asyncio.sleep(0.2)
    watch.since = began = now()
    await asyncio.wait_for(bell.rung.wait(), 5)
    assert now() - began >= 0.29


@pytest.mark.parametrize("limit", [None, 0.03])
async def test_time_in_which_nobody_waits_does_not_count(limit: float | None) -> None:
    watch = Watch(bell := Bell())
    watch.restart(limit)
    await asyncio.sleep(0.12)
    assert not bell.rung.is_set()
    watch.since = now()
    if limit is not None:
        await asyncio.wait_for(bell.rung.wait(), 5)
    watch.stop()


async def test_short_waits_do_not_add_up() -> None:
    watch = Watch(bell := Bell())
    watch.restart(0.2)
    for _ in range(10):
        watch.since = now()
        await asyncio.sleep(0.03)
        watch.since = None
    assert not bell.rung.is_set()
    watch.stop()


async def test_a_stopped_watch_is_silent_and_a_new_limit_replaces_the_old() -> None:
    watch = Watch(bell := Bell())
    watch.restart(0.03)
    watch.since = now()
    watch.restart(30)
    watch.since = now()
    await asyncio.sleep(0.08)
    watch.stop()
    assert not watch.expired
    assert not bell.rung.is_set()
