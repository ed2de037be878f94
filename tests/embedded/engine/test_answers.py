"""The engine's tokens: those of transformers, whatever is cached, and the same for a seed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import lmcache_stream as lms
from lmcache_stream.embedded import EmbeddedCacheServer, EmbeddedEngine
from lmcache_stream.embedded.engine import CausalModel

from ... import reference
from ...tiny_model import EOS
from ..conftest import CHUNK_SIZE

GREEDY = {"temperature": 0, "ignore_eos": True}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(256) for _ in range(length)]


async def run(
    completions: lms.VLLMCompletions, prompt: Sequence[int], params: Mapping[str, Any], salt: str = ""
) -> tuple[list[int], str, lms.FinishEvent]:
    ids: list[int] = []
    text = ""
    async with contextlib.aclosing(completions(prompt, params, salt)) as events:
        async for event in events:
            text += event.text
            if isinstance(event, lms.FinishEvent):
                return ids, text, event
            ids.append(event.token_id)
    raise AssertionError("no finish event")


def generated(model: CausalModel, prompt: list[int], count: int) -> list[int]:
    network = reference_of(model)
    with torch.no_grad():
        ids = torch.tensor([prompt])
        out = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer


def reference_of(model: CausalModel) -> Any:
    from transformers import AutoModelForCausalLM

    network: Any = AutoModelForCausalLM.from_pretrained(model.name, dtype=torch.float32)
    return network.eval()


async def until_cached(context: lms.AsyncLMCacheContext, prompt: list[int], salt: str = "") -> None:
    whole = len(prompt) // CHUNK_SIZE * CHUNK_SIZE
    for _ in range(1000):
        if await context.lookup(prompt, salt) == whole:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the prompt was not offloaded")


# Shorter than a chunk, one chunk, and longer than the engine computes at a time.
@pytest.mark.parametrize("length", [1, 5, CHUNK_SIZE, 100, 700, 1024, 1025])
async def test_greedy_tokens_are_those_of_transformers(
    completions: lms.VLLMCompletions, model: CausalModel, length: int
) -> None:
    prompt = prompt_of(length)
    wanted = await asyncio.to_thread(generated, model, prompt, 30)
    ids, _, finish = await run(completions, prompt, {**GREEDY, "max_tokens": 30})
    assert ids == wanted
    assert finish.reason == "length"
    assert (finish.prompt_tokens, finish.completion_tokens) == (length, 30)
    assert len(set(ids)) > 5


@pytest.mark.parametrize("length", [CHUNK_SIZE, 100, 704, 705])
async def test_a_cached_prefix_changes_nothing(
    completions: lms.VLLMCompletions, engine: EmbeddedEngine, cache: EmbeddedCacheServer, length: int
) -> None:
    prompt = prompt_of(length)
    first, _, cold = await run(completions, prompt, {**GREEDY, "max_tokens": 30})
    async with connected(cache, engine.core.model) as context:
        await until_cached(context, prompt)
    second, _, warm = await run(completions, prompt, {**GREEDY, "max_tokens": 30})
    assert second == first
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == min(length // CHUNK_SIZE * CHUNK_SIZE, length - 1)
    _, _, salted = await run(completions, prompt, {**GREEDY, "max_tokens": 1}, "other")
    assert salted.cached_tokens == 0


def connected(cache: EmbeddedCacheServer, model: CausalModel) -> lms.connect:
    return lms.connect(
        cache.url, cache.http_url, model.name, geometry=model.geometry, model_config=model.config
    )


async def test_what_is_offloaded_is_transformers_kv(
    completions: lms.VLLMCompletions, cache: EmbeddedCacheServer, model: CausalModel
) -> None:
    prompt = prompt_of(705)
    await run(completions, prompt, {**GREEDY, "max_tokens": 3})
    async with connected(cache, model) as context:
        await until_cached(context, prompt)
        kv = await context.retrieve(prompt)
    assert kv is not None
    own = reference.prefilled(reference_of(model), prompt)
    for layer, planes in enumerate(own):
        for plane, theirs in enumerate(planes):
            wanted = theirs.transpose(0, 1).flatten(1)[:704]
            torch.testing.assert_close(kv[plane, layer], wanted, rtol=1e-4, atol=1e-4)


async def test_a_dropped_prompt_decodes_as_the_reference_does(
    completions: lms.VLLMCompletions, cache: EmbeddedCacheServer, model: CausalModel
) -> None:
    prompt, network = prompt_of(700, seed=3), reference_of(model)
    kept = [*range(48), *range(400, 688)]
    async with connected(cache, model) as context:
        stream = lms.create_request(context, completions, prompt)
        await stream.generate({**GREEDY, "max_tokens": 1})
        kv = await stream.retrieve_kv()
        await stream.modify_kv(lms.keep(kept))
        metrics = await stream.generate({**GREEDY, "max_tokens": 40})
    edited = reference.dropped(network, kv, kept)
    first, *answer = stream.output_tokens()
    assert answer == reference.decoded(network, edited, [*prompt[688:], first], 40)
    assert metrics.cached_tokens == len(kept)


async def test_a_seed_gives_the_same_answer_again(completions: lms.VLLMCompletions) -> None:
    prompt = prompt_of(40)
    sampled = {"temperature": 1.5, "max_tokens": 30, "ignore_eos": True}
    answers = [(await run(completions, prompt, {**sampled, "seed": seed}))[0] for seed in (7, 8, 7, -1, -1)]
    assert answers[0] == answers[2]
    assert answers[3] == answers[4]
    assert len({tuple(one) for one in answers}) == 3
    free = [(await run(completions, prompt, sampled))[0] for _ in range(2)]
    assert free[0] != free[1]


async def test_sixty_four_at_once_all_finish_as_alone(
    completions: lms.VLLMCompletions, engine: EmbeddedEngine
) -> None:
    prompts = [prompt_of(20 + 3 * number, seed=number) for number in range(64)]
    alone = [(await run(completions, one, {**GREEDY, "max_tokens": 8}))[0] for one in prompts[:4]]
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(run(completions, one, {**GREEDY, "max_tokens": 8}, "at-once"))
            for one in prompts
        ]
    answers = [task.result()[0] for task in tasks]
    assert answers[:4] == alone
    assert {len(answer) for answer in answers} == {8}
    assert (engine.core.running, engine.core.waiting) == (0, 0)


async def test_no_more_than_the_limit_run_and_one_that_leaves_makes_room(model: CausalModel) -> None:
    async with (
        EmbeddedEngine(model, served_model_name="tiny", max_num_seqs=1) as engine,
        lms.VLLMCompletions(engine.url, "tiny") as completions,
    ):
        endless = completions([1, 2, 3], {**GREEDY, "max_tokens": 4000}, "")
        await anext(endless)
        waiting = asyncio.create_task(run(completions, [4, 5], {**GREEDY, "max_tokens": 3}))
        while not engine.core.waiting:
            await asyncio.sleep(0.01)
        assert engine.core.running == 1
        await endless.aclose()
        ids, _, _ = await waiting
        assert len(ids) == 3
        assert (engine.core.running, engine.core.waiting) == (0, 0)


async def test_one_that_waits_and_leaves_is_forgotten(model: CausalModel) -> None:
    async with (
        EmbeddedEngine(model, served_model_name="tiny", max_num_seqs=1) as engine,
        lms.VLLMCompletions(engine.url, "tiny", timeouts=lms.CompletionTimeouts(drain=0.05)) as completions,
    ):
        endless = completions([1, 2, 3], {**GREEDY, "max_tokens": 4000}, "")
        await anext(endless)
        waiting = asyncio.create_task(run(completions, [4, 5], {**GREEDY, "max_tokens": 3}))
        while not engine.core.waiting:
            await asyncio.sleep(0.01)
        waiting.cancel()
        await endless.aclose()
        while engine.core.running or engine.core.waiting:
            await asyncio.sleep(0.01)
        ids, _, _ = await run(completions, [4, 5], {**GREEDY, "max_tokens": 3})
        assert len(ids) == 3


async def test_short_requests_are_not_held_up_by_a_long_one(
    completions: lms.VLLMCompletions, engine: EmbeddedEngine
) -> None:
    async with contextlib.aclosing(
        completions(prompt_of(2000), {**GREEDY, "max_tokens": 2000}, "long")
    ) as endless:
        await anext(endless)
        ids, _, _ = await run(completions, [1, 2], {**GREEDY, "max_tokens": 20})
        assert len(ids) == 20
        assert engine.core.running == 1


@pytest.mark.timeout(300)
async def test_memory_stays_where_it_is_over_five_hundred_requests(
    completions: lms.VLLMCompletions,
) -> None:
    process = psutil.Process()

    async def some(first: int, count: int) -> int:
        for number in range(first, first + count):
            await run(completions, prompt_of(200, seed=number), {**GREEDY, "max_tokens": 2})
        return int(process.memory_info().rss)

    # Until the cache is full (each request leaves 12 chunks) and the allocators have their size.
    before = await some(0, 150)
    after = await some(150, 500)
    assert after - before < 30 << 20


async def test_a_cache_that_is_gone_costs_no_answer(
    completions: lms.VLLMCompletions, cache: EmbeddedCacheServer
) -> None:
    prompt = prompt_of(100)
    before, _, _ = await run(completions, prompt, {**GREEDY, "max_tokens": 5})
    await cache.aclose()
    started = time.monotonic()
    for _ in range(3):
        after, _, finish = await run(completions, prompt, {**GREEDY, "max_tokens": 5})
        assert after == before
        assert finish.cached_tokens == 0
    # Nobody waits for the server that is gone, which takes five seconds each time.
    assert time.monotonic() - started < 10


async def test_queries_are_offloaded_under_their_own_name(
    model: CausalModel, cache: EmbeddedCacheServer
) -> None:
    prompt = prompt_of(600)
    async with (
        EmbeddedEngine(
            model.name,
            served_model_name="tiny",
            cache_url=cache.url,
            cache_http_url=cache.http_url,
            offload_queries=True,
        ) as engine,
        lms.VLLMCompletions(engine.url, "tiny") as completions,
    ):
        ids, _, _ = await run(completions, prompt, {**GREEDY, "max_tokens": 20})
        assert ids == await asyncio.to_thread(generated, model, prompt, 20)
        geometry = lms.KVGeometry(
            num_layers=3, num_kv_heads=4, head_size=16, dtype=torch.float32, layout="queries", block_size=1
        )
        async with lms.connect(
            cache.url, cache.http_url, f"{model.name}##query", geometry=geometry
        ) as context:
            await until_cached(context, prompt)
            queries = await context.retrieve(prompt)
    assert queries is not None
    assert queries.shape == (1, 3, 592, 64)
    torch.testing.assert_close(queries[0, 0], layer_0_queries(model, prompt)[:592], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def layer_0_queries(model: CausalModel, prompt: list[int]) -> torch.Tensor:
    """Layer 0's queries from its weights, rotated here with complex numbers: ``[T, heads x head size]``."""
    network = reference_of(model)
    layer = network.model.layers[0]
    hidden = layer.input_layernorm(network.model.embed_tokens(torch.tensor(prompt)))
    flat = layer.self_attn.q_proj(hidden).double().view(len(prompt), 4, 2, 8)
    pairs = torch.complex(flat[:, :, 0], flat[:, :, 1])
    speed = 10000.0 ** -(torch.arange(8, dtype=torch.float64) / 8)
    angles = torch.arange(len(prompt), dtype=torch.float64)[:, None, None] * speed
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1).flatten(1).float()


