"""Edited KV that vanishes from the real server before or while it is used."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import lmcache_stream as lms

from .conftest import RealStack, long_prompt, until_unlocked
from .stack import lmcache_server, vllm_server

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

main_stack = pytest.mark.parametrize("stack", ["bfloat16-shared-memory"], indirect=True)

GREEDY = {"max_tokens": 12, "temperature": 0}


class Recording:
    """A PostCompletion that counts what it sends and can clear the cache just before or after."""

    def __init__(self, engine: lms.VLLMCompletions, stack: RealStack) -> None:
        self.sent = 0
        self.clear_after: float | None = None
        self._engine = engine
        self._stack = stack

    async def __call__(
        self, prompt: Sequence[int], params: Mapping[str, Any], salt: str, /
    ) -> AsyncIterator[lms.TokenEvent | lms.FinishEvent]:
        self.sent += 1
        clearing = asyncio.create_task(self._clear())
        try:
            if self.clear_after == 0:
                await clearing
            async for event in self._engine(prompt, params, salt):
                yield event
        finally:
            await clearing

    async def _clear(self) -> None:
        if self.clear_after is not None:
            await asyncio.sleep(self.clear_after)
            await asyncio.to_thread(self._stack.cache.clear, force=True)


async def edited_stream(
    stack: RealStack, context: lms.AsyncLMCacheContext, engine: Recording, characters: int = 2500
) -> lms.AsyncLMCacheStream:
    # Under a salt of its own, so that its KV comes from one prefill, whatever is cached already.
    salt = f"lost-{secrets.token_hex(4)}"
    stream = lms.create_request(context, engine, long_prompt(characters), salt)
    await stream.generate({"max_tokens": 1, "temperature": 0})
    await stream.modify_kv(lms.keep(range(0, len(stream.tokens) // 32 * 32, 2)))
    return stream


@main_stack
async def test_cleared_before_the_decode_nothing_is_sent(stack: RealStack) -> None:
    async with (
        lms.connect(stack.cache.url, stack.cache.http_url, stack.model_name) as context,
        lms.VLLMCompletions(stack.engine.url, stack.engine.model) as engine,
    ):
        recording = Recording(engine, stack)
        stream = await edited_stream(stack, context, recording)
        await asyncio.to_thread(stack.cache.clear)
        before = stream.tokens, stream.output_tokens(), recording.sent
        for _ in range(2):
            with pytest.raises(lms.CacheLostError, match="nothing was sent"):
                await stream.generate(GREEDY)
        assert (stream.tokens, stream.output_tokens(), recording.sent) == before
        with pytest.raises(lms.CacheLostError):
            await stream.retrieve_kv()
        await until_unlocked(stack.cache)


@main_stack
async def test_an_edit_stored_again_goes_on(stack: RealStack) -> None:
    async with (
        lms.connect(stack.cache.url, stack.cache.http_url, stack.model_name) as context,
        lms.VLLMCompletions(stack.engine.url, stack.engine.model) as engine,
    ):
        stream = await edited_stream(stack, context, Recording(engine, stack))
        kv = await stream.retrieve_kv()
        tokens = stream.tokens[: kv.shape[2]]
        await asyncio.to_thread(stack.cache.clear)
        with pytest.raises(lms.CacheLostError):
            await stream.generate(GREEDY)
        await stream.update_kv(kv, tokens)
        metrics = await stream.generate(GREEDY)
        assert metrics.cached_tokens is not None
        assert metrics.cached_tokens >= len(tokens)


@main_stack
async def test_cleared_by_force_just_before_the_engine_looks_is_an_error_at_the_end(
    stack: RealStack,
) -> None:
    async with (
        lms.connect(stack.cache.url, stack.cache.http_url, stack.model_name) as context,
        lms.VLLMCompletions(stack.engine.url, stack.engine.model) as engine,
    ):
        recording = Recording(engine, stack)
        stream = await edited_stream(stack, context, recording)
        recording.clear_after = 0.0
        with pytest.raises(lms.CacheLostError, match="this answer is not the edit's"):
            await stream.generate(GREEDY)
        assert not stream.is_done()
        await until_unlocked(stack.cache)


async def test_cleared_by_force_while_the_engine_loads_never_gives_another_answer(
    installed: Path, logs: Path
) -> None:
    # Servers of its own: losing KV in the middle of a load can be the end of vLLM, which then starts anew.
    delays = [0.004 * number**1.5 for number in range(8)]
    right: list[int] | None = None
    lost = 0
    with lmcache_server(installed, logs) as cache:
        while delays:
            with vllm_server(installed, logs, cache) as vllm:
                stack = RealStack(cache, vllm, torch.bfloat16)
                async with (
                    lms.connect(cache.url, cache.http_url, stack.model_name) as context,
                    lms.VLLMCompletions(vllm.url, vllm.model) as engine,
                ):
                    while delays and vllm.is_alive:
                        recording = Recording(engine, stack)
                        try:
                            stream = await edited_stream(stack, context, recording, 6000)
                        except lms.EngineError:
                            break  # It was dying when it was asked whether it lives.
                        before = len(stream.output_tokens())
                        recording.clear_after = delays.pop(0) if right else None
                        try:
                            await stream.generate(GREEDY)
                        except lms.CacheLostError:
                            lost += 1
                        else:
                            answer = stream.output_tokens()[before:]
                            right = right or answer
                            assert answer == right
    assert right is not None
    assert lost >= 1
