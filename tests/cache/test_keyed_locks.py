"""Locks by key: one holder a key, others unharmed, nothing left behind."""

from __future__ import annotations

import asyncio

import pytest

from lmcache_stream.cache.keyed_locks import KeyedLocks


async def test_one_key_is_held_once_and_others_do_not_wait() -> None:
    locks = KeyedLocks()
    release = await locks.acquire("a")
    await locks.acquire("b")
    waiting = asyncio.create_task(locks.acquire("a"))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    release()
    again = await waiting
    # A second call must not take the lock from its new holder.
    release()
    third = asyncio.create_task(locks.acquire("a"))
    await asyncio.sleep(0.01)
    assert not third.done()
    again()
    (await third)()


async def test_a_cancelled_waiter_leaves_the_lock_to_the_next() -> None:
    locks = KeyedLocks()
    release = await locks.acquire("a")
    leaving, staying = (asyncio.create_task(locks.acquire("a")) for _ in range(2))
    await asyncio.sleep(0.01)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    release()
    (await staying)()


async def test_no_lock_outlives_its_users() -> None:
    locks = KeyedLocks()
    releases = [await locks.acquire(key) for key in range(5)]
    assert len(locks._locks) == 5
    waiting = asyncio.create_task(locks.acquire(0))
    await asyncio.sleep(0)
    waiting.cancel()
    for release in releases:
        release()
        release()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (locks._locks, locks._users) == ({}, {})
