"""The state model of a stream, over a scripted engine and a scripted cache server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

import lmcache_stream as lms

from .cache.conftest import FAST, GEOMETRY
from .cancelling import cancelled_at
from .fakes.engine import ScriptedEngine, kv_of
from .fakes.lmcache import FakeLMCache

PROMPT = list(range(100, 118))  # 4 whole chunks of 4, and 2 tokens more
SHAPE = GEOMETRY.kv_shape(1)
ROPE = lms.RopeConfig(head_size=8, inv_freq=(1.0, 0.1, 0.01, 0.001), pairing="half")


@pytest.fixture
async def server() -> AsyncIterator[FakeLMCache]:
    async with FakeLMCache() as fake:
        yield fake
        assert fake.violations == []
        assert fake.locked == (0, 0)


@pytest.fixture
async def context(server: FakeLMCache) -> AsyncIterator[lms.AsyncLMCacheContext]:
    async with lms.connect(
        server.url, server.http_url, "model", geometry=GEOMETRY, rope=ROPE, timeouts=FAST
    ) as opened:
        yield opened


@pytest.fixture
def engine(server: FakeLMCache) -> ScriptedEngine:
    return ScriptedEngine(server, SHAPE)


@pytest.fixture
def stream(context: lms.AsyncLMCacheContext, engine: ScriptedEngine) -> lms.AsyncLMCacheStream:
    return lms.create_request(context, engine, PROMPT, "base")


def first_half(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    half = len(tokens) // 2
    return kv[:, :, :half], tokens[:half]


def state_of(stream: lms.AsyncLMCacheStream) -> tuple[object, ...]:
    return (
        stream.tokens,
        stream.suffix_tokens(),
        stream.output_tokens(),
        stream.output_text(),
        stream.is_done(),
        stream.cache_salt,
        stream.edits,
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_an_engine_at_the_cache_s_own_port_is_refused(
    context: lms.AsyncLMCacheContext, server: FakeLMCache, host: str
) -> None:
    """LMCache can die of what would be posted there."""
    port = server.url.rpartition(":")[2]
    engine = lms.VLLMCompletions(f"http://{host}:{port}/v1", "model")
    with pytest.raises(lms.InvalidRequestError, match=f"{host}:{port}.* is at LMCache's own ZeroMQ port"):
        lms.create_request(context, engine, PROMPT)
    other = lms.VLLMCompletions(f"http://{host}:1", "model")
    assert lms.create_request(context, other, PROMPT).tokens == tuple(PROMPT)


async def test_a_pass_appends_its_ids_to_the_sequence_and_to_the_output(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine
) -> None:
    engine.scripts = [[7, 8, "length"], [9, "stop"]]
    metrics = await stream.generate({"max_tokens": 2})
    assert (metrics.input_tokens, metrics.output_tokens, metrics.finish_reason) == (18, 2, "length")
    assert not stream.is_done()
    await stream.generate({"max_tokens": 5}, suffix_tokens=[50, 51])
    assert engine.requests[1][0] == [*PROMPT, 7, 8, 50, 51]
    assert stream.tokens == (*PROMPT, 7, 8, 50, 51, 9)
    assert stream.output_tokens() == [7, 8, 9]
    assert stream.output_text() == "<7><8><9>"
    assert stream.decoded_tokens() == 3
    assert stream.is_done()


@pytest.mark.parametrize(
    ("script", "params", "done"),
    [
        ([1, 2, "length"], {"max_tokens": 2}, False),
        ([1, "stop"], {"max_tokens": 2}, True),
        ([1, 2, "stop"], {"max_tokens": 2}, True),
        ([1, "tool_calls"], {}, True),
        ([1], {"max_tokens": 2}, True),
        ([1, 2], {"max_tokens": 2}, False),
        ([1] * 16, {}, False),
        ([1] * 15, {}, True),
        ([1] * 15, {"max_tokens": None}, True),
        (["stop"], {"max_tokens": 2}, True),
    ],
)
async def test_done_is_what_the_finish_reason_says(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine, script: Any, params: Any, done: bool
) -> None:
    engine.scripts = [script]
    await stream.generate(params)
    assert stream.is_done() is done


@pytest.mark.parametrize("reason", ["abort", "error"])
async def test_an_aborted_pass_is_an_error_that_keeps_its_ids(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine, reason: str
) -> None:
    engine.scripts = [[7, 8, reason]]
    with pytest.raises(lms.EngineStreamError, match=reason) as caught:
        await stream.generate({})
    assert caught.value.token_ids == (7, 8)
    assert stream.output_tokens() == [7, 8]
    assert not stream.is_done()


async def test_an_error_before_the_first_token_changes_nothing(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine
) -> None:
    await stream.generate({"max_tokens": 1})
    await stream.modify_kv(first_half)
    before = state_of(stream)
    engine.scripts = [[lms.EngineStreamError("bad")]]
    with pytest.raises(lms.EngineStreamError):
        await stream.generate({}, suffix_tokens=[5])
    assert state_of(stream) == before


async def test_an_error_in_mid_stream_keeps_what_was_given_out_and_the_next_pass_goes_on(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine
) -> None:
    engine.scripts = [[7, 8, lms.TruncatedStreamError("cut", token_ids=[7, 8])], [9, "stop"]]
    with pytest.raises(lms.TruncatedStreamError):
        await stream.generate({}, suffix_tokens=[5])
    assert stream.tokens == (*PROMPT, 5, 7, 8)
    assert not stream.is_done()
    await stream.generate({})
    assert engine.requests[1][0] == [*PROMPT, 5, 7, 8]
    assert stream.output_tokens() == [7, 8, 9]


async def test_leaving_early_keeps_only_what_was_yielded_and_closes_the_pass(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine
) -> None:
    engine.scripts = [[7, 8, 9, "stop"]]
    async with stream.open_generation({}) as generation:
        async for event in generation:
            if event.token_id == 8:
                break
    assert engine.closed == 1
    assert stream.output_tokens() == [7, 8]
    assert not stream.is_done()
    assert generation.metrics.output_tokens == 2
    with pytest.raises(lms.ClosedError):
        async with generation:
            pass


async def test_a_second_operation_meanwhile_is_refused_and_the_first_goes_on(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine
) -> None:
    engine.scripts = [[7, 0.05, 8, "stop"]]
    first = asyncio.create_task(stream.generate({}))
    await asyncio.sleep(0.02)
    for operation in (
        stream.generate({}),
        stream.retrieve_kv(),
        stream.modify_kv(first_half),
        stream.update_kv(torch.zeros(GEOMETRY.kv_shape(4)), [1, 2, 3, 4]),
    ):
        with pytest.raises(lms.StreamBusyError, match="a generation is under way"):
            await operation
    await first
    assert stream.output_tokens() == [7, 8]
    assert len(engine.requests) == 1


async def test_an_edit_moves_the_sequence_and_keeps_the_tail(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine, context: lms.AsyncLMCacheContext
) -> None:
    engine.scripts = [[7, "length"], [9, "stop"]]
    await stream.generate({"max_tokens": 1})
    seen: list[list[int]] = []

    def edit(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
        seen.append(tokens)
        assert torch.equal(kv, kv_of(tokens, SHAPE))
        return kv[:, :, 2:12], tokens[2:12]

    await stream.modify_kv(edit)
    assert seen == [PROMPT[:16]]
    # Ten tokens are left: two whole chunks are stored, the rest joins the suffix before the tail.
    assert stream.tokens == tuple(PROMPT[2:10])
    assert stream.suffix_tokens() == (*PROMPT[10:12], *PROMPT[16:], 7)
    assert stream.cache_salt != "base"
    assert stream.cache_salt.startswith("base~")
    stored = await context.retrieve(stream.tokens, stream.cache_salt)
    assert stored is not None
    assert torch.equal(stored, kv_of(PROMPT[2:10], SHAPE))
    report = stream.edits[-1]
    assert (report.tokens_before, report.tokens_after, report.recomputed_tokens) == (16, 10, 2)
    assert report.bytes_before == kv_of(PROMPT[:16], SHAPE).nbytes
    metrics = await stream.generate({"max_tokens": 5})
    sent, _, salt = engine.requests[1]
    assert sent == [*PROMPT[2:12], *PROMPT[16:], 7]
    assert salt == stream.cache_salt
    assert metrics.cached_tokens == 8
    assert stream.output_tokens() == [7, 9]


async def test_every_edit_has_a_salt_of_its_own(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine
) -> None:
    salts = {stream.cache_salt}
    await stream.generate({"max_tokens": 1})
    for _ in range(3):
        await stream.modify_kv(lambda kv, tokens: (kv, tokens))
        await stream.generate({"max_tokens": 1})
        salts.add(stream.cache_salt)
    assert len(salts) == 4
    assert all(len(salt) <= 128 and not set(salt) & set("@/\\\0") for salt in salts)


async def test_a_long_salt_is_cut_to_fit(context: lms.AsyncLMCacheContext, engine: ScriptedEngine) -> None:
    stream = lms.create_request(context, engine, PROMPT, "s" * 128)
    await stream.generate({"max_tokens": 1})
    await stream.modify_kv(first_half)
    assert len(stream.cache_salt) == 113


async def test_a_shared_stream_keeps_its_salt_and_refuses_other_bytes(
    context: lms.AsyncLMCacheContext, engine: ScriptedEngine
) -> None:
    stream = lms.create_request(context, engine, PROMPT, "base", isolation="shared")
    await stream.generate({"max_tokens": 1})
    before = state_of(stream)
    with pytest.raises(lms.StoreIncompleteError, match="other KV of the same tokens") as caught:
        await stream.modify_kv(lambda kv, tokens: (kv + 1, tokens))
    assert (caught.value.stored, caught.value.wanted) == (0, 4)
    assert state_of(stream) == before
    await stream.modify_kv(lambda kv, tokens: (kv, tokens))
    assert stream.cache_salt == "base"


async def test_edits_that_fail_change_nothing(stream: lms.AsyncLMCacheStream, engine: ScriptedEngine) -> None:
    await stream.generate({"max_tokens": 1})
    before = state_of(stream)
    wrong: list[tuple[Any, type[BaseException], str]] = [
        (lambda kv, tokens: kv, lms.InvalidRequestError, "new_kv, new_tokens|shape|tokens"),
        (lambda kv, tokens: (kv[:, :1], tokens), lms.InvalidRequestError, "shape"),
        (lambda kv, tokens: (kv.double(), tokens), lms.InvalidRequestError, "float64"),
        (lambda kv, tokens: (kv, tokens[1:]), lms.InvalidRequestError, "for 15 tokens"),
        (lambda kv, tokens: (kv[:, :, :3], tokens[:3]), lms.InvalidRequestError, "one chunk"),
        (lambda kv, tokens: 1 / 0, ZeroDivisionError, "zero"),
        (lms.keep([99]), lms.InvalidRequestError, "99 is not in a prefix of 16"),
        (5, lms.InvalidRequestError, "keep"),
    ]
    for fn, kind, reason in wrong:
        with pytest.raises(kind, match=reason):
            await stream.modify_kv(fn)
        assert state_of(stream) == before


async def test_edits_may_be_plain_or_async_functions_or_objects(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine
) -> None:
    async def coroutine(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
        await asyncio.sleep(0)
        return kv, tokens

    class Callable:
        async def __call__(self, kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
            return kv, tokens

    def returns_an_awaitable(kv: torch.Tensor, tokens: list[int]) -> Any:
        return coroutine(kv, tokens)

    await stream.generate({"max_tokens": 1})
    for fn in (coroutine, Callable(), returns_an_awaitable):
        await stream.modify_kv(fn)
    assert len(stream.edits) == 3


async def test_keep_moves_the_keys_and_leaves_the_values(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine, context: lms.AsyncLMCacheContext
) -> None:
    await stream.generate({"max_tokens": 1})
    await stream.modify_kv(lms.keep([0, 1, 2, 3, 8, 9, 10, 11]))
    stored = await context.retrieve(stream.tokens, stream.cache_salt)
    assert stored is not None
    kept = [*PROMPT[:4], *PROMPT[8:12]]
    plain = kv_of(kept, SHAPE)
    assert torch.equal(stored[1], plain[1])
    assert torch.equal(stored[0, :, :4], plain[0, :, :4])
    angles = -4 * torch.tensor(ROPE.inv_freq)
    x, y = plain[0, :, 4:].view(2, 4, 2, 2, 4).unbind(-2)
    moved = torch.stack([x * angles.cos() - y * angles.sin(), y * angles.cos() + x * angles.sin()], -2)
    assert torch.allclose(stored[0, :, 4:], moved.reshape(2, 4, 16), rtol=1e-6)


async def test_update_by_hand_keeps_the_tail_of_the_last_retrieve(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine
) -> None:
    await stream.generate({"max_tokens": 1})
    kv = await stream.retrieve_kv()
    assert kv.shape == GEOMETRY.kv_shape(16)
    await stream.update_kv(kv[:, :, :8].contiguous(), PROMPT[:8])
    assert stream.tokens == tuple(PROMPT[:8])
    assert stream.suffix_tokens() == (*PROMPT[16:], 1)
    await stream.update_kv(kv[:, :, :4].contiguous(), PROMPT[:4], tail=[3])
    assert stream.suffix_tokens() == (3, *PROMPT[16:], 1)
    # A generation forgets what was retrieved before it: then all behind the edit follows.
    await stream.generate({"max_tokens": 1}, suffix_tokens=[900])
    await stream.update_kv(kv[:, :, :4].contiguous(), PROMPT[:4])
    assert stream.suffix_tokens() == (3, *PROMPT[16:], 1, 900, 1)


async def test_kv_that_is_not_there_is_not_edited(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine, server: FakeLMCache
) -> None:
    engine.offloads = False
    await stream.generate({"max_tokens": 1})
    with pytest.raises(lms.KVNotReadyError) as caught:
        await stream.retrieve_kv(timeout=0.1)
    assert (caught.value.found, caught.value.wanted) == (0, 16)
    assert "LMCacheMPConnector" in str(caught.value)
    server.put(PROMPT[:8], kv_of(PROMPT[:8], SHAPE), salt="base")
    with pytest.raises(lms.KVNotReadyError) as caught:
        await stream.modify_kv(first_half, timeout=0.1)
    assert caught.value.found == 8
    assert (await stream.retrieve_kv(timeout=0.1)).shape[2] == 8
    with pytest.raises(lms.KVNotReadyError):
        await stream.retrieve_kv(timeout=0.1, min_tokens=12)
    await stream.modify_kv(lambda kv, tokens: (kv, tokens), timeout=0.1, min_tokens=8)
    assert stream.tokens == tuple(PROMPT[:8])
    assert stream.suffix_tokens() == (*PROMPT[8:], 1)


async def test_a_forgotten_prefill_is_named(stream: lms.AsyncLMCacheStream) -> None:
    with pytest.raises(
        lms.KVNotReadyError, match=r"ran no pass yet: unless .* first `await stream\.generate"
    ):
        await stream.modify_kv(first_half, timeout=0)


async def test_retrieve_waits_until_the_last_chunk_is_there(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine, server: FakeLMCache
) -> None:
    engine.offloads = False
    await stream.generate({"max_tokens": 1})
    server.put(PROMPT[:8], kv_of(PROMPT[:8], SHAPE), salt="base")
    waiting = asyncio.create_task(stream.retrieve_kv(timeout=5))
    await asyncio.sleep(0.1)
    for end in (12, 16):
        server.put_chunk(PROMPT[:end], kv_of(PROMPT[end - 4 : end], SHAPE), salt="base")
    assert (await waiting).shape[2] == 16


@pytest.mark.parametrize(
    ("prompt", "arguments", "reason"),
    [
        ([1, 2, 3], {}, "shorter than one chunk of 4"),
        (PROMPT, {"min_tokens": 20}, "min_tokens=20 cannot be"),
        (PROMPT, {"min_tokens": 0}, "min_tokens=0 cannot be"),
        (PROMPT, {"timeout": -1}, "timeout"),
        (PROMPT, {"poll_interval": 0}, "poll_interval"),
    ],
)
async def test_waiting_for_what_cannot_be_is_refused_at_once(
    context: lms.AsyncLMCacheContext, engine: ScriptedEngine, prompt: Any, arguments: Any, reason: str
) -> None:
    stream = lms.create_request(context, engine, prompt)
    with pytest.raises(lms.InvalidRequestError, match=reason):
        await stream.retrieve_kv(**arguments)


async def test_a_full_cache_is_retried_and_then_an_error(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine, server: FakeLMCache
) -> None:
    await stream.generate({"max_tokens": 1})
    server.capacity = len(server.chunks) + 1
    before = state_of(stream)
    with pytest.raises(lms.StoreIncompleteError, match="1 of 2 chunks") as caught:
        await stream.modify_kv(first_half, timeout=0.5)
    assert (caught.value.stored, caught.value.wanted) == (1, 2)
    assert state_of(stream) == before
    assert server.locked == (0, 0)
    editing = asyncio.create_task(stream.modify_kv(first_half, timeout=5))
    await asyncio.sleep(0.1)
    server.clear()
    await editing
    assert stream.tokens == tuple(PROMPT[:8])


async def test_edited_kv_that_is_gone_is_an_error_and_nothing_is_sent(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine, server: FakeLMCache
) -> None:
    await stream.generate({"max_tokens": 1})
    kv = await stream.retrieve_kv()
    await stream.modify_kv(first_half)
    server.clear()
    before = state_of(stream)
    for _ in range(2):
        with pytest.raises(lms.CacheLostError, match=r"0 of 8 edited tokens .* nothing was sent"):
            await stream.generate({})
    assert state_of(stream) == before
    assert len(engine.requests) == 1
    lost = stream.cache_salt
    await stream.update_kv(kv[:, :, :8].contiguous(), PROMPT[:8])
    assert stream.cache_salt != lost
    await stream.generate({})
    assert len(engine.requests) == 2


async def test_edited_kv_is_locked_until_the_first_token_and_then_free(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine, server: FakeLMCache
) -> None:
    engine.scripts = [[1, "length"], [0.1, 7, 0.1, 8, "stop"]]
    await stream.generate({"max_tokens": 1})
    await stream.modify_kv(first_half)
    passing = asyncio.create_task(stream.generate({}))
    await asyncio.sleep(0.05)
    assert server.locked == (2, 0)
    server.calls.clear()
    await asyncio.sleep(0.1)
    assert server.locked == (0, 0)
    await passing
    assert server.calls.count("free_lookup_locks") == 1


async def test_an_engine_that_did_not_use_the_edited_kv_is_an_error_at_the_end(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine
) -> None:
    engine.scripts = [[1, "length"], [7, 8, lms.FinishEvent("stop", cached_tokens=4)]]
    await stream.generate({"max_tokens": 1})
    await stream.modify_kv(first_half)
    with pytest.raises(lms.CacheLostError, match="took 4 tokens from the cache, not the 8"):
        await stream.generate({})
    assert not stream.is_done()
    with pytest.raises(lms.CacheLostError):
        await stream.generate({})
    assert len(engine.requests) == 2


@pytest.mark.parametrize(
    "error",
    [
        lms.EngineStreamError("Internal server error"),
        lms.EngineConnectError("the engine is gone"),
        lms.TruncatedStreamError("the stream broke off"),
    ],
)
async def test_an_engine_error_because_the_kv_went_away_says_so(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine, server: FakeLMCache, error: lms.EngineError
) -> None:
    engine.scripts = [[1, "length"], [0.05, error]]
    await stream.generate({"max_tokens": 1})
    await stream.modify_kv(first_half)
    passing = asyncio.create_task(stream.generate({}))
    await asyncio.sleep(0.02)
    server.clear(force=True)
    with pytest.raises(lms.CacheLostError, match=str(error)) as caught:
        await passing
    assert caught.value.__cause__ is error


async def test_an_engine_that_reports_no_cached_tokens_is_warned_of(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine
) -> None:
    engine.reports_cached = False
    await stream.generate({"max_tokens": 1})
    await stream.modify_kv(first_half)
    with pytest.warns(RuntimeWarning, match="--enable-prompt-tokens-details"):
        metrics = await stream.generate({"max_tokens": 1})
    assert metrics.cached_tokens is None


async def test_a_cancel_at_every_await_of_an_edit_leaves_the_stream_as_it_was(
    context: lms.AsyncLMCacheContext, engine: ScriptedEngine, server: FakeLMCache
) -> None:
    number = 0
    while True:
        number += 1
        stream = lms.create_request(context, engine, PROMPT, f"walk{number}")
        await stream.generate({"max_tokens": 1})
        before = state_of(stream)
        was_cancelled = await cancelled_at(stream.modify_kv(first_half), number)
        for _ in range(200):
            if server.locked == (0, 0):
                break
            await asyncio.sleep(0.01)
        assert server.locked == (0, 0)
        if not stream.edits:
            assert state_of(stream) == before
        await stream.generate({"max_tokens": 1})
        if not was_cancelled:
            break
    assert number > 4


async def test_a_cancel_at_every_await_of_a_generation_gives_everything_back(
    context: lms.AsyncLMCacheContext, engine: ScriptedEngine, server: FakeLMCache
) -> None:
    number = 0
    while True:
        number += 1
        stream = lms.create_request(context, engine, PROMPT, f"walk{number}")
        await stream.generate({"max_tokens": 1})
        await stream.modify_kv(first_half)
        engine.scripts = [[0.01, 7, 0.01, 8, "stop"]]
        before = state_of(stream)
        was_cancelled = await cancelled_at(stream.generate({}), number)
        for _ in range(200):
            if server.locked == (0, 0):
                break
            await asyncio.sleep(0.01)
        assert server.locked == (0, 0)
        ids = stream.output_tokens()[1:]
        assert ids == [7, 8][: len(ids)]
        if not ids and not stream.is_done() and was_cancelled and stream.suffix_tokens():
            assert state_of(stream) == before
        engine.scripts = []
        assert len(engine.requests) == engine.closed
        if not was_cancelled:
            break
        await stream.generate({"max_tokens": 1})
    assert number > 3


@pytest.mark.parametrize(
    ("prompt", "arguments", "reason"),
    [
        ([], {}, "empty"),
        ([1, -2], {}, r"\[1\] is -2"),
        ("text", {}, "tokenizer"),
        ([[1]], {}, "flat sequence"),
        ([1], {"cache_salt": "a/b"}, "cache_salt holds"),
        ([1], {"isolation": "other"}, "isolation"),
    ],
)
async def test_a_stream_that_cannot_be_is_refused(
    context: lms.AsyncLMCacheContext, engine: ScriptedEngine, prompt: Any, arguments: Any, reason: str
) -> None:
    with pytest.raises(lms.InvalidRequestError, match=reason):
        lms.create_request(context, engine, prompt, **arguments)


async def test_what_is_no_post_completion_is_refused(
    context: lms.AsyncLMCacheContext, engine: ScriptedEngine
) -> None:
    async def coroutine(*_: Any) -> list[int]:
        return [1]

    async def strange(*_: Any) -> AsyncIterator[Any]:
        yield 5

    for post_completion, reason in ((coroutine, "coroutine"), (strange, "yielded a int")):
        stream = lms.create_request(context, post_completion, PROMPT)  # type: ignore[arg-type]
        with pytest.raises(lms.InvalidRequestError, match=reason):
            await stream.generate({})
        assert stream.tokens == tuple(PROMPT)
    with pytest.raises(lms.InvalidRequestError, match="callable"):
        lms.create_request(context, None, PROMPT)  # type: ignore[arg-type]


async def test_a_pass_without_any_event_takes_nothing(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine
) -> None:
    engine.scripts = [[], ["abort"]]
    await stream.generate({}, suffix_tokens=[5])
    assert stream.tokens == tuple(PROMPT)
    assert stream.is_done()
    with pytest.raises(lms.EngineStreamError, match="abort"):
        await stream.generate({}, suffix_tokens=[5])
    assert stream.tokens == tuple(PROMPT)


async def test_an_engine_that_cut_the_prompt_is_an_error(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine
) -> None:
    engine.scripts = [[7, lms.FinishEvent("stop", prompt_tokens=17)]]
    with pytest.raises(lms.EngineStreamError, match="17 prompt tokens, but 18 were sent"):
        await stream.generate({})


async def test_another_task_may_end_the_pass(stream: lms.AsyncLMCacheStream, engine: ScriptedEngine) -> None:
    engine.scripts = [[7, 30.0, 8, "stop"]]
    generation = stream.open_generation({})
    seen: list[int] = []

    async def read() -> str:
        async with generation:
            async for event in generation:
                seen.append(event.token_id)  # noqa: PERF401 - must be seen as they come
        return "came to its end"

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.02)
    with pytest.raises(lms.StreamBusyError, match="two tasks"):
        await anext(generation)
    await generation.aclose()
    assert engine.closed == 1
    assert await reading == "came to its end"
    assert seen == stream.output_tokens() == [7]
    await stream.generate({})


async def test_a_pass_that_was_left_by_a_bare_break_frees_the_stream_and_the_locks(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine, server: FakeLMCache
) -> None:
    await stream.generate({"max_tokens": 1})
    await stream.modify_kv(first_half)
    engine.scripts = [[30.0, 7]]
    generation = stream.open_generation({})
    waiting = asyncio.create_task(generation._begin())
    await waiting
    assert server.locked == (2, 0)
    with pytest.warns(ResourceWarning, match="was not closed"):
        generation.__del__()
    for _ in range(100):
        if server.locked == (0, 0):
            break
        await asyncio.sleep(0.01)
    assert server.locked == (0, 0)
    generation._is_closed = True
    engine.scripts = []
    await stream.generate({"max_tokens": 1})


async def test_an_edit_that_raises_stop_iteration_is_an_error_and_no_hang(
    stream: lms.AsyncLMCacheStream,
) -> None:
    def exhausted(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
        return next(iter([]))

    await stream.generate({"max_tokens": 1})
    with pytest.raises(RuntimeError, match="StopIteration"):
        await asyncio.wait_for(stream.modify_kv(exhausted), 5)


async def test_a_post_completion_that_changes_its_arguments_changes_nothing_here(
    context: lms.AsyncLMCacheContext,
) -> None:
    async def greedy(prompt: list[int], params: dict[str, Any], salt: str) -> AsyncIterator[lms.TokenEvent]:
        prompt.clear()
        params.pop("max_tokens")
        yield lms.TokenEvent(1)

    stream = lms.create_request(context, greedy, PROMPT)
    await stream.generate({"max_tokens": 1})
    assert stream.tokens == (*PROMPT, 1)
    assert not stream.is_done()


async def test_the_first_token_does_not_wait_for_the_cache_server(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine, server: FakeLMCache
) -> None:
    await stream.generate({"max_tokens": 1})
    await stream.modify_kv(first_half)
    server.delays = {"free_lookup_locks": 0.5}
    async with stream.open_generation({"max_tokens": 1}) as generation:
        await asyncio.wait_for(anext(generation), 0.4)


async def test_plain_kv_in_place_of_the_edit_is_found_after_a_pass_that_was_left(
    stream: lms.AsyncLMCacheStream, engine: ScriptedEngine, server: FakeLMCache
) -> None:
    engine.scripts = [[1, "length"], [7, 8, "stop"], [7, 8, "stop"]]
    await stream.generate({"max_tokens": 1})
    await stream.modify_kv(lambda kv, tokens: (kv[:, :, :8] + 1, tokens[:8]))
    async with stream.open_generation({}) as generation:
        await anext(generation)
    await stream.generate({})
    # As after a forced clear while the engine was about to load: it stores what it computed anew.
    engine.scripts = [[7, 8, "stop"]]
    async with stream.open_generation({}) as generation:
        await anext(generation)
    await asyncio.sleep(0.05)
    server.clear(force=True)
    server.put(PROMPT[:8], kv_of(PROMPT[:8], SHAPE), salt=stream.cache_salt)
    sent = len(engine.requests)
    with pytest.raises(lms.CacheLostError, match="no longer the edited KV"):
        await stream.generate({})
    assert len(engine.requests) == sent


async def test_a_forgotten_generation_warns(stream: lms.AsyncLMCacheStream, engine: ScriptedEngine) -> None:
    engine.scripts = [[7, 8, "stop"]]
    generation = stream.open_generation({})
    await anext(generation)
    with pytest.warns(ResourceWarning, match="was not closed"):
        generation.__del__()
    await generation.aclose()
