"""Read locks: who takes them, who gives them back, and who takes away another's."""

from __future__ import annotations

import pytest

from lmcache_stream.cache import messages

from .driver import CHUNK_SIZE, WAIT_PREFETCH_STATUS, Driver, Place, fresh_tokens, servers


@servers()
async def test_a_lookup_locks_what_it_finds(driver: Driver, place: Place) -> None:
    tokens = fresh_tokens(3)
    await driver.store(tokens[:8], 1, 2)
    key, hits = await driver.lookup(tokens)
    assert hits == 2
    assert await place.locked() == (2, 0)
    await driver.free(key)
    assert await place.locked() == (0, 0)


@servers()
async def test_only_the_leading_chunks_count(driver: Driver, place: Place) -> None:
    tokens = fresh_tokens(3)
    assert await driver.store(tokens, 1, 2, start=CHUNK_SIZE) in (True, False)
    assert await driver.found(tokens) == 0
    await driver.lookup(tokens)
    assert await place.locked() == (0, 0)


@servers()
async def test_tokens_beyond_the_last_whole_chunk_are_no_matter(driver: Driver) -> None:
    tokens = fresh_tokens(3)
    await driver.store(tokens[:8], 1, 2)
    assert await driver.found(tokens[:11]) == 2
    assert await driver.found(tokens[:11], end=9) == 2
    assert await driver.found(tokens[:7]) == 1
    assert await driver.found(tokens[:3]) == 0
    assert await driver.found([]) == 0
    # Nor is the beginning of the range to a lookup.
    assert (await driver.lookup(tokens[:8], start=4))[1] == 2


@servers()
@pytest.mark.parametrize("waits", [False, True])
async def test_an_answer_is_given_once(driver: Driver, waits: bool) -> None:
    tokens = fresh_tokens(1)
    await driver.store(tokens, 1)
    key = driver.key(tokens, worker_id=None)
    await driver.call(messages.LOOKUP, key, 1)
    if waits:
        assert await driver.call(WAIT_PREFETCH_STATUS, key.request_id, 1.0) == 1
    else:
        assert await driver.call(messages.QUERY_PREFETCH_STATUS, key.request_id) == 1
    assert await driver.call(messages.QUERY_PREFETCH_STATUS, key.request_id) == 0
    # What was found is known all the same.
    await driver.free(key)


@servers()
async def test_locks_are_given_back_without_an_answer(driver: Driver, place: Place) -> None:
    tokens = fresh_tokens(2)
    await driver.store(tokens, 1, 2)
    key = driver.key(tokens, worker_id=None)
    await driver.call(messages.LOOKUP, key, 1)
    assert await place.locked() == (2, 0)
    await driver.free(key)
    assert await place.locked() == (0, 0)
    assert await driver.call(messages.QUERY_PREFETCH_STATUS, key.request_id) == 0


@servers()
async def test_an_ended_session_leaves_its_locks(driver: Driver, place: Place) -> None:
    tokens = fresh_tokens(2)
    await driver.store(tokens, 1, 2)
    key, _ = await driver.lookup(tokens)
    await driver.call(messages.END_SESSION, key.request_id)
    assert await place.locked() == (2, 0)
    # Nobody knows any more what was found.
    await driver.free(key)
    assert await place.locked() == (2, 0)


@servers()
async def test_a_session_ended_before_the_answer_comes_back_with_it(driver: Driver, place: Place) -> None:
    tokens = fresh_tokens(2)
    await driver.store(tokens, 1, 2)
    key = driver.key(tokens, worker_id=None)
    await driver.call(messages.LOOKUP, key, 1)
    await driver.call(messages.END_SESSION, key.request_id)
    assert await driver.call(messages.QUERY_PREFETCH_STATUS, key.request_id) == 2
    await driver.free(key)
    assert await place.locked() == (0, 0)


