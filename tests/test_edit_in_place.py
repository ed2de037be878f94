"""Edits that only drop tokens, from the server's slots into its slots, beside the way through a function."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lmcache_stream as lms
from lmcache_stream.cache import holds
from lmcache_stream.cache.edit import drop_tokens
from lmcache_stream.cache.transfers import Transfers
from lmcache_stream.dropping import CachedPrefix, DropPolicy, KeyDiff, KNorm, StreamingLLM, ValueDiff

from .cache.conftest import FAST, GEOMETRY
from .cache.test_connect import until_registered_again
from .cancelling import cancelled_at
from .fakes.engine import ScriptedEngine
from .fakes.lmcache import FakeLMCache

PROMPT = list(range(100, 118))  # 4 whole chunks of 4, and 2 tokens more
PREFIX = PROMPT[:16]
ROPE = lms.RopeConfig(head_size=8, inv_freq=(1.0, 0.1, 0.01, 0.001), pairing="half")
KEPT = [0, 1, 2, 3, 6, 7, 9, 15]


@pytest.fixture(params=[True, False], ids=["shared-memory", "pickle"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[FakeLMCache]:
    async with FakeLMCache(shared_memory=request.param) as fake:
        yield fake
        assert fake.violations == []
        assert fake.locked == (0, 0)


@pytest.fixture
async def context(server: FakeLMCache) -> AsyncIterator[lms.AsyncLMCacheContext]:
    async with lms.connect(
        server.url, server.http_url, "model", geometry=GEOMETRY, rope=ROPE, timeouts=FAST
    ) as opened:
        yield opened


def some_kv(seed: int = 0) -> Tensor:
    return torch.randn(GEOMETRY.kv_shape(16), generator=torch.Generator().manual_seed(seed))


def new_stream(
    context: lms.AsyncLMCacheContext, server: FakeLMCache, **options: object
) -> lms.AsyncLMCacheStream:
    engine = ScriptedEngine(server, GEOMETRY.kv_shape(1))
    return lms.create_request(context, engine, PROMPT, **options)  # type: ignore[arg-type]


async def stored(context: lms.AsyncLMCacheContext, stream: lms.AsyncLMCacheStream) -> Tensor:
    found = await context.retrieve(stream.tokens, stream.cache_salt)
    assert found is not None
    return found


@pytest.mark.parametrize("kept", [KEPT, [*KEPT[:4], 13, 14, 15], list(range(16))])
async def test_the_same_bits_as_through_a_function(
    context: lms.AsyncLMCacheContext, server: FakeLMCache, kept: list[int]
) -> None:
    kv = some_kv()
    server.put(PREFIX, kv)
    whole = len(kept) // 4 * 4
    wanted, ids = drop_tokens(kv, PREFIX, torch.tensor(kept), ROPE)
    there, through = new_stream(context, server), new_stream(context, server)
    await there.modify_kv(lms.keep(kept))
    await through.modify_kv(lambda kv, tokens: drop_tokens(kv, tokens, torch.tensor(kept), ROPE))
    for stream in (there, through):
        assert torch.equal(await stored(context, stream), wanted[:, :, :whole])
        assert stream.tokens == tuple(ids[:whole])
        assert stream.suffix_tokens() == (*ids[whole:], *PROMPT[16:])
    report, other = there.edits[0], through.edits[0]
    assert report.kept_indices == tuple(kept)
    assert other.kept_indices is None
    assert (report.tokens_before, report.tokens_after, report.recomputed_tokens) == (
        other.tokens_before,
        other.tokens_after,
        other.recomputed_tokens,
    )
    assert torch.equal(there._state.fingerprint, through._state.fingerprint)  # type: ignore[arg-type]
    # What was edited is as it was.
    assert torch.equal(await context.retrieve(PREFIX), kv)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", [KeyDiff, ValueDiff, KNorm, StreamingLLM])
async def test_a_policy_chooses_the_same_from_where_the_kv_lies(
    context: lms.AsyncLMCacheContext, server: FakeLMCache, policy: type[DropPolicy]
) -> None:
    kv = some_kv(1)
    server.put(PREFIX, kv)
    chosen = policy(ratio=0.5, sinks=1, window=2)
    wanted = chosen.kept_indices(CachedPrefix.of(kv, PREFIX, num_kv_heads=2, rope=ROPE), 4)
    stream = new_stream(context, server)
    await stream.modify_kv(chosen)
    assert stream.edits[0].kept_indices == tuple(wanted.tolist())
    assert torch.equal(await stored(context, stream), drop_tokens(kv, PREFIX, wanted, ROPE)[0])


async def test_nothing_is_retrieved_or_stored_twice(
    context: lms.AsyncLMCacheContext, server: FakeLMCache
) -> None:
    server.put(PREFIX, some_kv())
    stream = new_stream(context, server)
    await stream.modify_kv(lms.keep(KEPT))
    counts = {name: server.calls.count(name) for name in ("prepare_retrieve", "prepare_store", "lookup")}
    assert counts == {"prepare_retrieve": 1, "prepare_store": 1, "lookup": 2}


@pytest.mark.parametrize("room", [0, 1])
async def test_without_room_it_holds_no_lock_and_goes_on_when_there_is_some(
    context: lms.AsyncLMCacheContext, server: FakeLMCache, room: int
) -> None:
    kv = some_kv()
    server.put(PREFIX, kv)
    server.capacity = 4 + room
    stream = new_stream(context, server)
    edit = asyncio.create_task(stream.modify_kv(lms.keep(KEPT), timeout=10))
    await asyncio.sleep(0.3)
    assert not edit.done()
    assert server.locked[0] == 0
    # The prefix itself may be evicted meanwhile.
    server.clear()
    server.capacity = None
    await edit
    assert torch.equal(await stored(context, stream), drop_tokens(kv, PREFIX, torch.tensor(KEPT), ROPE)[0])
    assert stream.edits[0].kept_indices == tuple(KEPT)


async def test_kv_that_is_not_finite_is_refused_and_leaves_no_slot_open(
    context: lms.AsyncLMCacheContext, server: FakeLMCache
) -> None:
    kv = some_kv()
    kv[1, 1, 9, 3] = torch.nan
    server.put(PREFIX, kv)
    stream = new_stream(context, server)
    before = stream.cache_salt
    with pytest.raises(lms.InvalidRequestError, match="layer 1 holds NaN"):
        await stream.modify_kv(lms.keep(KEPT))
    assert (stream.edits, stream.cache_salt, stream.tokens) == ((), before, tuple(PROMPT))
    assert server.locked == (0, 0)
    await stream.modify_kv(lms.keep([0, 1, 2, 3]))
    assert stream.tokens == tuple(PROMPT[:4])


async def test_the_pool_is_not_held_by_a_kept_error_of_an_edit(
    context: lms.AsyncLMCacheContext, server: FakeLMCache
) -> None:
    kv = some_kv()
    kv[1, 1, 9, 3] = torch.nan
    server.put(PREFIX, kv)
    with pytest.raises(lms.InvalidRequestError, match="NaN") as raised:
        await new_stream(context, server).modify_kv(lms.keep(KEPT))
    before = pools_mapped(server)
    await context.aclose()
    assert raised.value.__traceback__ is not None
    assert pools_mapped(server) == before - server.shared_memory


def pools_mapped(server: FakeLMCache) -> int:
    """How often this process maps the pool; the fake server itself does so once."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(bool(server.shm_name) and server.shm_name in line for line in lines)


