from __future__ import annotations

from lmcache_stream.embedded.cache.locks import TimedLock


def test_a_lock_is_held_until_every_holder_is_gone() -> None:
    lock = TimedLock(10)
    assert not lock.is_held(0)
    lock.acquire(0, 2)
    lock.release()
    assert lock.is_held(0)
    lock.release()
    assert not lock.is_held(0)
    lock.release()
    lock.acquire(0)
    assert lock.is_held(0)


def test_a_holder_that_comes_gives_time_to_all() -> None:
    lock = TimedLock(10)
    lock.acquire(0)
    lock.acquire(7)
    assert lock.is_held(16.9)
    assert not lock.is_held(17)


def test_holders_whose_time_is_over_do_not_count_any_more() -> None:
    lock = TimedLock(10)
    lock.acquire(0, 3)
    lock.acquire(10)
    lock.release()
    assert not lock.is_held(10)


def test_no_more_than_128_come_or_go_at_once() -> None:
    lock = TimedLock(10)
    lock.acquire(0, 1000)
    assert lock.count == 128
    lock.acquire(0)
    lock.release(1000)
    assert lock.count == 1
