"""What every test stands on: nothing may be left over, and the loop may not be held."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

# A machine that is busy with servers may pause anything for longer than hypothesis takes for slow.
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

# Threads that wait for each other at every operation crawl on a machine that is busy with servers.
torch.set_num_threads(1)

# Far above what a busy machine's scheduler does, far below what a forgotten wait would take.
_LONGEST_HOLD = 1.5


@pytest.fixture(autouse=True)
def nothing_is_left_over(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, a socket or a mapped segment behind."""
    before = _possessions()
    yield
    deadline = time.monotonic() + 3
    left = _possessions() - before
    while left and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.02)
        left = _possessions() - before
    assert not left, f"left over: {sorted(left)}"


def _possessions() -> set[str]:
    found = {
        f"thread {thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        # pytest-timeout's and asyncio's own helpers live as long as the run.
        if "lmcache" in thread.name or "AnyIO" in thread.name
    }
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target.startswith("socket:"):
            found.add(target)
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/dev/shm/lmc" in line:
            found.add(line.rsplit(" ", 1)[1])
    return found


@pytest.fixture(autouse=True)
async def the_loop_is_not_held(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Fail an asynchronous test during which the loop could not run for too long."""
    exempt = request.node.get_closest_marker("real") or request.node.get_closest_marker("blocking")
    if exempt or not asyncio.iscoroutinefunction(request.function):
        yield
        return
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            longest = max(longest, time.monotonic() - before)

    task = asyncio.create_task(watch())
    yield
    task.cancel()
    assert longest < _LONGEST_HOLD, f"the event loop was held for {longest:.2f} s"
