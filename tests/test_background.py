"""A home for work: what happens to it, and to those who wait, when a caller leaves or the home closes."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

import anyio
import pytest

from lmcache_stream._background import Background, to_the_end
from lmcache_stream.errors import ClosedError


class Work:
    """Takes ``seconds``, or until ``go`` is set, and keeps an account of how far it came."""

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds = seconds
        self.state = "not begun"
        self.go = asyncio.Event()
        self.ended = asyncio.Event()

    async def __call__(self) -> str:
        self.state = "begun"
        try:
            await (self.go.wait() if self.seconds is None else asyncio.sleep(self.seconds))
            self.state = "done"
        except asyncio.CancelledError:
            self.state = "cancelled"
            raise
        finally:
            self.ended.set()
        return "result"


@pytest.fixture
async def complaints() -> AsyncIterator[list[str]]:
    """What reached the loop's exception handler: nothing may."""
    found: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context["message"]))
    yield found
    assert found == []


@pytest.fixture
async def home(complaints: list[str]) -> AsyncIterator[Background]:
    opened = Background("the home")
    await opened.start()
    yield opened
    await opened.aclose()
    assert tasks_at_home() == []


def tasks_at_home() -> list[str]:
    return [name for task in asyncio.all_tasks() if (name := task.get_name()).startswith("the home")]


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def by_native_cancel(call: Callable[[], Awaitable[Any]], after: float) -> None:
    task = asyncio.ensure_future(call())
    await asyncio.sleep(after)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_asyncio_timeout(call: Callable[[], Awaitable[Any]], after: float) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(after):
            await call()


async def by_wait_for(call: Callable[[], Awaitable[Any]], after: float) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(call(), after)


async def by_task_group(call: Callable[[], Awaitable[Any]], after: float) -> None:
    async def fail() -> None:
        await asyncio.sleep(after)
        raise ZeroDivisionError

    async def run() -> None:
        await call()

    with pytest.raises(ExceptionGroup) as caught:
        async with asyncio.TaskGroup() as group:
            group.create_task(run())
            group.create_task(fail())
    assert caught.group_contains(ZeroDivisionError)


async def by_anyio_scope(call: Callable[[], Awaitable[Any]], after: float) -> None:
    with anyio.move_on_after(after) as scope:
        await call()
    assert scope.cancelled_caught


async def by_anyio_deadline(call: Callable[[], Awaitable[Any]], after: float) -> None:
    with pytest.raises(TimeoutError), anyio.fail_after(after):
        await call()


WAYS_TO_LEAVE = [
    by_native_cancel,
    by_asyncio_timeout,
    by_wait_for,
    by_task_group,
    by_anyio_scope,
    by_anyio_deadline,
]
Leave = Callable[[Callable[[], Awaitable[Any]], float], Coroutine[Any, Any, None]]


async def test_the_result_is_the_works(home: Background) -> None:
    assert await home.finish(Work(0.01)()) == "result"
    assert await home.spawn(Work(0.01)()) == "result"


@pytest.mark.parametrize("leave", WAYS_TO_LEAVE)
async def test_a_cancelled_caller_sees_the_end_within_the_grace_time(home: Background, leave: Leave) -> None:
    work = Work(0.15)
    await leave(lambda: home.finish(work(), grace=5), 0.03)
    assert work.state == "done"


@pytest.mark.parametrize("leave", WAYS_TO_LEAVE)
async def test_after_the_grace_time_the_work_goes_on_alone(home: Background, leave: Leave) -> None:
    work = Work()
    began = time.monotonic()
    await leave(lambda: home.finish(work(), grace=0.05), 0.02)
    assert time.monotonic() - began > 0.06
    assert work.state == "begun"
    work.go.set()
    await work.ended.wait()
    assert work.state == "done"


@pytest.mark.parametrize("number", range(1, 8))
async def test_a_cancel_at_any_turn_leaves_the_work_whole(home: Background, number: int) -> None:
    work = Work(0.02)
    task = asyncio.ensure_future(home.finish(work()))
    await turns(number)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.state == "done"