async def test_a_shared_salt_is_not_written_to_before_all_is_known(
    context: lms.AsyncLMCacheContext, server: FakeLMCache
) -> None:
    kv = some_kv()
    kv[0, 0, 9, 3] = torch.inf
    server.put(PREFIX, kv)
    stream = new_stream(context, server, isolation="shared")
    with pytest.raises(lms.InvalidRequestError, match="NaN or infinities"):
        await stream.modify_kv(lms.keep(KEPT))
    assert len(server.chunks) == 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(DropPolicy):
    """Scores when it may, and says that it was asked."""

    asked: threading.Event
    go_on: threading.Event

    def score(self, prefix: CachedPrefix) -> Tensor:
        self.asked.set()
        assert self.go_on.wait(20)
        return torch.stack([layer.flatten(1).sum(1) for layer in prefix.keys]).sum(0)


async def test_equal_prefixes_at_once_do_not_wait_for_each_other(
    context: lms.AsyncLMCacheContext, server: FakeLMCache
) -> None:
    """One stream's policy takes longer than any deadline; others edit and read the same prefix meanwhile."""
    kv = some_kv()
    server.put(PREFIX, kv)
    policy = Waiting(ratio=0.5, sinks=1, window=1, asked=threading.Event(), go_on=threading.Event())
    slow, quick = new_stream(context, server), new_stream(context, server)
    edit = asyncio.create_task(slow.modify_kv(policy))
    assert await asyncio.to_thread(policy.asked.wait, 10)
    try:
        await quick.modify_kv(lms.keep(KEPT))
        assert torch.equal(await context.retrieve(PREFIX), kv)  # type: ignore[arg-type]
        # Its own locks hold the prefix for the slow one.
        assert server.shared_memory is (server.locked[0] > 0)
        server.clear()
    finally:
        policy.go_on.set()
    await edit
    kept = torch.tensor(slow.edits[0].kept_indices)
    assert torch.equal(await stored(context, slow), drop_tokens(kv, PREFIX, kept, ROPE)[0])


