"""The context against a scripted server: results, and an account of every lock and slot."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch

import lmcache_stream as lms

from ..fakes.lmcache import FakeLMCache
from .conftest import FAST, GEOMETRY, random_kv

TOKENS = list(range(100, 112))
Context = lms.AsyncLMCacheContext


async def no_locks(server: FakeLMCache) -> None:
    """Wait, two seconds at the most, until nothing is locked."""
    with anyio.fail_after(2):
        while server.locked != (0, 0):
            await asyncio.sleep(0.005)


async def test_what_is_stored_is_found_and_retrieved(context: Context, server: FakeLMCache) -> None:
    kv = random_kv(12)
    assert await context.lookup(TOKENS) == 0
    assert await context.retrieve(TOKENS) is None
    assert await context.store(kv, TOKENS) == lms.StoreResult(stored=3, existing=0, refused=0)
    assert await context.lookup([*TOKENS, 7]) == 12
    assert await context.lookup([*TOKENS[:8], 7, 7, 7, 7]) == 8
    assert await context.lookup(TOKENS, "salt") == 0
    found = await context.retrieve(TOKENS)
    assert found is not None
    assert torch.equal(found, kv)
    assert server.locked == (0, 0)


async def test_a_retrieved_tensor_is_private(context: Context) -> None:
    kv = random_kv(12)
    await context.store(kv, TOKENS)
    first = await context.retrieve(TOKENS)
    assert first is not None
    first.zero_()
    second = await context.retrieve(TOKENS)
    assert second is not None
    assert torch.equal(second, kv)


async def test_only_whole_chunks_are_stored(context: Context) -> None:
    result = await context.store(random_kv(11), TOKENS[:11])
    assert result == lms.StoreResult(stored=2, existing=0, refused=0)
    assert await context.lookup(TOKENS) == 8


async def test_chunks_that_are_there_count_only_when_their_bytes_are_equal(
    context: Context, server: FakeLMCache
) -> None:
    kv = random_kv(12)
    assert await context.store(kv[:, :, :8], TOKENS[:8])
    assert await context.store(kv, TOKENS) == lms.StoreResult(stored=1, existing=2, refused=0)
    other = kv.clone()
    other[1, 1, 5, 3] += 1
    result = await context.store(other, TOKENS)
    assert not result
    assert (result.refused, result.conflicting) == (1, 1)
    found = await context.retrieve(TOKENS)
    assert found is not None
    assert torch.equal(found, kv)
    assert server.locked == (0, 0)


async def test_a_full_cache_refuses_and_holds_no_lock(context: Context, server: FakeLMCache) -> None:
    server.capacity = 2
    result = await context.store(random_kv(12), TOKENS)
    assert result == lms.StoreResult(stored=2, existing=0, refused=1)
    assert server.locked == (0, 0)


async def test_equal_stores_at_once_are_serialised(context: Context, server: FakeLMCache) -> None:
    server.delays = {"commit_store": 0.05}
    kv = random_kv(12)
    first, second = await asyncio.gather(context.store(kv, TOKENS), context.store(kv, TOKENS))
    assert first
    assert second
    found = await context.retrieve(TOKENS)
    assert found is not None
    assert torch.equal(found, kv)


async def test_equal_retrieves_at_once_are_serialised(context: Context, server: FakeLMCache) -> None:
    kv = random_kv(12)
    await context.store(kv, TOKENS)
    server.delays = {"commit_retrieve": 0.02}
    found = await asyncio.gather(*(context.retrieve(TOKENS) for _ in range(5)))
    assert all(one is not None and torch.equal(one, kv) for one in found)
    assert server.locked == (0, 0)


async def test_chunks_that_vanish_after_the_lookup_are_a_miss(context: Context, server: FakeLMCache) -> None:
    await context.store(random_kv(12), TOKENS)
    server.delays = {"prepare_retrieve": 0.05}
    retrieve = asyncio.create_task(context.retrieve(TOKENS))
    await asyncio.sleep(0.03)
    server.clear(force=True)
    assert await retrieve is None
    assert server.locked == (0, 0)


@pytest.mark.parametrize("how", ["deadline", "cancel", "anyio"])
async def test_a_pending_prefetch_is_released_once_when_its_result_comes(
    context: Context, server: FakeLMCache, how: str
) -> None:
    await context.store(random_kv(12), TOKENS)
    server.prefetch_done.clear()
    if how == "deadline":
        with pytest.raises(lms.CacheTimeoutError, match="a lookup"):
            await context.lookup(TOKENS)
    elif how == "cancel":
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(context.lookup(TOKENS), 0.1)
    else:
        with anyio.move_on_after(0.1):
            await context.lookup(TOKENS)
    server.calls.clear()
    server.prefetch_done.set()
    with anyio.fail_after(2):
        while "end_session" not in server.calls:
            await asyncio.sleep(0.01)
    assert server.calls.count("free_lookup_locks") == 1
    assert server.locked == (0, 0)


async def walk_cancels(
    server: FakeLMCache,
    operation: Callable[[], Awaitable[Any]],
    check: Callable[[], Awaitable[None]],
) -> int:
    """Cancel ``operation`` after 0, 1, 2, ... turns of the loop until it comes through."""
    for turns in range(2000):
        task = asyncio.ensure_future(operation())
        for _ in range(turns):
            await asyncio.sleep(0)
            if task.done():
                break
        if task.done():
            await task
            return turns
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await no_locks(server)
        await check()
    raise AssertionError("the operation never came through")


async def test_a_cancel_anywhere_in_a_retrieve_leaves_no_lock(context: Context, server: FakeLMCache) -> None:
    await context.store(random_kv(12), TOKENS)

    async def check() -> None:
        assert server.violations == []

    assert await walk_cancels(server, lambda: context.retrieve(TOKENS), check) > 5


async def test_a_cancel_anywhere_in_a_store_publishes_all_or_nothing(
    context: Context, server: FakeLMCache
) -> None:
    kv = random_kv(12)
    seen = set()

    async def check() -> None:
        there = {key: bytes(chunk.numpy().tobytes()) for key, chunk in server.chunks.items()}
        seen.add(len(there))
        for index in range(len(there)):
            key = ("model", "", tuple(TOKENS[: 4 * (index + 1)]))
            wanted = kv[:, :, 4 * index : 4 * (index + 1)].contiguous().numpy().tobytes()
            assert there[key] == wanted
        server.clear(force=True)

    await walk_cancels(server, lambda: context.store(kv, TOKENS), check)
    assert seen == {0, 3}


async def test_closing_waits_for_a_store_that_was_left(server: FakeLMCache) -> None:
    kv = random_kv(12)
    connection = lms.connect(server.url, server.http_url, "model", geometry=GEOMETRY, timeouts=FAST)
    async with connection as context:
        server.delays = {"prepare_store": 2.3}
        with pytest.raises(lms.CacheTimeoutError):
            await context.store(kv, TOKENS)
    assert len(server.chunks) == 3
    assert server.registered == {}


async def test_a_silent_operation_is_explained_by_the_status(context: Context, server: FakeLMCache) -> None:
    server.registered.clear()
    with pytest.raises(lms.CacheTimeoutError, match="no longer knows this client"):
        await context.store(random_kv(12), TOKENS)
    assert await context.store(random_kv(12), [1, *TOKENS[1:]])


async def test_after_idleness_the_registration_is_renewed(
    context: Context, server: FakeLMCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.registered.clear()
    later = time.monotonic() + 31
    monkeypatch.setattr("lmcache_stream.cache.peer.time", SimpleNamespace(monotonic=lambda: later))
    assert await context.store(random_kv(12), TOKENS)
    assert "ping" not in server.calls


async def test_a_restarted_server_is_registered_with_again(context: Context, server: FakeLMCache) -> None:
    kv = random_kv(12)
    await context.store(kv, TOKENS)
    await server.stop()
    await server.start()
    with anyio.fail_after(10):
        # One that is sent before the old connection's end is noticed breaks with it.
        while await _found_or_broken(context) != 0:
            await asyncio.sleep(0.05)
    assert await context.store(kv, TOKENS)
    found = await context.retrieve(TOKENS)
    assert found is not None
    assert torch.equal(found, kv)


async def test_the_first_lookup_after_a_restart_gives_its_locks_back(
    context: Context, server: FakeLMCache
) -> None:
    await server.stop(killed=True)
    await server.start()
    server.put(TOKENS, random_kv(12))
    with anyio.fail_after(10):
        while await _found_or_broken(context) != 12:
            await asyncio.sleep(0.05)
    assert server.locked == (0, 0)


async def _found_or_broken(context: Context) -> int | None:
    try:
        return await context.lookup(TOKENS)
    except lms.CacheConnectError:
        return None


async def test_a_server_that_goes_away_is_an_error_at_once(context: Context, server: FakeLMCache) -> None:
    server.silent = {"lookup"}
    lookup = asyncio.create_task(context.lookup(TOKENS))
    await asyncio.sleep(0.05)
    await server.stop()
    with anyio.fail_after(0.9), pytest.raises(lms.CacheConnectError, match="broke during lookup"):
        await lookup
    with pytest.raises(lms.CacheConnectError, match=r"no LMCache server at|no server is connected"):
        await context.retrieve(TOKENS)


async def test_closing_does_not_wait_for_a_silent_server_for_long(server: FakeLMCache) -> None:
    context = await lms.connect(server.url, server.http_url, "model", geometry=GEOMETRY, timeouts=FAST)
    server.silent = {"lookup"}
    with pytest.raises(lms.CacheTimeoutError):
        await context.lookup(TOKENS)
    started = time.monotonic()
    await context.aclose()
    assert time.monotonic() - started < 7
    assert server.registered == {}


async def test_locks_that_may_be_another_s_by_now_are_left_alone(
    context: Context, server: FakeLMCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    await context.store(random_kv(12), TOKENS)
    lease = await context.pin(TOKENS)
    lease.granted -= 301
    server.calls.clear()
    await context.unpin(lease)
    with anyio.fail_after(5):
        while not server.calls:
            await asyncio.sleep(0.01)
    assert server.calls == ["end_session"]
    server.read_locks.clear()


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
async def test_kv_that_is_not_finite_is_not_stored(context: Context, server: FakeLMCache, odd: float) -> None:
    kv = random_kv(12)
    kv[1, -1, -1, -1] = odd
    with pytest.raises(lms.InvalidRequestError, match="NaN or infinities"):
        await context.store(kv, TOKENS)
    assert "prepare_store" not in server.calls


async def test_a_session_that_ends_in_silence_holds_nothing_up(context: Context, server: FakeLMCache) -> None:
    server.silent = {"end_session"}
    kv = random_kv(12)
    with anyio.fail_after(1.5):
        assert await context.store(kv, TOKENS)
        assert await context.lookup(TOKENS) == 12
        found = await context.retrieve(TOKENS)
    assert found is not None
    assert torch.equal(found, kv)
    server.silent = set()


async def test_a_tensor_that_is_reused_after_a_cancel_is_not_what_is_stored(
    context: Context, server: FakeLMCache
) -> None:
    kv = random_kv(12)
    own = kv.clone()
    server.delays = {"prepare_store": 2.3}
    with pytest.raises(lms.CacheTimeoutError):
        await context.store(own, TOKENS)
    own.zero_()
    server.delays = {}
    with anyio.fail_after(5):
        while len(server.chunks) < 3:
            await asyncio.sleep(0.02)
    found = await context.retrieve(TOKENS)
    assert found is not None
    assert torch.equal(found, kv)


async def test_a_lost_reply_does_not_block_what_comes_after_it(context: Context, server: FakeLMCache) -> None:
    kv = random_kv(12)
    await context.store(kv, TOKENS)
    server.silent = {"prepare_retrieve"}
    with pytest.raises(lms.CacheTimeoutError):
        await context.retrieve(TOKENS)
    server.silent = set()
    found = await context.retrieve(TOKENS)
    assert found is not None
    assert torch.equal(found, kv)
    # The locks of the lost one are the server's to time out; nobody here may guess.
    server.read_locks.clear()


async def test_closing_gives_back_what_is_still_pinned(context: Context, server: FakeLMCache) -> None:
    await context.store(random_kv(12), TOKENS)
    await context.pin(TOKENS)
    assert server.locked == (3, 0)
    await context.aclose()
    assert server.locked == (0, 0)


async def test_a_context_of_another_loop_says_so(context: Context) -> None:
    def elsewhere() -> None:
        with pytest.raises(lms.ClosedError, match="event loop"):
            asyncio.run(context.lookup(TOKENS))
        with pytest.raises(lms.ClosedError, match="event loop"):
            asyncio.run(context.aclose())

    await asyncio.to_thread(elsewhere)
    assert await context.lookup(TOKENS) == 0


@pytest.mark.parametrize("value", [None, 0, -1, float("inf"), float("nan"), "5", True])
def test_timeouts_that_cannot_be_are_refused(value: Any) -> None:
    with pytest.raises(lms.InvalidRequestError, match="lookup"):
        lms.Timeouts(lookup=value)


async def test_mla_is_refused_before_anything_is_reserved(server: FakeLMCache) -> None:
    server.engine_use_mla = True
    geometry = dataclasses.replace(GEOMETRY, layout="mla", num_kv_heads=1)
    async with lms.connect(server.url, server.http_url, "model", geometry=geometry, timeouts=FAST) as context:
        server.calls.clear()
        with pytest.raises(lms.LayoutError, match="MLA"):
            await context.store(torch.zeros(geometry.kv_shape(12)), TOKENS)
        assert server.calls == []


@pytest.mark.parametrize(
    ("kv", "tokens", "salt", "reason"),
    [
        (random_kv(12)[:, :1], TOKENS, "", r"shape \[2, 1, 12, 16\]"),
        (random_kv(8), TOKENS, "", r"shape \[2, 2, 8, 16\], but .* for 12 tokens"),
        (random_kv(12).half(), TOKENS, "", r"kv is torch.float16, .* torch.float32"),
        (random_kv(3), TOKENS[:3], "", "less than one chunk of 4"),
        ([1, 2], TOKENS, "", "must be a torch.Tensor"),
        (random_kv(12).to("meta"), TOKENS, "", "dense tensor with data, not .* on meta"),
        (random_kv(12).to_sparse(), TOKENS, "", "dense tensor with data, not torch.sparse_coo"),
        (random_kv(12), [*TOKENS[:11], -1], "", r"tokens\[11\] is -1"),
        (random_kv(12), "abc", "", "not text"),
        (random_kv(12), [0.5] * 12, "", "integers"),
        (random_kv(12), TOKENS, "a/b", "salt holds"),
        (random_kv(12), TOKENS, "s" * 129, "129 characters"),
    ],
)
async def test_bad_input_is_refused_before_anything_is_sent(
    context: Context, server: FakeLMCache, kv: Any, tokens: Any, salt: str, reason: str
) -> None:
    server.calls.clear()
    with pytest.raises(lms.InvalidRequestError, match=reason):
        await context.store(kv, tokens, salt)
    assert server.calls == []


async def test_a_closed_context_says_so(server: FakeLMCache) -> None:
    context = await lms.connect(server.url, server.http_url, "model", geometry=GEOMETRY, timeouts=FAST)
    assert len(server.registered) == 1
    await context.aclose()
    await context.aclose()
    assert server.registered == {}
    with pytest.raises(lms.ClosedError):
        await context.lookup(TOKENS)


async def test_a_forgotten_context_warns(server: FakeLMCache) -> None:
    context = await lms.connect(server.url, server.http_url, "model", geometry=GEOMETRY, timeouts=FAST)
    with pytest.warns(ResourceWarning, match="was not closed"):
        context.__del__()
    await context.aclose()
