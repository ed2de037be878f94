"""The byte limiter: within its limit, in turn, and through every cancellation."""

from __future__ import annotations

import asyncio
import random

import pytest

from lmcache_stream.batch.limits import ByteLimiter, descriptor_limit, memory_limit


class Holder:
    """Holds bytes until it is let go; notes in ``order`` when it got them."""

    def __init__(self, limiter: ByteLimiter, count: int, name: str, order: list[str]) -> None:
        self.release = asyncio.Event()
        self.task = asyncio.ensure_future(self._hold(limiter, count, name, order))

    async def _hold(self, limiter: ByteLimiter, count: int, name: str, order: list[str]) -> None:
        async with limiter.reserve(count):
            order.append(name)
            await self.release.wait()

    async def end(self) -> None:
        self.release.set()
        await self.task


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_holders_together_stay_within_the_limit_in_the_order_of_their_coming() -> None:
    limiter, order = ByteLimiter(10), list[str]()
    small, large, late = (
        Holder(limiter, count, name, order) for count, name in ((6, "small"), (8, "large"), (2, "late"))
    )
    await settle()
    # The late one would fit beside the small one, but then large ones might wait for ever.
    assert order == ["small"]
    await small.end()
    await settle()
    assert order == ["small", "large", "late"]
    await large.end()
    await late.end()


async def test_one_that_is_larger_than_the_limit_runs_alone() -> None:
    limiter, order = ByteLimiter(10), list[str]()
    first = Holder(limiter, 1, "first", order)
    await settle()
    huge, last = Holder(limiter, 1000, "huge", order), Holder(limiter, 1, "last", order)
    await settle()
    assert order == ["first"]
    await first.end()
    await settle()
    assert order == ["first", "huge"]
    await huge.end()
    await settle()
    assert order == ["first", "huge", "last"]
    await last.end()


async def test_one_that_is_cancelled_lets_the_next_one_in() -> None:
    limiter, order = ByteLimiter(10), list[str]()
    first, second, third = (Holder(limiter, count, str(count), order) for count in (5, 8, 4))
    await settle()
    assert order == ["5"]
    second.task.cancel()
    await settle()
    assert order == ["5", "4"]
    await first.end()
    await third.end()
    # Its turn and its cancellation in the same moment.
    first, second = Holder(limiter, 10, "a", order), Holder(limiter, 10, "b", order)
    await settle()
    first.release.set()
    await asyncio.sleep(0)
    second.task.cancel()
    await settle()
    last = Holder(limiter, 10, "c", order)
    await settle()
    assert order[-1] == "c"
    await last.end()


@pytest.mark.parametrize("seed", range(5))
async def test_any_sequence_of_holders_and_cancellations_gives_everything_back(seed: int) -> None:
    chance, limiter = random.Random(seed), ByteLimiter(10)
    held = most = 0

    async def hold(count: int, seconds: float) -> None:
        nonlocal held, most
        async with limiter.reserve(count):
            held += count
            most = max(most, held)
            try:
                await asyncio.sleep(seconds)
            finally:
                held -= count

    tasks = [
        asyncio.ensure_future(hold(chance.randint(0, 10), chance.choice([0, 0, 0.001]))) for _ in range(60)
    ]
    for _ in range(40):
        await asyncio.sleep(0)
        chance.choice(tasks).cancel()
    await asyncio.wait(tasks)
    assert 0 < most <= 10
    async with asyncio.timeout(1), limiter.reserve(10):
        assert held == 0


def test_the_limits_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert descriptor_limit() >= 1
    assert 2**26 < memory_limit() < 2**45
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert memory_limit() == 1_024_000
