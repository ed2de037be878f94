"""The main job on real servers, against a transformers reference of the same edited cache."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

import pytest
import torch

import lmcache_stream as lms
from lmcache_stream import sync

from .. import reference
from .conftest import STACKS, RealStack, long_prompt, until_unlocked
from .reference import model

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

Run = tuple[torch.Tensor, list[int]]

GREEDY = {"max_tokens": 40, "temperature": 0}
# One of a bfloat16 logit of 16 to 32.
_STEP = 0.125


def kept_of(length: int) -> list[int]:
    """The first quarter and the last third: what is dropped is the middle."""
    return [*range(length // 4), *range(2 * length // 3, length)]


def fresh_salt() -> str:
    """A salt of this run's own, so that its KV comes from one prefill, whatever ran before."""
    return f"reference-{secrets.token_hex(4)}"


async def run_async(stack: RealStack, prompt: list[int]) -> Run:
    async with (
        lms.connect(stack.cache.url, stack.cache.http_url, stack.model_name) as context,
        lms.VLLMCompletions(stack.engine.url, stack.engine.model) as engine,
    ):
        stream = lms.create_request(context, engine, prompt, fresh_salt())
        await stream.generate({"max_tokens": 1, "temperature": 0})
        kv = await stream.retrieve_kv()
        await stream.modify_kv(lms.keep(kept_of(kv.shape[2])))
        async with stream.open_generation(GREEDY) as generation:
            ids = [event.token_id async for event in generation]
        assert stream.output_tokens()[1:] == ids
        check(stream, generation.metrics)
        return kv, stream.output_tokens()


def run_sync(stack: RealStack, prompt: list[int]) -> Run:
    with (
        sync.connect(stack.cache.url, stack.cache.http_url, stack.model_name) as context,
        sync.VLLMCompletions(stack.engine.url, stack.engine.model) as engine,
    ):
        stream = sync.create_request(context, engine, prompt, fresh_salt())
        stream.generate({"max_tokens": 1, "temperature": 0})
        kv = stream.retrieve_kv()
        stream.modify_kv(sync.keep(kept_of(kv.shape[2])))
        with stream.open_generation(GREEDY) as generation:
            ids = [event.token_id for event in generation]
        assert stream.output_tokens()[1:] == ids
        check(stream, generation.metrics)
        return kv, stream.output_tokens()


def check(stream: lms.AsyncLMCacheStream | lms.LMCacheStream, metrics: lms.StreamPerfMetrics) -> None:
    report = stream.edits[-1]
    stored = report.tokens_after - report.recomputed_tokens
    assert metrics.cached_tokens is not None
    assert metrics.cached_tokens >= stored
    assert metrics.input_tokens == len(stream.tokens) - metrics.output_tokens


def with_asyncio(stack: RealStack, prompt: list[int]) -> Run:
    return asyncio.run(run_async(stack, prompt))


@pytest.mark.parametrize("stack", STACKS, indirect=True)
@pytest.mark.parametrize("run", [with_asyncio, run_sync], ids=["async", "sync"])
def test_the_decoded_tokens_are_those_of_the_reference(
    stack: RealStack, run: Callable[[RealStack, list[int]], Run]
) -> None:
    prompt = long_prompt()
    kv, ids = run(stack, prompt)
    assert kv.dtype == stack.dtype
    whole = kv.shape[2]
    kept = kept_of(whole)
    chunked = len(kept) // 32 * 32
    edited = reference.dropped(model(stack.dtype), kv, kept)[:, :, :chunked]
    # The token that the prefill decoded belongs to the sequence.
    first, *answer = ids
    rest = [*(prompt[index] for index in kept[chunked:]), *prompt[whole:], first]
    if stack.dtype == torch.float32 or torch.cpu._is_amx_tile_supported():
        wanted = reference.decoded(model(stack.dtype), edited, rest, 40)
        same = sum(one == other for one, other in zip(answer, wanted, strict=True))
        assert same == 40, f"{same} of 40 tokens are equal"
    else:
        # Other kernels of vLLM and transformers choose differently between logits that one rounding parts.
        below = reference.shortfalls(model(stack.dtype), edited, rest, answer)
        assert below.max() <= _STEP, below
        assert (below > 0).sum() <= 2, below
    # Keys that were left at their old positions would be told by it.
    unmoved = kv[:, :, kept][:, :, :chunked]
    assert reference.shortfalls(model(stack.dtype), unmoved, rest, answer).max() > 16 * _STEP
    asyncio.run(until_unlocked(stack.cache))


@pytest.mark.parametrize("stack", STACKS, indirect=True)
def test_the_retrieved_kv_is_that_of_transformers(stack: RealStack) -> None:
    prompt = long_prompt(3000)
    kv, _ = with_asyncio(stack, prompt)
    own = reference.prefilled(model(stack.dtype), prompt)
    # Rounding to bfloat16 adds up from layer to layer; another layout would be off by 1.
    limits = (1e-4, 1e-3) if stack.dtype == torch.float32 else (0.006, 0.05)
    for layer, limit in zip((0, kv.shape[1] - 1), limits, strict=True):
        for plane, theirs in enumerate(own[layer]):
            wanted = theirs.transpose(0, 1).reshape(len(prompt), -1)[: kv.shape[2]].float()
            found = kv[plane, layer].float()
            error = ((found - wanted).norm() / wanted.norm()).item()
            assert error < limit, f"layer {layer}, plane {plane}: relative error {error:.4f}"