async def test_a_second_cancel_ends_the_grace_time_but_not_the_work(home: Background) -> None:
    work = Work()
    task = asyncio.ensure_future(home.finish(work(), grace=600))
    for _ in range(2):
        await asyncio.sleep(0.03)
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.state == "begun"
    work.go.set()
    await work.ended.wait()
    assert work.state == "done"


@pytest.mark.parametrize("deadline", [0.0, 0.05])
async def test_a_deadline_is_a_timeout_at_once_and_the_work_goes_on(
    home: Background, deadline: float
) -> None:
    work = Work()
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await home.finish(work(), deadline=deadline, grace=600)
    assert time.monotonic() - began > deadline - 0.01
    work.go.set()
    await work.ended.wait()
    assert work.state == "done"


async def test_a_deadline_that_is_met_does_not_show(home: Background) -> None:
    assert await home.finish(Work(0.01)(), deadline=5) == "result"


class Odd(BaseException):
    """No Exception, like KeyboardInterrupt, but harmless to a test run."""


@pytest.mark.parametrize("error", [ValueError("mine"), TimeoutError("mine"), Odd("mine")], ids=repr)
async def test_an_error_reaches_its_waiter_and_nobody_else(home: Background, error: BaseException) -> None:
    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise error

    other = Work(0.05)
    beside = asyncio.ensure_future(home.finish(other()))
    with pytest.raises(type(error)) as caught:
        await home.finish(fail())
    assert caught.value is error
    assert await beside == "result"
    assert await home.finish(Work(0)()) == "result"


@pytest.mark.parametrize("leave", WAYS_TO_LEAVE)
async def test_an_error_that_nobody_waits_for_is_silent(
    home: Background, complaints: list[str], leave: Leave
) -> None:
    ended = asyncio.Event()

    async def fail() -> None:
        await asyncio.sleep(0.1)
        ended.set()
        raise ValueError("too late")

    home.spawn(fail())
    await leave(lambda: home.finish(fail(), grace=0), 0.02)
    await ended.wait()
    await turns(5)
    # What nobody looked at complains when it is collected; it is young.
    gc.collect(1)
    assert complaints == []
    assert await home.finish(Work(0)()) == "result"


async def test_dropping_the_outcome_does_not_stop_the_work(home: Background) -> None:
    work, other = Work(0.05), Work(0.05)
    home.spawn(work())
    home.spawn(other()).cancel()
    gc.collect(1)
    await asyncio.gather(work.ended.wait(), other.ended.wait())
    assert (work.state, other.state) == ("done", "done")


@pytest.mark.parametrize("when", ["before it is opened", "after it is closed"])
async def test_a_home_that_is_not_open_refuses_work(when: str) -> None:
    home = Background("the home")
    if when == "after it is closed":
        await home.start()
        await home.aclose()
    work = Work(0)
    with pytest.raises(ClosedError, match="the home is closed"):
        home.spawn(work())
    with pytest.raises(ClosedError, match="the home is closed"):
        await home.finish(work())
    # A coroutine that was dropped without being closed would warn here.
    gc.collect(1)
    assert work.state == "not begun"


async def test_settling_waits_and_stops_nothing(home: Background) -> None:
    short, long = Work(0.05), Work()
    home.spawn(short())
    home.spawn(long())
    assert await home.settle(0.3) == 1
    assert (short.state, long.state) == ("done", "begun")
    long.go.set()
    assert await home.settle(600) == 0
    assert long.state == "done"
    assert await home.finish(Work(0)()) == "result"


async def test_closing_without_grace_cancels_and_counts(home: Background) -> None:
    works = [Work() for _ in range(3)]
    for work in works:
        home.spawn(work())
    await turns(2)
    assert await home.aclose() == 3
    assert [work.state for work in works] == ["cancelled"] * 3


async def test_closing_counts_work_that_had_not_taken_its_first_step(home: Background) -> None:
    work = Work()
    outcome = home.spawn(work())
    assert await home.aclose() == 1
    assert work.state == "not begun"
    with pytest.raises(ClosedError):
        await outcome


