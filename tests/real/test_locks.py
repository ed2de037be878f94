"""The real server's own count of locks after everything that can happen to an edit or a store."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
import torch

import lmcache_stream as lms

from ..cancelling import cancelled_at
from .conftest import RealStack, long_prompt, until_unlocked

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.parametrize("stack", ["bfloat16-shared-memory", "float32-pickle"], indirect=True),
]


@contextlib.asynccontextmanager
async def prefilled(
    stack: RealStack, characters: int = 2500
) -> AsyncIterator[tuple[lms.AsyncLMCacheContext, lms.AsyncLMCacheStream]]:
    async with (
        lms.connect(stack.cache.url, stack.cache.http_url, stack.model_name) as context,
        lms.VLLMCompletions(stack.engine.url, stack.engine.model) as engine,
    ):
        stream = lms.create_request(context, engine, long_prompt(characters))
        await stream.generate({"max_tokens": 1, "temperature": 0})
        yield context, stream
        await until_unlocked(stack.cache)


async def test_after_success_nothing_is_locked(stack: RealStack) -> None:
    async with prefilled(stack) as (_, stream):
        await stream.modify_kv(lms.keep(range(100)))
        await stream.generate({"max_tokens": 4})


async def test_after_a_miss_nothing_is_locked(stack: RealStack) -> None:
    async with prefilled(stack) as (context, stream):
        tokens = list(stream.tokens)
        assert await context.retrieve(tokens, "another-salt") is None
        assert await context.lookup([1, *tokens]) == 0
        # A partial hit locks what it finds.
        assert await context.lookup([*tokens[:64], 1, *tokens[64:]]) == 64


async def test_after_a_function_that_raises_nothing_is_locked(stack: RealStack) -> None:
    def fail(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
        raise RuntimeError("no")

    async with prefilled(stack) as (_, stream):
        before = stream.tokens, stream.cache_salt
        with pytest.raises(RuntimeError, match="no"):
            await stream.modify_kv(fail)
        assert (stream.tokens, stream.cache_salt) == before


async def test_after_a_deadline_nothing_is_locked(stack: RealStack) -> None:
    async with prefilled(stack) as (context, stream):
        found = await stream.retrieve_kv()
        # More than the engine ever offloaded: what is there is locked at every look.
        longer = lms.create_request(context, stream._post_completion, [*stream.tokens, *range(200)])
        with pytest.raises(lms.KVNotReadyError) as caught:
            await longer.modify_kv(lms.keep(range(40)), timeout=0.5)
        assert caught.value.found == found.shape[2]
        assert caught.value.wanted == len(longer.tokens) // 32 * 32


async def test_a_cancel_at_every_await_of_an_edit_leaves_nothing_locked(stack: RealStack) -> None:
    async with prefilled(stack) as (_, stream):
        prompt, number, salts = stream.tokens, 0, {stream.cache_salt}
        while True:
            number += 1
            before = stream.tokens, stream.cache_salt, len(stream.edits)
            if not await cancelled_at(stream.modify_kv(lms.keep(range(64))), number):
                break
            await until_unlocked(stack.cache)
            if len(stream.edits) == before[2]:
                assert (stream.tokens, stream.cache_salt) == before[:2]
            salts.add(stream.cache_salt)
        assert number > 5
        assert len(stream.edits) >= 1
        assert stream.tokens[:64] == prompt[:64]
        await stream.generate({"max_tokens": 2})


async def test_a_cancel_at_every_await_of_a_store_publishes_all_or_nothing(stack: RealStack) -> None:
    async with prefilled(stack) as (context, stream):
        kv = (await stream.retrieve_kv())[:, :, :128].contiguous()
        tokens = list(stream.tokens[:128])
        number, seen = 0, set()
        while True:
            number += 1
            salt = f"store-{number}"
            if not await cancelled_at(context.store(kv, tokens, salt), number):
                break
            await until_unlocked(stack.cache)
            found = await context.retrieve(tokens, salt)
            seen.add(0 if found is None else found.shape[2])
            assert found is None or torch.equal(found, kv)
        assert number > 3
        assert seen
        assert seen <= {0, 128}


async def test_two_tasks_that_store_the_same_tokens_both_find_their_bytes(stack: RealStack) -> None:
    async with prefilled(stack) as (context, stream):
        kv = (await stream.retrieve_kv())[:, :, :256].contiguous()
        tokens = list(stream.tokens[:256])
        for attempt in range(10):
            salt = f"twice-{attempt}"
            results = await asyncio.gather(
                context.store(kv, tokens, salt), context.store(kv.clone(), tokens, salt)
            )
            assert all(results), results
            found = await context.retrieve(tokens, salt)
            assert found is not None
            assert torch.equal(found, kv)


async def test_two_clients_that_store_the_same_tokens_publish_no_unfilled_slot(
    stack: RealStack,
) -> None:
    async with prefilled(stack) as (context, stream):
        kv = (await stream.retrieve_kv())[:, :, :256].contiguous()
        tokens = list(stream.tokens[:256])
        another = lms.connect(
            stack.cache.url, stack.cache.http_url, stack.model_name, geometry=context.geometry
        )
        async with another as other:
            for attempt in range(10):
                salt = f"clients-{attempt}"
                await asyncio.gather(context.store(kv, tokens, salt), other.store(kv, tokens, salt))
                await until_unlocked(stack.cache)
                found = await context.retrieve(tokens, salt)
                assert found is not None
                assert torch.equal(found, kv)


async def test_two_streams_with_equal_prompts_are_isolated(stack: RealStack) -> None:
    greedy = {"max_tokens": 12, "temperature": 0}
    async with prefilled(stack) as (context, edited):
        prompt = list(edited.tokens[:-1])
        plain = lms.create_request(context, edited._post_completion, prompt)
        await plain.generate(greedy)
        await edited.modify_kv(lms.keep(range(0, 256, 2)))
        await edited.generate(greedy)
        again = lms.create_request(context, edited._post_completion, prompt)
        await again.generate(greedy)
        assert again.output_tokens() == plain.output_tokens()
        # The same tokens kept a second time are stored a second time, under a salt of their own.
        twice = lms.create_request(context, edited._post_completion, prompt)
        await twice.modify_kv(lms.keep(range(0, 256, 2)))
        assert twice.tokens == edited.tokens[: len(twice.tokens)]
        assert twice.cache_salt != edited.cache_salt