ENDINGS: list[tuple[dict[str, Any], str, Any]] = [
    ({"max_tokens": 4}, "length", None),
    ({"stop_token_ids": [133], "max_tokens": 50}, "stop", 133),
    ({"logit_bias": {str(EOS): 100}, "max_tokens": 50}, "stop", None),
    ({"allowed_token_ids": [65], "stop": ["AAA"], "max_tokens": 50}, "stop", "AAA"),
]


@pytest.mark.parametrize(("params", "reason", "stop"), ENDINGS)
async def test_how_an_answer_ends(
    completions: lms.VLLMCompletions, params: dict[str, Any], reason: str, stop: Any
) -> None:
    ids, text, finish = await run(completions, list(range(10, 90)), {"temperature": 0, **params})
    assert finish.reason == reason
    if stop == 133:
        # The id is there, its text is not.
        assert ids[-1] == 133
        assert 133 not in ids[:-1]
    elif stop == "AAA":
        assert (ids, text) == ([65, 65, 65], "")
    elif reason == "stop":
        assert ids == [EOS]
        assert text == ""
    else:
        assert len(ids) == 4


async def test_a_stop_token_s_text_comes_behind_what_was_held_back(completions: lms.VLLMCompletions) -> None:
    # An X, because "!" would end the answer too soon, then "!"; the X may begin "XYZ".
    params = {
        "temperature": 0,
        "allowed_token_ids": [ord("X"), ord("!")],
        "logit_bias": {str(ord("!")): 50},
        "stop_token_ids": [ord("!")],
        "stop": ["XYZ"],
        "min_tokens": 1,
        "include_stop_str_in_output": True,
    }
    ids, text, finish = await run(completions, [1, 2, 3], params)
    assert (ids, text, finish.reason) == ([ord("X"), ord("!")], "X!", "stop")