@servers()
async def test_each_lookup_has_locks_of_its_own(driver: Driver, place: Place) -> None:
    tokens = fresh_tokens(1)
    await driver.store(tokens, 1)
    (one, _), (other, _) = await driver.lookup(tokens), await driver.lookup(tokens)
    await driver.free(one)
    assert await place.locked() == (1, 0)
    await driver.free(other)
    assert await place.locked() == (0, 0)


@servers()
async def test_freeing_twice_strips_another_reader(driver: Driver, place: Place) -> None:
    tokens = fresh_tokens(1)
    await driver.store(tokens, 1)
    (one, _), _ = await driver.lookup(tokens), await driver.lookup(tokens)
    await driver.free(one)
    await driver.free(one)
    assert await place.locked() == (0, 0)


@servers()
async def test_freeing_what_was_retrieved_strips_another_reader(driver: Driver, place: Place) -> None:
    tokens = fresh_tokens(1)
    await driver.store(tokens, 1)
    (one, _), _ = await driver.lookup(tokens), await driver.lookup(tokens)
    key = driver.key(tokens, request_id=one.request_id)
    await driver.prepare_retrieve(key)
    await driver.commit_retrieve(key)
    assert await place.locked() == (1, 0)
    await driver.free(one)
    assert await place.locked() == (0, 0)


@servers()
async def test_without_a_lookup_nothing_is_freed(driver: Driver, place: Place) -> None:
    tokens = fresh_tokens(1)
    await driver.store(tokens, 1)
    await driver.lookup(tokens)
    await driver.free(driver.key(tokens, worker_id=None))
    assert await place.locked() == (1, 0)


@servers()
async def test_the_part_behind_a_retrieve_is_freed(driver: Driver, place: Place) -> None:
    tokens = fresh_tokens(3)
    await driver.store(tokens, 1, 2, 3)
    found, _ = await driver.lookup(tokens)
    key = driver.key(tokens[:4], request_id=found.request_id)
    assert (await driver.prepare_retrieve(key)).success
    await driver.commit_retrieve(key)
    assert await place.locked() == (2, 0)
    await driver.free(driver.key(tokens, start=4, worker_id=None, request_id=found.request_id))
    assert await place.locked() == (0, 0)


@servers()
@pytest.mark.parametrize(
    ("start", "end", "left"), [(0, 4, 2), (4, 8, 2), (4, 12, 1), (8, 100, 2), (8, 8, 3), (12, 8, 3)]
)
async def test_a_range_is_freed(driver: Driver, place: Place, start: int, end: int, left: int) -> None:
    tokens = fresh_tokens(3)
    await driver.store(tokens, 1, 2, 3)
    found, _ = await driver.lookup(tokens)
    await driver.free(driver.key(tokens, start=start, end=end, worker_id=None, request_id=found.request_id))
    assert await place.locked() == (left, 0)


@servers()
async def test_chunks_that_were_not_found_are_not_freed(driver: Driver, place: Place) -> None:
    tokens = fresh_tokens(2)
    await driver.store(tokens[:4], 1)
    found, hits = await driver.lookup(tokens)
    assert hits == 1
    await driver.store(tokens, 1, 2)
    await driver.lookup(tokens)
    await driver.free(found)
    # The second chunk keeps its only lock.
    assert await place.locked() == (2, 0)
    await driver.free(found)
    assert await place.locked() == (1, 0)


@servers()
async def test_a_lock_for_each_reader(driver: Driver, place: Place) -> None:
    tokens = fresh_tokens(1)
    await driver.store(tokens, 1)
    found, _ = await driver.lookup(tokens, num_kv_readers=3)
    for _ in range(3):
        assert await place.locked() == (1, 0)
        key = driver.key(tokens, request_id=found.request_id)
        await driver.prepare_retrieve(key)
        await driver.commit_retrieve(key)
    assert await place.locked() == (0, 0)
    again, _ = await driver.lookup(tokens, num_kv_readers=3)
    await driver.free(again)
    assert await place.locked() == (0, 0)