async def test_closing_waits_for_what_ends_within_the_grace_time(home: Background) -> None:
    short, long = Work(0.05), Work()
    home.spawn(short())
    home.spawn(long())
    began = time.monotonic()
    assert await home.aclose(grace=0.3) == 1
    assert time.monotonic() - began > 0.29
    assert (short.state, long.state) == ("done", "cancelled")


async def test_closing_does_not_wait_longer_than_it_must(home: Background) -> None:
    home.spawn(Work(0.05)())
    began = time.monotonic()
    assert await home.aclose(grace=600) == 0
    assert time.monotonic() - began < 60
    assert await home.aclose(grace=600) == 0


async def test_closing_waits_for_work_that_the_work_began(home: Background) -> None:
    second = Work(0.05)

    async def first() -> None:
        await asyncio.sleep(0.05)
        home.spawn(second())

    home.spawn(first())
    assert await home.aclose(grace=5) == 0
    assert second.state == "done"


async def test_work_that_is_cancelled_by_the_closing_begins_no_more(home: Background) -> None:
    second = Work()
    refused: list[ClosedError] = []

    async def first() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            try:
                home.spawn(second())
            except ClosedError as error:
                refused.append(error)

    home.spawn(first())
    await turns(2)
    with anyio.fail_after(10):
        assert await home.aclose() == 1
    assert len(refused) == 1
    assert second.state == "not begun"


async def test_who_waits_when_the_home_closes_is_told_so_and_not_cancelled(home: Background) -> None:
    waiting = asyncio.ensure_future(home.finish(Work()(), grace=60))
    await turns(3)
    assert await home.aclose() == 1
    with pytest.raises(ClosedError, match="the home was closed"):
        await waiting


async def test_any_task_may_close_what_another_opened() -> None:
    home = Background("the home")
    async with asyncio.TaskGroup() as group:
        await group.create_task(home.start())
    work = Work()
    home.spawn(work())
    await turns(2)
    async with asyncio.TaskGroup() as group:
        closing = group.create_task(home.aclose())
        group.create_task(home.aclose())
    assert closing.result() == 1
    assert work.state == "cancelled"


async def test_a_home_that_was_never_opened_closes() -> None:
    assert await Background("the home").aclose(grace=5) == 0


@pytest.mark.parametrize("number", range(6))
async def test_a_cancel_at_any_turn_of_opening_leaves_what_can_be_closed(number: int) -> None:
    home = Background("the home")
    task = asyncio.ensure_future(home.start())
    await turns(number)
    task.cancel()
    await asyncio.wait({task})
    assert await home.aclose() == 0
    assert tasks_at_home() == []


async def test_a_cancelled_close_can_be_taken_up_again(home: Background) -> None:
    work = Work()
    home.spawn(work())
    await turns(2)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(home.aclose(grace=30), 0.05)
    assert await home.aclose() <= 1
    assert work.state == "cancelled"


@pytest.mark.parametrize("leave", WAYS_TO_LEAVE)
async def test_what_must_be_brought_to_its_end_holds_a_cancel_back(leave: Leave) -> None:
    work = Work(0.15)

    async def call() -> None:
        await to_the_end(work())
        # anyio's cancellations are levels, not edges: this is where one goes on.
        await asyncio.sleep(0)

    await leave(call, 0.03)
    assert work.state == "done"


async def test_many_cancels_do_not_interrupt_what_must_be_brought_to_its_end() -> None:
    work = Work(0.1)
    task = asyncio.ensure_future(to_the_end(work()))
    await turns(1)
    while not work.ended.is_set():
        task.cancel()
        await asyncio.sleep(0.005)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.state == "done"


async def test_the_result_or_the_error_of_the_end_comes_through() -> None:
    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("mine")

    assert await to_the_end(Work(0.01)()) == "result"
    with pytest.raises(ValueError, match="mine"):
        await to_the_end(fail())
