"""Cancels while vLLM loads external KV, which a plain close of the connection turns into its end."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

import lmcache_stream as lms

from .conftest import RealStack, long_prompt, until_idle, until_unlocked

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(900),
    pytest.mark.parametrize("stack", ["bfloat16-shared-memory"], indirect=True),
]

PASS = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("at_once", [1, 6])
async def test_random_cancels_of_passes_with_a_cached_prefix_leave_vllm_alive(
    stack: RealStack, at_once: int
) -> None:
    chance = random.Random(at_once)
    prompt = (long_prompt(16000) * 2)[:3000]
    cancels = 0
    async with lms.VLLMCompletions(stack.engine.url, stack.engine.model) as engine:

        async def run(extra: int) -> int:
            events = engine([*prompt, extra], PASS, "")
            async with contextlib.aclosing(events):
                return len([event async for event in events])

        async def run_and_cancel(extra: int) -> None:
            nonlocal cancels
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(chance.uniform(0.0, 0.15)):
                    await run(extra)
                return
            cancels += 1

        assert await run(5) == 9
        for round_ in range(150 // at_once):
            async with asyncio.TaskGroup() as group:
                for number in range(at_once):
                    group.create_task(run_and_cancel(10 + number + at_once * round_))
        assert await run(5) == 9
    assert cancels > 100
    assert stack.engine.is_alive
    await until_idle(stack.engine)
    await until_unlocked(stack.cache)
