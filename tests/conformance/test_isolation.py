"""What a chunk is known by: its prefix, the model, the workers and the salt; and who may register."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from lmcache_stream.cache import messages

from .driver import Driver, Place, fresh_tokens, servers


@servers()
@pytest.mark.parametrize(
    "changes", [{"cache_salt": "mine"}, {"model_name": "another"}, {"world_size": 2, "worker_id": 0}]
)
async def test_other_names_are_other_chunks(driver: Driver, changes: dict[str, Any]) -> None:
    others = [secrets.randbits(62), secrets.randbits(62)]
    await driver.register(others[0], model_name="another")
    await driver.register(others[1], world_size=2)
    tokens = fresh_tokens(2)
    await driver.store(tokens, 1, 2)
    assert await driver.found(tokens, **changes) == 0
    await driver.store(tokens, 3, 4, **changes)
    assert await driver.values(tokens) == [1, 2]
    assert await driver.values(tokens, **changes) == [3, 4]
    for other in others:
        await driver.call(messages.UNREGISTER, other)


@servers()
async def test_a_chunk_is_known_by_all_tokens_before_it(driver: Driver) -> None:
    head, other, tail = fresh_tokens(1), fresh_tokens(1), fresh_tokens(1)
    await driver.store(head + tail, 1, 2)
    await driver.store(other + tail, 3, 4)
    assert await driver.values(head + tail) == [1, 2]
    assert await driver.values(other + tail) == [3, 4]
    assert await driver.found(tail) == 0
    assert await driver.found(head + head) == 1


@servers()
async def test_a_lookup_finds_what_every_worker_has_stored(place: Place) -> None:
    async with Driver(place, world_size=2) as driver:
        tokens = fresh_tokens(3)
        await driver.store(tokens, 1, 2, 3, worker_id=0)
        assert await driver.found(tokens) == 0
        await driver.store(tokens[:8], 4, 5, worker_id=1)
        found, hits = await driver.lookup(tokens)
        assert hits == 2
        # Of the third chunk, of which a shard is missing, none is locked.
        assert await place.locked() == (4, 0)
        for worker, values in ((0, [1.0, 2.0]), (1, [4.0, 5.0])):
            key = driver.key(tokens[:8], worker_id=worker, request_id=found.request_id)
            chunks = driver.read(await driver.prepare_retrieve(key))
            assert [float(chunk.flatten()[0]) for chunk in chunks] == values
            await driver.commit_retrieve(key)
        assert await place.locked() == (0, 0)


@servers()
async def test_the_locks_of_every_worker_or_of_one_are_freed(place: Place) -> None:
    async with Driver(place, world_size=2) as driver:
        tokens = fresh_tokens(1)
        for worker in (0, 1):
            await driver.store(tokens, 1, worker_id=worker)
        found, _ = await driver.lookup(tokens)
        await driver.free(driver.key(tokens, worker_id=1, request_id=found.request_id))
        assert await place.locked() == (1, 0)
        await driver.free(driver.key(tokens, worker_id=0, request_id=found.request_id))
        assert await place.locked() == (0, 0)
        found, _ = await driver.lookup(tokens)
        await driver.free(found)
        assert await place.locked() == (0, 0)


@servers()
async def test_a_lookup_can_name_its_worker(place: Place) -> None:
    async with Driver(place, world_size=2) as driver:
        tokens = fresh_tokens(1)
        await driver.store(tokens, 1, worker_id=1)
        assert await driver.found(tokens, worker_id=1) == 1
        assert await driver.found(tokens, worker_id=0) == 0


@servers()
async def test_the_name_that_a_client_registers_is_not_that_of_its_chunks(driver: Driver) -> None:
    alias, tokens = secrets.randbits(62), fresh_tokens(1)
    await driver.register(alias, model_name=f"{driver.model}##lmcs-1")
    driver.instance, engine = alias, driver.instance
    await driver.store(tokens, 5)
    driver.instance = engine
    assert await driver.values(tokens) == [5]
    assert await driver.found(tokens, model_name=f"{driver.model}##lmcs-1") == 0
    await driver.call(messages.UNREGISTER, alias)


@servers()
async def test_of_a_model_that_nobody_registered_nothing_is_found(driver: Driver) -> None:
    tokens = fresh_tokens(1)
    await driver.store(tokens, 1, model_name="nobody's")
    key, hits = await driver.lookup(tokens, model_name="nobody's", num_kv_readers=0)
    assert hits == 0
    await driver.register(late := secrets.randbits(62), model_name="nobody's")
    assert await driver.found(tokens, model_name="nobody's") == 1
    await driver.call(messages.UNREGISTER, late)
    key, hits = await driver.lookup(tokens, model_name="nobody's", num_kv_readers=0)
    assert hits == 0
    assert await driver.is_silent(messages.FREE_LOOKUP_LOCKS, key, 1)


@servers()
async def test_a_model_is_known_until_its_last_client_is_gone(driver: Driver) -> None:
    tokens = fresh_tokens(1)
    await driver.register(other := secrets.randbits(62))
    await driver.store(tokens, 1)
    await driver.call(messages.UNREGISTER, driver.instance)
    assert await driver.found(tokens) == 1
    await driver.call(messages.UNREGISTER, other)
    assert (await driver.lookup(tokens))[1] == 0


@servers()
async def test_registering_again_changes_nothing(driver: Driver, place: Place) -> None:
    again = await driver.register(driver.instance, model_name="renamed", dtype_str="no dtype", num_layers=9)
    assert again == driver.reply
    entry = (await place.status())["non_cuda_context_meta"][str(driver.instance)]
    assert entry["model_name"] == driver.model
    tokens = fresh_tokens(1)
    await driver.store(tokens, 1)
    assert await driver.values(tokens) == [1]


@servers()
async def test_a_client_that_is_gone_is_not_served(driver: Driver) -> None:
    await driver.call(messages.UNREGISTER, driver.instance)
    key = driver.key(fresh_tokens(1))
    assert await driver.is_silent(messages.PREPARE_STORE, key, driver.instance)
    await driver.register(driver.instance)
    await driver.call(messages.PREPARE_STORE, key, driver.instance)
