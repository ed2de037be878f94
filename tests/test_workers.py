"""Worker threads: what waits for them, and what does not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import pytest

from lmcache_stream._workers import Workers


async def test_settling_waits_for_all_that_runs_and_waits() -> None:
    workers = Workers("lmcache-stream test", 2)
    done: list[int] = []

    def work(number: int) -> None:
        time.sleep(0.05)
        done.append(number)

    await workers.settle()
    for number in range(5):
        workers.submit(lambda number=number: work(number))  # type: ignore[misc]
    busy = [workers.is_busy]
    workers.close()
    await asyncio.gather(workers.settle(), workers.settle())
    assert sorted(done) == list(range(5))
    assert [*busy, workers.is_busy] == [True, False]
    await workers.settle()


async def test_a_cancelled_caller_leaves_at_once_and_the_thread_goes_on() -> None:
    workers = Workers("lmcache-stream test", 1)
    begun, go = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go.wait(20)

    running = asyncio.create_task(workers.run(work))
    while not begun.is_set():
        await asyncio.sleep(0.005)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert workers.is_busy
    go.set()
    await workers.settle()
    workers.close()


async def test_each_is_run_side_by_side_and_the_results_keep_their_order() -> None:
    workers = Workers("lmcache-stream test", 3)
    together = threading.Barrier(3)

    def work(number: int) -> int:
        together.wait(20)
        time.sleep(0.01 * (3 - number))
        return 10 * number

    assert await workers.run_each(work, range(3)) == [0, 10, 20]
    assert await workers.run_each(work, []) == []
    workers.close()


async def test_the_first_error_of_each_comes_when_all_have_ended() -> None:
    workers = Workers("lmcache-stream test", 4)
    ended: list[int] = []

    def work(number: int) -> None:
        time.sleep(0.02 * (4 - number))
        ended.append(number)
        if number in (1, 3):
            raise ValueError(number)

    with pytest.raises(ValueError, match=r"^1$"):
        await workers.run_each(work, range(4))
    assert sorted(ended) == [0, 1, 2, 3]
    workers.close()


async def test_what_a_cancelled_caller_had_not_begun_is_never_done() -> None:
    workers = Workers("lmcache-stream test", 1)
    begun, go = threading.Event(), threading.Event()
    done: list[int] = []

    def work(number: int) -> None:
        begun.set()
        assert go.wait(20)
        done.append(number)

    running = asyncio.create_task(workers.run_each(work, range(3)))
    while not begun.is_set():
        await asyncio.sleep(0.005)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    go.set()
    await workers.settle()
    assert done == [0]
    workers.close()


# Longer than a job that must be waited for, and one that must not hold the interpreter up.
@pytest.mark.parametrize(("seconds", "ends"), [(0.4, True), (60, False)])
def test_an_exiting_interpreter_waits_for_a_running_job_but_not_for_long(seconds: float, ends: bool) -> None:
    script = (
        "import time\n"
        "from lmcache_stream._workers import Workers\n"
        "def work():\n"
        "    print('begun', flush=True)\n"
        f"    time.sleep({seconds})\n"
        "    print('ended', flush=True)\n"
        "Workers('test', 1).submit(work)\n"
        "time.sleep(0.05)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == (["begun", "ended"] if ends else ["begun"])


async def test_a_thread_that_cannot_start_answers_with_the_reason() -> None:
    def refuse() -> None:
        raise OSError("no such library")

    workers = Workers("broken", 1, on_start=refuse)
    try:
        async with asyncio.timeout(5):
            for _ in range(2):
                with pytest.raises(OSError, match="no such library"):
                    await workers.run(len, "abc")
            await workers.settle()
    finally:
        workers.close()