@servers()
async def test_a_retrieve_needs_locks(driver: Driver) -> None:
    tokens = fresh_tokens(1)
    await driver.store(tokens, 1)
    assert not (await driver.prepare_retrieve(driver.key(tokens))).success
    # Whose they are is no matter.
    await driver.lookup(tokens)
    assert (await driver.prepare_retrieve(driver.key(tokens))).success


@servers()
async def test_a_failed_retrieve_has_given_the_locks_back(driver: Driver, place: Place) -> None:
    tokens = fresh_tokens(3)
    await driver.store(tokens[:8], 1, 2)
    found, _ = await driver.lookup(tokens)
    reply = await driver.prepare_retrieve(driver.key(tokens, request_id=found.request_id))
    assert not reply.success
    assert await place.locked() == (0, 0)


@servers()
async def test_a_retrieve_of_nothing_fails(driver: Driver) -> None:
    assert not (await driver.prepare_retrieve(driver.key(fresh_tokens(2), start=4, end=4))).success


@servers("shared-memory")
async def test_slots_are_locked_until_the_retrieve_is_committed(driver: Driver, place: Place) -> None:
    tokens = fresh_tokens(2)
    await driver.store(tokens, 1, 2)
    found, _ = await driver.lookup(tokens)
    key = driver.key(tokens, request_id=found.request_id)
    await driver.prepare_retrieve(key)
    await driver.call(messages.END_SESSION, key.request_id)
    assert await place.locked() == (2, 0)
    # The request id is no part of what is committed, and a second time there is nothing to commit.
    for _ in range(2):
        assert await driver.commit_retrieve(driver.key(tokens)) is True
        assert await place.locked() == (0, 0)


@servers("shared-memory")
async def test_two_equal_retrieves_are_one_to_the_server(driver: Driver, place: Place) -> None:
    tokens = fresh_tokens(2)
    await driver.store(tokens, 1, 2)
    for _ in range(2):
        found, _ = await driver.lookup(tokens)
        assert (await driver.prepare_retrieve(driver.key(tokens, request_id=found.request_id))).success
    for _ in range(2):
        await driver.commit_retrieve(driver.key(tokens))
    assert await place.locked() == (2, 0)


@servers("pickle")
async def test_a_pickle_is_a_copy_and_locks_nothing(driver: Driver, place: Place) -> None:
    tokens = fresh_tokens(2)
    await driver.store(tokens, 1, 2)
    found, _ = await driver.lookup(tokens)
    key = driver.key(tokens, request_id=found.request_id)
    assert (await driver.prepare_retrieve(key)).success
    assert await place.locked() == (0, 0)
    assert await driver.commit_retrieve(key) is True


@servers("shared-memory")
async def test_unregistering_gives_back_the_locks_of_retrieves(driver: Driver, place: Place) -> None:
    tokens = fresh_tokens(2)
    await driver.store(tokens, 1, 2)
    found, _ = await driver.lookup(tokens)
    await driver.prepare_retrieve(driver.key(tokens, request_id=found.request_id))
    await driver.call(messages.UNREGISTER, driver.instance)
    assert await place.locked() == (0, 0)


@servers()
@pytest.mark.parametrize("asks", [True, False])
async def test_a_request_id_that_looks_up_twice_knows_the_second(
    driver: Driver, place: Place, asks: bool
) -> None:
    one, other = fresh_tokens(1), fresh_tokens(2)
    await driver.store(one, 1)
    await driver.store(other, 2, 3)
    found, _ = await driver.lookup(one)
    again = driver.key(other, worker_id=None, request_id=found.request_id)
    await driver.call(messages.LOOKUP, again, 1)
    if asks:
        assert await driver.call(messages.QUERY_PREFETCH_STATUS, found.request_id) == 2
    assert await place.locked() == (3, 0)
    await driver.free(again)
    assert await place.locked() == (1, 0)