async def test_locks_that_ran_out_meanwhile_make_the_edit_an_error(
    context: lms.AsyncLMCacheContext, server: FakeLMCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.put(PREFIX, some_kv())
    monkeypatch.setattr("lmcache_stream.cache.held.LATE_SECONDS", 0.0)
    stream = new_stream(context, server)
    with pytest.raises(lms.CacheTimeoutError, match="longer than LMCache keeps its read locks"):
        await stream.modify_kv(lms.keep(KEPT))
    assert stream.edits == ()


async def test_a_cancel_at_every_await_leaves_no_lock_and_the_stream_as_it_was(
    context: lms.AsyncLMCacheContext, server: FakeLMCache
) -> None:
    kv = some_kv()
    server.put(PREFIX, kv)
    for turn in range(1, 200):
        stream = new_stream(context, server)
        policy = KeyDiff(ratio=0.5, sinks=1, window=1)
        if not await cancelled_at(stream.modify_kv(policy), turn):
            break
        assert stream.edits == ()
        assert stream.tokens == tuple(PROMPT)
        async with asyncio.timeout(5):
            while server.locked != (0, 0) or context._transfers.holds._open:
                await asyncio.sleep(0.005)
        assert torch.equal(await context.retrieve(PREFIX), kv)  # type: ignore[arg-type]
    assert turn > 5
    assert stream.edits[0].tokens_after == 8


async def test_the_pool_is_not_held_by_an_error_that_somebody_keeps(
    context: lms.AsyncLMCacheContext, server: FakeLMCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.put(PREFIX, some_kv())
    seen: list[list[Tensor]] = []
    enter = holds.Holds._enter

    async def looked_at(self: holds.Holds, lease: object) -> tuple[holds.HeldChunks, bool]:
        held, is_own = await enter(self, lease)  # type: ignore[arg-type]
        assert held.chunks is not None
        seen.append(held.chunks)
        return held, is_own

    monkeypatch.setattr(holds.Holds, "_enter", looked_at)
    with pytest.raises(lms.InvalidRequestError):
        await new_stream(context, server).modify_kv(KeyDiff(budget=4, sinks=4, window=4))
    assert seen == [[]]


@pytest.mark.parametrize("is_restarted", [False, True], ids=["cleared", "restarted"])
async def test_a_reader_never_sees_what_another_found_before_the_cache_lost_it(
    context: lms.AsyncLMCacheContext, server: FakeLMCache, is_restarted: bool
) -> None:
    server.put(PREFIX, some_kv())
    policy = Waiting(ratio=0.5, sinks=1, window=1, asked=threading.Event(), go_on=threading.Event())
    edit = asyncio.create_task(new_stream(context, server).modify_kv(policy))
    await asyncio.to_thread(policy.asked.wait, 10)
    try:
        if is_restarted:
            await server.stop(killed=True)
            await server.start()
        else:
            server.clear()
        # Its locks keep the prefix in shared memory; of a pickle they do not.
        is_kept = server.shared_memory and not is_restarted
        assert bool(server.chunks) is is_kept
        if not is_kept:
            server.put(PREFIX, some_kv(5))
        if is_restarted:
            await until_registered_again(context, server)
        wanted = some_kv() if is_kept else some_kv(5)
        assert torch.equal(await context.retrieve(PREFIX), wanted)  # type: ignore[arg-type]
    finally:
        policy.go_on.set()
        await asyncio.wait({edit})
    # To a server that was restarted meanwhile it may say, in time, that its store got no answer.
    assert edit.exception() is None or is_restarted
    assert isinstance(edit.exception(), lms.CacheError | None)


async def test_a_store_gets_a_moment_however_little_time_is_left(
    context: lms.AsyncLMCacheContext, server: FakeLMCache
) -> None:
    server.put(PREFIX, some_kv())
    stream = new_stream(context, server)
    await stream.modify_kv(lms.keep(KEPT), timeout=0)
    assert len(stream.edits) == 1


async def test_a_silent_store_is_given_up_after_its_own_timeout(
    context: lms.AsyncLMCacheContext, server: FakeLMCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_stream.cache.lifecycle._CLOSE_GRACE", 0.1)
    server.put(PREFIX, some_kv())
    server.silent = {"prepare_store"}
    with pytest.raises(lms.CacheTimeoutError, match=r"a store at .* within 1 s"):
        async with asyncio.timeout(5):
            await new_stream(context, server).modify_kv(lms.keep(KEPT), timeout=30)
    server.silent = set()


async def test_closing_in_the_middle_of_an_edit_leaves_no_lock(
    context: lms.AsyncLMCacheContext, server: FakeLMCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_stream.cache.lifecycle._CLOSE_GRACE", 0.1)
    server.put(PREFIX, some_kv())
    policy = Waiting(ratio=0.5, sinks=1, window=1, asked=threading.Event(), go_on=threading.Event())
    stream = new_stream(context, server)
    edit = asyncio.create_task(stream.modify_kv(policy))
    await asyncio.to_thread(policy.asked.wait, 10)
    try:
        await context.aclose()
        assert server.locked == (0, 0)
        assert server.registered == {}
    finally:
        policy.go_on.set()
    with pytest.raises(lms.ClosedError):
        await edit
    assert stream.edits == ()


async def test_an_unanswered_end_of_a_retrieve_holds_an_edit_up_no_longer_than_its_timeout(
    context: lms.AsyncLMCacheContext, server: FakeLMCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmcache_stream.cache.lifecycle._CLOSE_GRACE", 0.1)
    server.put(PREFIX, some_kv())
    server.silent = {"commit_retrieve"}
    async with asyncio.timeout(5):
        await new_stream(context, server).modify_kv(lms.keep(KEPT))
        server.silent = set()
        await new_stream(context, server).modify_kv(lms.keep(KEPT))
    await context.aclose()
    server.read_locks.clear()


async def test_a_restart_in_the_middle_of_an_edit_ends_it(
    context: lms.AsyncLMCacheContext, server: FakeLMCache
) -> None:
    kv = some_kv()
    server.put(PREFIX, kv)
    policy = Waiting(ratio=0.5, sinks=1, window=1, asked=threading.Event(), go_on=threading.Event())
    stream = new_stream(context, server)
    edit = asyncio.create_task(stream.modify_kv(policy))
    await asyncio.to_thread(policy.asked.wait, 10)
    await server.stop()
    await server.start()
    policy.go_on.set()
    async with asyncio.timeout(8):
        await asyncio.wait({edit})
    if edit.exception() is None:
        kept = torch.tensor(stream.edits[0].kept_indices)
        assert torch.equal(await stored(context, stream), drop_tokens(kv, PREFIX, kept, ROPE)[0])
    else:
        assert isinstance(edit.exception(), lms.CacheTimeoutError | lms.CacheConnectError)
        assert stream.edits == ()


@pytest.mark.parametrize("isolation", ["fork", "shared"])
@pytest.mark.parametrize(
    "edit", [lms.keep(KEPT), KeyDiff(ratio=0.5, sinks=0, window=0)], ids=["keep", "policy"]
)
async def test_mla_is_refused_before_anything_is_reserved(
    server: FakeLMCache, edit: DropPolicy, isolation: str
) -> None:
    server.engine_use_mla = True
    geometry = dataclasses.replace(GEOMETRY, layout="mla", num_kv_heads=1)
    for end in range(4, 17, 4):
        server.put_chunk(PREFIX[:end], torch.randn(2, 4, 8))
    async with lms.connect(
        server.url, server.http_url, "model", geometry=geometry, rope=ROPE, timeouts=FAST
    ) as context:
        with pytest.raises(lms.LayoutError, match=r"MLA latent: .* not edited"):
            await new_stream(context, server, isolation=isolation).modify_kv(edit)
    assert len(server.chunks) == 4


async def test_an_edit_without_a_rotation_leaves_no_lock(server: FakeLMCache) -> None:
    server.put(PREFIX, some_kv())
    async with lms.connect(server.url, server.http_url, "model", geometry=GEOMETRY, timeouts=FAST) as context:
        with pytest.raises(lms.GeometryError, match="RoPE of 'model' is not known"):
            await new_stream(context, server).modify_kv(lms.keep(KEPT))
        assert server.locked == (0, 0)


async def test_functions_that_hang_hold_up_no_store(
    context: lms.AsyncLMCacheContext, server: FakeLMCache
) -> None:
    server.put(PREFIX, some_kv())
    go_on = threading.Event()

    def hang(kv: Tensor, tokens: list[int]) -> tuple[Tensor, list[int]]:
        go_on.wait(20)
        return kv, tokens

    hanging = [asyncio.create_task(new_stream(context, server).modify_kv(hang)) for _ in range(10)]
    try:
        async with asyncio.timeout(5):
            await asyncio.sleep(0.1)
            assert await context.store(some_kv(2), [1, *PREFIX[1:]])
            await new_stream(context, server).modify_kv(lms.keep(KEPT))
    finally:
        go_on.set()
        await asyncio.gather(*hanging)


async def test_memory_that_was_given_away_by_force_makes_the_edit_an_error(
    context: lms.AsyncLMCacheContext, server: FakeLMCache
) -> None:
    server.put(PREFIX, some_kv())
    policy = Waiting(ratio=0.5, sinks=1, window=1, asked=threading.Event(), go_on=threading.Event())
    stream = new_stream(context, server)
    edit = asyncio.create_task(stream.modify_kv(policy))
    await asyncio.to_thread(policy.asked.wait, 10)
    if not server.shared_memory:
        # What was pickled is a copy, which nobody can give away.
        policy.go_on.set()
        await edit
        assert len(stream.edits) == 1
        return
    # Another request's KV in the same slots.
    for chunk in list(server.chunks.values()):
        chunk.copy_(torch.randn(chunk.shape))
    policy.go_on.set()
    with pytest.raises(lms.CacheLostError, match="by force"):
        await edit
    assert stream.edits == ()


async def test_memory_that_was_given_away_while_it_was_copied_is_not_read(
    context: lms.AsyncLMCacheContext, server: FakeLMCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.put(PREFIX, some_kv())
    stream = new_stream(context, server)
    decode = Transfers.decode

    async def overwritten(transfers: Transfers, chunks: list[Tensor]) -> Tensor:
        kv = await decode(transfers, chunks)
        for chunk in server.chunks.values():
            chunk.copy_(torch.randn(chunk.shape))
        return kv

    def edit(kv: Tensor, tokens: list[int]) -> tuple[Tensor, list[int]]:
        seen.append(tokens)
        return kv, tokens

    monkeypatch.setattr(Transfers, "decode", overwritten)
    seen: list[list[int]] = []
    if not server.shared_memory:
        # What was pickled is a copy, which nobody can give away.
        assert await context.retrieve(PREFIX) is not None
        await stream.modify_kv(edit)
        assert seen == [PREFIX]
        return
    with pytest.raises(lms.CacheLostError, match="by force"):
        await context.retrieve(PREFIX)
    with pytest.raises(lms.CacheLostError, match="by force"):
        await stream.modify_kv(edit)
    # Without room for what is left, it is copied out to wait for some.
    server.capacity = len(server.chunks)
    with pytest.raises(lms.CacheLostError, match="by force"):
        await stream.modify_kv(lms.keep(KEPT), timeout=0.3)
    assert seen == []
    assert stream.edits == ()
