"""The stream over both stacks: the same code, the same outcomes."""

from __future__ import annotations

import asyncio

import pytest
import torch

import lmcache_stream as lms

from .engines import CHUNK_SIZE, GREEDY, Recording, StackPlace, engines, fresh_prompt, fresh_salt

pytestmark = [engines(), pytest.mark.timeout(300)]

KEPT = [*range(64), *range(256, 352)]


async def edited_stream(
    context: lms.AsyncLMCacheContext, engine: Recording | lms.VLLMCompletions
) -> lms.AsyncLMCacheStream:
    stream = lms.create_request(context, engine, fresh_prompt(360), fresh_salt())
    await stream.generate({**GREEDY, "max_tokens": 1})
    await stream.modify_kv(lms.keep(KEPT))
    return stream


async def test_the_main_job(stack: StackPlace) -> None:
    async with stack.opened() as (context, engine):
        stream = lms.create_request(context, engine, fresh_prompt(360), fresh_salt())
        metrics = await stream.generate({**GREEDY, "max_tokens": 1})
        assert (metrics.input_tokens, metrics.output_tokens, metrics.finish_reason) == (360, 1, "length")
        kv = await stream.retrieve_kv()
        assert kv.shape == context.geometry.kv_shape(352)
        await stream.modify_kv(lms.keep(KEPT))
        metrics = await stream.generate({**GREEDY, "max_tokens": 6})
        # The kept tokens, then the rest of the prompt and the token that the prefill decoded.
        assert metrics.input_tokens == len(KEPT) + 8 + 1
        assert metrics.cached_tokens == len(KEPT)
        assert len(stream.output_tokens()) == 7
        assert not stream.is_done()
        metrics = await stream.generate({**GREEDY, "max_tokens": 3})
        assert metrics.cached_tokens is not None
        assert metrics.cached_tokens >= len(KEPT)
    await stack.until_unlocked()


async def test_what_is_stored_is_what_is_retrieved(stack: StackPlace) -> None:
    async with stack.opened() as (context, engine):
        stream = lms.create_request(context, engine, fresh_prompt(100), fresh_salt())
        await stream.generate({**GREEDY, "max_tokens": 1})
        kv = await stream.retrieve_kv()
        changed = torch.randn_like(kv[:, :, :64])
        salt = fresh_salt()
        assert await context.store(changed, stream.tokens[:64], salt)
        # Not through `retrieve`, which refuses keys that no model can have computed.
        assert await context.lookup(stream.tokens, salt) == 64
        lease = await context.pin(stream.tokens, salt)
        found = await context._transfers.read(lease)
        assert found is not None
        assert torch.equal(found, changed)


async def test_kv_that_was_cleared_is_not_decoded_from(stack: StackPlace) -> None:
    async with stack.opened() as (context, engine):
        recording = Recording(engine)
        stream = await edited_stream(context, recording)
        await stack.clear()
        with pytest.raises(lms.CacheLostError, match="nothing was sent"):
            await stream.generate({**GREEDY, "max_tokens": 4})
        assert recording.sent == 1
    await stack.until_unlocked()


async def test_kv_that_went_before_the_engine_looked_is_an_error_at_the_end(stack: StackPlace) -> None:
    async with stack.opened() as (context, engine):
        recording = Recording(engine)
        stream = await edited_stream(context, recording)
        recording.before = lambda: stack.clear(force=True)
        with pytest.raises(lms.CacheLostError, match="this answer is not the edit's"):
            await stream.generate({**GREEDY, "max_tokens": 4})
        assert recording.sent == 2
    await stack.until_unlocked()


async def test_a_prompt_whose_beginning_is_cached_is_not_edited(stack: StackPlace) -> None:
    begin, salt = fresh_prompt(2 * CHUNK_SIZE), fresh_salt()
    async with stack.opened() as (context, engine):
        first = lms.create_request(context, engine, begin, salt)
        await first.generate({**GREEDY, "max_tokens": 1})
        await first.retrieve_kv()
        stream = lms.create_request(context, engine, [*begin, *fresh_prompt(40)], salt)
        with pytest.raises(lms.KVNotReadyError) as caught:
            await stream.modify_kv(lms.keep(range(32)), timeout=0.3)
        assert (caught.value.found, caught.value.wanted) == (2 * CHUNK_SIZE, 3 * CHUNK_SIZE)
        assert stream.edits == ()
        assert (await stream.retrieve_kv(timeout=0.3)).shape[2] == 2 * CHUNK_SIZE
        with pytest.raises(lms.InvalidRequestError):
            await lms.create_request(context, engine, fresh_prompt(20)).retrieve_kv()


async def test_salts_keep_prompts_apart(stack: StackPlace) -> None:
    prompt = fresh_prompt(100)
    async with stack.opened() as (context, engine):
        for salt in (fresh_salt(), fresh_salt()):
            stream = lms.create_request(context, engine, prompt, salt)
            metrics = await stream.generate({**GREEDY, "max_tokens": 1})
            assert not metrics.cached_tokens
            await stream.retrieve_kv()
        again = await lms.create_request(context, engine, prompt, salt).generate({**GREEDY, "max_tokens": 1})
        assert again.cached_tokens == 96


async def test_of_a_prompt_that_is_cached_whole_one_token_is_computed(stack: StackPlace) -> None:
    prompt, salt = fresh_prompt(3 * CHUNK_SIZE), fresh_salt()
    async with stack.opened() as (context, engine):
        for cached in (0, 3 * CHUNK_SIZE - 1):
            stream = lms.create_request(context, engine, prompt, salt)
            metrics = await stream.generate({**GREEDY, "max_tokens": 1})
            assert (metrics.cached_tokens or 0) == cached
            await stream.retrieve_kv()


async def test_decoded_tokens_are_cached_when_a_later_pass_computes_them(stack: StackPlace) -> None:
    async with stack.opened() as (context, engine):
        stream = lms.create_request(context, engine, fresh_prompt(40), fresh_salt())
        await stream.generate({**GREEDY, "max_tokens": 60})
        assert (await stream.retrieve_kv()).shape[2] == 32
        await asyncio.sleep(0.3)
        assert await context.lookup(stream.tokens, stream.cache_salt) == 32
        await stream.generate({**GREEDY, "max_tokens": 1})
        assert (await stream.retrieve_kv()).shape[2] == 96


async def test_a_pass_that_is_left_ends_in_the_engine(stack: StackPlace) -> None:
    async with stack.opened() as (context, engine):
        stream = lms.create_request(context, engine, fresh_prompt(40), fresh_salt())
        async with stream.open_generation({**GREEDY, "max_tokens": 2000}) as generation:
            async for _ in generation:
                if len(stream.output_tokens()) == 3:
                    assert await stack.running() == 1
                    break
        await stack.until_idle()
        assert len(stream.output_tokens()) == 3


async def test_an_id_beyond_the_vocabulary_changes_nothing(stack: StackPlace) -> None:
    async with stack.opened() as (context, engine):
        stream = lms.create_request(context, engine, [1, 2, stack.vocab_size])
        with pytest.raises(lms.EngineStreamError, match="out of vocabulary"):
            await stream.generate({"max_tokens": 1})
        assert stream.tokens == (1, 2, stack.vocab_size)
        assert stream.output_tokens() == []