async def test_a_stop_string_counts_once_the_least_tokens_are_there(completions: lms.VLLMCompletions) -> None:
    params = {"temperature": 0, "allowed_token_ids": [65], "stop": ["A"], "max_tokens": 9, "min_tokens": 4}
    ids, _, finish = await run(completions, [1, 2, 3], params)
    assert (len(ids), finish.reason) == (5, "stop")


async def test_min_tokens_hold_an_end_back(completions: lms.VLLMCompletions) -> None:
    biased = {"temperature": 0, "logit_bias": {str(EOS): 100}, "min_tokens": 3, "max_tokens": 9}
    ids, _, finish = await run(completions, [1, 2, 3], biased)
    assert len(ids) == 4
    assert ids[-1] == EOS
    assert finish.reason == "stop"


async def test_closing_waits_for_the_step_that_is_being_computed(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = CausalModel.load(str(tiny_folder))
    steps: list[str] = []
    forward = own.forward

    def slow(tokens: Sequence[int], cache: Any) -> torch.Tensor:
        steps.append("begun")
        time.sleep(0.3)
        steps.append("ended")
        return forward(tokens, cache)

    monkeypatch.setattr(own, "forward", slow)
    async with (
        EmbeddedEngine(own, served_model_name="tiny") as engine,
        lms.VLLMCompletions(engine.url, "tiny", timeouts=lms.CompletionTimeouts(drain=0.01)) as completions,
    ):
        left = asyncio.create_task(run(completions, [1, 2], GREEDY))
        while not steps:
            await asyncio.sleep(0.01)
        left.cancel()
    assert steps[:2] == ["begun", "ended"]
    assert steps.count("begun") == steps.count("ended")
