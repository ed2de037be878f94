"""Edits beside requests of the same prompt, with vLLM's own prefix cache off and on."""

from __future__ import annotations

import asyncio
import secrets

import pytest

import lmcache_stream as lms
from lmcache_stream.dropping import KeyDiff

from .. import reference
from .conftest import PREFIX_CACHING, RealStack, long_prompt, until_unlocked
from .reference import model

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.parametrize(
        "stack",
        ["float32-shared-memory", f"float32-shared-memory{PREFIX_CACHING}"],
        indirect=True,
    ),
]

PREFILL = {"max_tokens": 1, "temperature": 0}
GREEDY = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}


async def test_of_two_equal_prompts_the_unedited_one_answers_as_before(stack: RealStack) -> None:
    prompt, salt = long_prompt(3000), f"neighbour-{secrets.token_hex(4)}"
    async with (
        lms.connect(stack.cache.url, stack.cache.http_url, stack.model_name) as context,
        lms.VLLMCompletions(stack.engine.url, stack.engine.model) as engine,
    ):

        def stream() -> lms.AsyncLMCacheStream:
            return lms.create_request(context, engine, prompt, salt)

        alone, edited, beside, after = stream(), stream(), stream(), stream()
        await alone.generate(GREEDY)
        await edited.generate(PREFILL)
        await beside.generate(PREFILL)
        await edited.modify_kv(KeyDiff(ratio=0.5))
        async with asyncio.TaskGroup() as both:
            both.create_task(edited.generate(GREEDY))
            both.create_task(beside.generate({**GREEDY, "max_tokens": 39}))
        await after.generate(GREEDY)
    assert beside.output_tokens() == alone.output_tokens()
    assert after.output_tokens() == alone.output_tokens()
    assert edited.output_tokens()[1:] != alone.output_tokens()
    await until_unlocked(stack.cache)


async def test_the_same_tokens_kept_twice_are_stored_twice(stack: RealStack) -> None:
    """Equal tokens under a second edit are other KV: of two streams, and of one that edits again."""
    prompt, network = long_prompt(3000), model(stack.dtype)
    async with (
        lms.connect(stack.cache.url, stack.cache.http_url, stack.model_name) as context,
        lms.VLLMCompletions(stack.engine.url, stack.engine.model) as engine,
    ):
        streams = [lms.create_request(context, engine, prompt, f"twice-{secrets.token_hex(4)}") for _ in "ab"]
        first, second = streams
        for stream in streams:
            await stream.generate(PREFILL)
        kv = await first.retrieve_kv()
        length = kv.shape[2]
        kept = [*range(length // 64 * 32), *range(length - 32, length)]
        await first.modify_kv(lms.keep(kept))
        # The same tokens, but their KV scaled: not what the first one stored.
        await second.modify_kv(lambda kv, tokens: (kv[:, :, kept] * 0.5, [tokens[i] for i in kept]))
        assert first.tokens == second.tokens
        # And once more, so that the whole edit is stored under a third salt.
        await first.modify_kv(lms.keep(range(len(kept))))
        found = [await context.retrieve(stream.tokens, stream.cache_salt) for stream in streams]
        assert len({report.cache_salt for stream in streams for report in stream.edits}) == 3
        for stream in streams:
            await stream.generate(GREEDY)
    edited = reference.dropped(network, kv, kept)
    for stream, wanted, stored in zip(streams, (edited, kv[:, :, kept] * 0.5), found, strict=True):
        assert stored is not None
        error = float((stored - wanted).norm() / wanted.norm())
        assert error < 1e-5
        start, *answer = stream.output_tokens()
        assert answer == reference.decoded(network, wanted, [*prompt[length:], start], 40)
    assert first.output_tokens() != second.output_tokens()
    await until_unlocked(stack.cache)
