"""What goes wrong on the real servers, and the error that says so. None of it may hang."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

import lmcache_stream as lms

from .conftest import RealStack, long_prompt, tokenizer, until_idle, until_unlocked
from .stack import lmcache_server, vllm_server

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

main_stack = pytest.mark.parametrize("stack", ["bfloat16-shared-memory"], indirect=True)


@main_stack
async def test_an_id_beyond_the_vocabulary_is_an_engine_error(stack: RealStack) -> None:
    async with (
        lms.connect(stack.cache.url, stack.cache.http_url, stack.model_name) as context,
        lms.VLLMCompletions(stack.engine.url, stack.engine.model) as engine,
    ):
        stream = lms.create_request(context, engine, [1, 2, 49152 + 5])
        with pytest.raises(lms.EngineStreamError, match="out of vocabulary"):
            await stream.generate({"max_tokens": 1})
        assert stream.tokens == (1, 2, 49157)
        assert stream.output_tokens() == []


@main_stack
async def test_vllm_s_refusals_are_status_errors_with_its_message(stack: RealStack) -> None:
    async with lms.VLLMCompletions(stack.engine.url, stack.engine.model) as engine:
        with pytest.raises(lms.EngineStatusError, match="maximum context length") as caught:
            async for _ in engine(long_prompt(40000) * 2, {"max_tokens": 1}, ""):
                pass
        assert caught.value.status == 400
        with pytest.raises(lms.EngineStatusError) as caught:
            async for _ in engine([1, 2], {"max_tokens": 0}, ""):
                pass
        assert caught.value.status == 400
    async with lms.VLLMCompletions(stack.engine.url, "no-such-model") as engine:
        with pytest.raises(lms.EngineStatusError, match="no-such-model") as caught:
            async for _ in engine([1, 2], {"max_tokens": 1}, ""):
                pass
        assert caught.value.status == 404


@main_stack
async def test_an_unknown_model_is_a_geometry_error_that_names_the_registered(
    stack: RealStack,
) -> None:
    with pytest.raises(lms.GeometryError) as caught:
        await lms.connect(stack.cache.url, stack.cache.http_url, "smollm2")
    assert repr(stack.model_name) in str(caught.value)


@main_stack
async def test_http_port_and_request_port_taken_for_each_other_are_told_apart(
    stack: RealStack,
) -> None:
    quick = lms.Timeouts(connect=1)
    swapped_http = stack.cache.url.replace("tcp", "http")
    with pytest.raises(lms.CacheError, match="--http-port"):
        await lms.connect(stack.cache.url, swapped_http, stack.model_name, timeouts=quick)
    swapped_url = stack.cache.http_url.replace("http", "tcp")
    with pytest.raises(lms.CacheConnectError, match="--port"):
        await lms.connect(swapped_url, stack.cache.http_url, stack.model_name, timeouts=quick)


@main_stack
async def test_a_second_operation_meanwhile_is_refused(stack: RealStack) -> None:
    async with (
        lms.connect(stack.cache.url, stack.cache.http_url, stack.model_name) as context,
        lms.VLLMCompletions(stack.engine.url, stack.engine.model) as engine,
    ):
        stream = lms.create_request(context, engine, long_prompt(2000))
        first = asyncio.create_task(stream.generate({"max_tokens": 4, "temperature": 0}))
        await asyncio.sleep(0.01)
        with pytest.raises(lms.StreamBusyError):
            await stream.generate({"max_tokens": 4})
        with pytest.raises(lms.StreamBusyError):
            await stream.modify_kv(lms.keep(range(64)))
        assert (await first).output_tokens == 4


@main_stack
async def test_breaking_out_aborts_the_request_in_vllm(stack: RealStack) -> None:
    async with (
        lms.connect(stack.cache.url, stack.cache.http_url, stack.model_name) as context,
        lms.VLLMCompletions(stack.engine.url, stack.engine.model) as engine,
    ):
        stream = lms.create_request(context, engine, long_prompt(2000))
        params = {"max_tokens": 2000, "ignore_eos": True}
        async with stream.open_generation(params) as generation:
            async for _ in generation:
                if len(stream.output_tokens()) == 3:
                    assert await asyncio.to_thread(lambda: stack.engine.running) == 1
                    break
        await until_idle(stack.engine, seconds=5)
        assert len(stream.output_tokens()) == 3
        assert not stream.is_done()
        metrics = await stream.generate({"max_tokens": 2, "ignore_eos": True})
        assert metrics.output_tokens == 2
        assert len(stream.output_tokens()) == 5


# In float32, because there a prefill and a decode of the same tokens round alike far enough.
@pytest.mark.parametrize("stack", ["float32-shared-memory"], indirect=True)
async def test_decoding_in_two_passes_equals_one(stack: RealStack) -> None:
    async with (
        lms.connect(stack.cache.url, stack.cache.http_url, stack.model_name) as context,
        lms.VLLMCompletions(stack.engine.url, stack.engine.model) as engine,
    ):
        prompt = long_prompt(1000)
        whole = lms.create_request(context, engine, prompt)
        await whole.generate({"max_tokens": 24, "temperature": 0})
        halves = lms.create_request(context, engine, prompt, "halves")
        await halves.generate({"max_tokens": 12, "temperature": 0})
        await halves.generate({"max_tokens": 12, "temperature": 0})
        assert halves.output_tokens() == whole.output_tokens()
        assert whole.output_text() == tokenizer().decode(whole.output_tokens(), skip_special_tokens=True)


async def test_dead_servers_are_typed_errors(installed: Path, logs: Path) -> None:
    with lmcache_server(installed, logs) as cache, vllm_server(installed, logs, cache) as engine:
        model = str(engine.model_path)
        timeouts = lms.Timeouts(connect=2, lookup=2, retrieve=2, store=2)
        async with (
            lms.connect(cache.url, cache.http_url, model, timeouts=timeouts) as context,
            lms.VLLMCompletions(engine.url, engine.model) as completions,
        ):
            stream = lms.create_request(context, completions, long_prompt(2000))
            generation = stream.open_generation({"max_tokens": 2000, "ignore_eos": True})
            seen: list[int] = []
            with pytest.raises((lms.TruncatedStreamError, lms.EngineConnectError)) as broken:
                async with generation:
                    async for event in generation:
                        seen.append(event.token_id)
                        if len(seen) == 5:
                            engine.server.kill()
            assert len(seen) >= 5
            assert list(broken.value.token_ids[: len(seen)]) == seen
            assert stream.output_tokens() == seen
            with pytest.raises(lms.EngineConnectError, match="vllm serve"):
                await stream.generate({"max_tokens": 1})
            cache.server.kill()
            started = time.monotonic()
            with pytest.raises(lms.CacheConnectError):
                await context.lookup(list(stream.tokens))
            with pytest.raises(lms.CacheConnectError):
                await stream.modify_kv(lms.keep(range(64)))
            assert time.monotonic() - started < 8
        started = time.monotonic()
        with pytest.raises(lms.CacheConnectError, match="lmcache server"):
            await lms.connect(cache.url, cache.http_url, model, timeouts=timeouts)
        assert time.monotonic() - started < 4


@main_stack
async def test_closing_leaves_nothing_behind(stack: RealStack) -> None:
    tasks = asyncio.all_tasks()
    context = await lms.connect(stack.cache.url, stack.cache.http_url, stack.model_name)
    ours = str(context._peer.instance_id)
    assert ours in stack.cache.status["non_cuda_context_meta"]
    pool = context._peer.pool
    assert pool is not None
    segment = pool._path
    completions = lms.VLLMCompletions(stack.engine.url, stack.engine.model)
    stream = lms.create_request(context, completions, long_prompt(2000))
    await stream.generate({"max_tokens": 2})
    await stream.modify_kv(lms.keep(range(64)))
    await stream.generate({"max_tokens": 2})
    await completions.aclose()
    await context.aclose()
    assert ours not in stack.cache.status["non_cuda_context_meta"]
    assert segment.exists()
    await asyncio.sleep(0.05)
    assert asyncio.all_tasks() == tasks
    await until_unlocked(stack.cache)
