"""Stores: what is reserved, what is published, and what a commit's word is worth."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import secrets
from collections.abc import Awaitable, Callable

import pytest
import torch

from lmcache_stream.cache import messages
from lmcache_stream.cache.messages import Slot

from .driver import SIZE_BYTES, Chunks, Driver, Place, fresh_tokens, servers


@servers()
async def test_what_is_stored_is_read_back(driver: Driver, place: Place) -> None:
    tokens = fresh_tokens(3)
    assert await driver.store(tokens, 1, 2, 3) is True
    assert await driver.values(tokens) == [1, 2, 3]
    assert await driver.values(tokens[:9]) == [1, 2]
    assert await place.locked() == (0, 0)


@servers()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("use_mla", [False, True])
async def test_chunks_of_any_kind_keep_their_bytes(place: Place, dtype: torch.dtype, use_mla: bool) -> None:
    chunks = Chunks(num_layers=3, hidden=10, dtype=dtype, use_mla=use_mla)
    tokens = fresh_tokens(2)
    bits = torch.randint(0, 256, (2, chunks.length), dtype=torch.uint8)
    sent = [one.view(dtype).view(chunks.shape) for one in bits]
    async with Driver(place, chunks) as driver:
        key = driver.key(tokens)
        context = (await driver.prepare_store(key)).context
        for slot, chunk in zip(context.slots or [], sent, strict=False):
            driver.slot(slot).copy_(chunk)
        assert await driver.commit_store(key, b"" if place.shared_memory else pickle.dumps(sent))
        found, hits = await driver.lookup(tokens)
        assert hits == 2
        back = driver.read(await driver.prepare_retrieve(driver.key(tokens, request_id=found.request_id)))
        assert [(one.dtype, tuple(one.shape)) for one in back] == [(dtype, chunks.shape)] * 2
        assert [one.flatten().view(torch.uint8).tolist() for one in back] == bits.tolist()


def apart(slots: list[Slot]) -> bool:
    ordered = sorted(slots, key=lambda slot: slot.offset)
    return all(one.offset + one.length <= other.offset for one, other in itertools.pairwise(ordered))


@servers("shared-memory")
async def test_slots_lie_apart_and_tell_what_they_hold(place: Place) -> None:
    small, large = Chunks(hidden=8), Chunks(hidden=3000, dtype=torch.float32)
    slots: list[Slot] = []
    for chunks in (small, large, small):
        async with Driver(place, chunks) as driver:
            tokens = fresh_tokens(3)
            key = driver.key(tokens)
            context = (await driver.prepare_store(key)).context
            assert context.chunk_indices == [0, 1, 2]
            assert context.slots is not None
            for slot in context.slots:
                assert (slot.shape, slot.torch_dtype, slot.length) == (
                    chunks.shape,
                    chunks.dtype,
                    chunks.length,
                )
            slots += context.slots
            await driver.commit_store(key)
            found, _ = await driver.lookup(tokens)
            reply = await driver.prepare_retrieve(driver.key(tokens, request_id=found.request_id))
            assert reply.context.slots == context.slots
    assert apart(slots)
    assert all(slot.offset % 4096 == 0 for slot in slots)
    assert max(slot.offset + slot.length for slot in slots) <= SIZE_BYTES


@servers("shared-memory")
async def test_what_is_reserved_is_not_found_before_the_commit(driver: Driver, place: Place) -> None:
    tokens = fresh_tokens(2)
    key = driver.key(tokens)
    await driver.prepare_store(key)
    assert await place.locked() == (0, 2)
    assert await driver.found(tokens) == 0
    assert await driver.commit_store(key) is True
    assert await place.locked() == (0, 0)
    assert await driver.found(tokens) == 2


@servers("shared-memory")
async def test_only_chunks_that_are_not_there_get_slots(driver: Driver) -> None:
    tokens = fresh_tokens(4)
    await driver.store(tokens[:8], 1, 2)
    context = (await driver.prepare_store(driver.key(tokens))).context
    assert context.chunk_indices == [2, 3]
    assert len(context.slots or []) == 2


@servers("shared-memory")
async def test_chunk_indices_count_from_the_start_of_the_range(driver: Driver) -> None:
    tokens = fresh_tokens(4)
    await driver.store(tokens[:8], 1, 2)
    context = (await driver.prepare_store(driver.key(tokens, start=4))).context
    assert context.chunk_indices == [1, 2]


@servers()
async def test_what_is_there_is_not_overwritten(driver: Driver, place: Place) -> None:
    tokens = fresh_tokens(3)
    await driver.store(tokens[:8], 1, 2)
    # With slots for the third chunk, and on the pickle plane, it is true.
    assert await driver.store(tokens, 7, 8, 9) is True
    assert await driver.values(tokens) == [1, 2, 9]
    # Without any slot the commit is false, on the pickle plane it is true.
    assert await driver.store(tokens, 4, 5, 6) is not place.shared_memory
    assert await driver.values(tokens) == [1, 2, 9]


@servers("shared-memory")
async def test_a_commit_of_nothing_is_false(driver: Driver) -> None:
    tokens = fresh_tokens(1)
    assert await driver.commit_store(driver.key(tokens)) is False
    key = driver.key(tokens)
    await driver.prepare_store(key)
    assert await driver.commit_store(key) is True
    assert await driver.commit_store(key) is False


@servers("shared-memory")
async def test_an_equal_store_in_flight_gets_no_slots_and_publishes_the_first(
    driver: Driver, place: Place
) -> None:
    tokens = fresh_tokens(2)
    first, second = driver.key(tokens), driver.key(tokens)
    assert (await driver.prepare_store(first)).context.chunk_indices == [0, 1]
    context = (await driver.prepare_store(second)).context
    assert (context.slots, context.chunk_indices) == ([], [])
    assert await driver.commit_store(second) is True
    # Published, though the first has not written a byte.
    assert await driver.found(tokens) == 2
    assert await driver.commit_store(first) is False
    assert await place.locked() == (0, 0)


@servers("shared-memory")
async def test_a_store_of_another_range_in_flight_is_another(driver: Driver) -> None:
    tokens = fresh_tokens(3)
    await driver.prepare_store(driver.key(tokens, end=8))
    assert (await driver.prepare_store(driver.key(tokens))).context.chunk_indices == [2]
    assert await driver.commit_store(driver.key(tokens, start=4)) is False
    assert await driver.commit_store(driver.key(tokens)) is True
    # Its third chunk is there and the first two are still being written.
    assert await driver.found(tokens) == 0
    assert await driver.commit_store(driver.key(tokens, end=8)) is True
    assert await driver.found(tokens) == 3


@servers("shared-memory")
async def test_another_client_cannot_commit(driver: Driver) -> None:
    tokens = fresh_tokens(1)
    await driver.prepare_store(driver.key(tokens))
    other = secrets.randbits(62)
    await driver.register(other)
    assert (await driver.prepare_store(driver.key(tokens), other)).context.slots == []
    assert await driver.commit_store(driver.key(tokens), instance=other) is False
    assert await driver.found(tokens) == 0
    assert await driver.commit_store(driver.key(tokens)) is True
    await driver.call(messages.UNREGISTER, other)


@servers("shared-memory")
async def test_unregistering_publishes_what_was_reserved(driver: Driver, place: Place) -> None:
    tokens = fresh_tokens(2)
    other = secrets.randbits(62)
    await driver.register(other)
    await driver.prepare_store(driver.key(tokens), other)
    await driver.call(messages.UNREGISTER, other)
    assert await place.locked() == (0, 0)
    assert await driver.found(tokens) == 2


@servers()
async def test_a_request_id_keeps_the_hashes_of_its_first_tokens(driver: Driver) -> None:
    one, other = fresh_tokens(1), fresh_tokens(1)
    key = driver.key(one)
    for tokens in (one, other):
        again = driver.key(tokens, request_id=key.request_id)
        await driver.prepare_store(again)
        await driver.commit_store(
            again, b"" if driver.place.shared_memory else pickle.dumps(driver.chunks.filled(1))
        )
    assert (await driver.found(one), await driver.found(other)) == (1, 0)
    await driver.call(messages.END_SESSION, key.request_id)
    again = driver.key(other, request_id=key.request_id)
    await driver.prepare_store(again)
    await driver.commit_store(
        again, b"" if driver.place.shared_memory else pickle.dumps(driver.chunks.filled(1))
    )
    assert await driver.found(other) == 1


# The pickle plane; a server with shared memory takes pickles too.


@servers()
async def test_a_pickle_can_be_stored(driver: Driver, place: Place) -> None:
    tokens = fresh_tokens(2)
    assert await driver.commit_store(driver.key(tokens), pickle.dumps(driver.chunks.filled(3, 4))) is True
    assert await driver.values(tokens) == [3, 4]
    assert await place.locked() == (0, 0)


@servers()
async def test_a_pickle_of_what_is_there_is_committed_and_not_written(driver: Driver) -> None:
    tokens = fresh_tokens(2)
    await driver.store(tokens, 1, 2)
    assert await driver.commit_store(driver.key(tokens), pickle.dumps(driver.chunks.filled(3, 4))) is True
    assert await driver.values(tokens) == [1, 2]


@servers()
async def test_a_pickle_of_another_dtype_is_converted(driver: Driver) -> None:
    tokens = fresh_tokens(1)
    chunk = torch.full(driver.chunks.shape, 5.0, dtype=torch.float32)
    assert await driver.commit_store(driver.key(tokens), pickle.dumps([chunk])) is True
    assert await driver.values(tokens) == [5]


@servers()
async def test_a_pickle_with_too_many_chunks_is_taken(driver: Driver) -> None:
    tokens = fresh_tokens(1)
    assert await driver.commit_store(driver.key(tokens), pickle.dumps(driver.chunks.filled(1, 2))) is True
    assert await driver.values(tokens) == [1]


@servers()
@pytest.mark.parametrize("what", ["too few", "a wrong shape"])
async def test_a_pickle_that_does_not_fit_is_taken_in_part(driver: Driver, what: str) -> None:
    tokens = fresh_tokens(2)
    chunks = driver.chunks.filled(1, 2)
    data = chunks[:1] if what == "too few" else [chunks[0], chunks[1][:1]]
    assert await driver.commit_store(driver.key(tokens), pickle.dumps(data)) is False
    assert await driver.values(tokens) == [1]


@servers()
@pytest.mark.parametrize("data", [b"garbage", pickle.dumps(5), pickle.dumps({"a": 1})[:-3]])
async def test_garbage_instead_of_a_pickle_is_silence(driver: Driver, data: bytes) -> None:
    key = driver.key(fresh_tokens(1))
    assert await driver.is_silent(messages.COMMIT_STORE, key, driver.instance, data)


@servers("pickle")
async def test_an_empty_pickle_is_silence(driver: Driver) -> None:
    key = driver.key(fresh_tokens(1))
    assert await driver.is_silent(messages.COMMIT_STORE, key, driver.instance, b"")


# A full pool.


# Of which seven fit in the pool, and eight do not.
SEVENTHS = Chunks(hidden=SIZE_BYTES // 7 // Chunks(hidden=1).length - 512)


@servers("shared-memory")
async def test_a_store_that_does_not_fit_is_not_taken_in_part(place: Place) -> None:
    async with Driver(place, SEVENTHS) as driver:
        # Being written, so that no eviction makes room.
        held = fresh_tokens(5)
        assert len((await driver.prepare_store(driver.key(held))).context.slots or []) == 5
        tokens = fresh_tokens(3)
        context = (await driver.prepare_store(driver.key(tokens))).context
        assert (context.slots, context.chunk_indices) == ([], [])
        assert await driver.commit_store(driver.key(tokens)) is False
        assert await driver.found(tokens) == 0
        assert len((await driver.prepare_store(driver.key(tokens[:8]))).context.slots or []) == 2
        assert await place.locked() == (0, 7)
        await place.clear(force=True)


@servers("pickle")
async def test_a_pickle_that_does_not_fit_vanishes(place: Place) -> None:
    async with Driver(place, SEVENTHS) as driver:
        tokens = fresh_tokens(8)
        data = pickle.dumps([torch.zeros(driver.chunks.shape, dtype=torch.bfloat16)] * 8)
        assert await driver.commit_store(driver.key(tokens), data) is True
        assert await driver.found(tokens) == 0
        assert await place.locked() == (0, 0)


@servers("shared-memory")
async def test_room_that_was_given_back_is_whole_again(place: Place) -> None:
    async with Driver(place, SEVENTHS) as driver:
        for _ in range(3):
            key = driver.key(fresh_tokens(7))
            assert len((await driver.prepare_store(key)).context.slots or []) == 7
            await driver.commit_store(key)
            await place.clear()
            assert (await place.l1())["memory_used_bytes"] == 0


async def eventually(check: Callable[[], Awaitable[bool]], seconds: float = 6.0) -> None:
    for _ in range(round(seconds / 0.1)):
        if await check():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("it did not come about")


@servers("shared-memory")
@pytest.mark.parametrize("use", ["a hit", "the end of a session"])
async def test_the_least_useful_chunks_are_evicted_and_no_locked_ones(place: Place, use: str) -> None:
    async with Driver(place, SEVENTHS) as driver:
        recent, locked, last = fresh_tokens(2), fresh_tokens(1), fresh_tokens(2)
        await driver.store(locked, 1)
        found, _ = await driver.lookup(locked)
        await driver.store(recent, 2, 3)
        await driver.store(last, 4, 5)
        # Of use again, so that `last` is what was of use for longest, its end before its beginning.
        if use == "a hit":
            await driver.free((await driver.lookup(recent))[0])
        else:
            key = driver.key(recent)
            assert not (await driver.prepare_retrieve(key)).success
            await driver.call(messages.END_SESSION, key.request_id)
        assert (await place.l1())["total_object_count"] == 5
        # Six of seven is above the watermark.
        await driver.store(fresh_tokens(1), 6)

        async def evicted() -> bool:
            return bool((await place.l1())["total_object_count"] == 5)

        await eventually(evicted)
        assert await driver.found(last) == 1
        assert (await driver.found(recent), await driver.found(locked)) == (2, 1)
        assert (await place.locked())[0] == 1
        await driver.free(found)
