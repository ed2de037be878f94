"""Frames and results of every operation, and the silence that answers what is wrong."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from lmcache_stream.cache import messages
from lmcache_stream.cache.messages import Operation

from .driver import (
    CHUNK_SIZE,
    CLEAR,
    GET_EXPERIMENTAL,
    NOOP,
    PING,
    SIZE_BYTES,
    WAIT_PREFETCH_STATUS,
    Driver,
    Place,
    fresh_tokens,
    servers,
)

encode = msgspec.msgpack.encode


@pytest.fixture
async def socket(place: Place) -> AsyncIterator[zmq.asyncio.Socket]:
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(place.url)
    yield socket
    socket.close(linger=0)
    context.term()


async def exchange(socket: zmq.asyncio.Socket, *frames: bytes) -> list[bytes]:
    await socket.send_multipart(frames)
    return await asyncio.wait_for(socket.recv_multipart(), 10)


@servers("shared-memory")
@pytest.mark.parametrize("identifier", [21, "get_chunk_size"])
async def test_an_operation_goes_by_number_or_name_and_is_echoed(
    socket: zmq.asyncio.Socket, identifier: int | str
) -> None:
    reply = await exchange(socket, encode(7), encode(identifier))
    assert reply == [encode(7), encode(identifier), encode(CHUNK_SIZE)]


@servers("shared-memory")
async def test_a_null_result_is_no_frame(socket: zmq.asyncio.Socket) -> None:
    reply = await exchange(socket, encode(8), encode("end_session"), encode("nobody"))
    assert reply == [encode(8), encode("end_session")]


@servers("shared-memory")
async def test_the_uid_comes_back_as_it_was(socket: zmq.asyncio.Socket) -> None:
    reply = await exchange(socket, b"\xd3" + bytes(7) + b"\x09", encode("get_chunk_size"))
    assert reply[0] == b"\xd3" + bytes(7) + b"\x09"


@servers()
async def test_the_simple_operations(driver: Driver) -> None:
    assert await driver.call(messages.GET_CHUNK_SIZE) == CHUNK_SIZE
    assert await driver.call(PING, driver.instance) is True
    assert await driver.call(PING, 12345) is True
    assert await driver.call(PING, None) is True
    assert await driver.call(NOOP) == "OK"
    assert all(isinstance(name, str) for name in await driver.call(GET_EXPERIMENTAL))
    await driver.call(CLEAR, False)
    await driver.call(messages.END_SESSION, "never begun")
    await driver.call(messages.UNREGISTER, 12345)
    assert await driver.call(messages.QUERY_PREFETCH_STATUS, "never begun") == 0
    assert await driver.call(WAIT_PREFETCH_STATUS, "never begun", 0.1) == 0


@servers("shared-memory")
async def test_a_registration_is_answered_with_the_pool(driver: Driver) -> None:
    assert driver.reply.shm_name.startswith("lmcache_l1_pool_")
    assert driver.reply.pool_size == SIZE_BYTES


@servers("pickle")
async def test_a_registration_is_answered_with_no_pool(driver: Driver) -> None:
    assert (driver.reply.shm_name, driver.reply.pool_size) == ("", 0)


@servers("pickle")
async def test_the_pickle_plane_has_no_slots(driver: Driver, socket: zmq.asyncio.Socket) -> None:
    key = encode(driver.key(fresh_tokens(1)))
    reply = await exchange(socket, encode(1), encode("prepare_store"), key, encode(driver.instance))
    assert msgspec.msgpack.decode(reply[2]) == {"context": {}}


@servers()
async def test_a_failed_retrieve_says_so_and_no_more(driver: Driver, socket: zmq.asyncio.Socket) -> None:
    key = encode(driver.key(fresh_tokens(1)))
    reply = await exchange(socket, encode(1), encode("prepare_retrieve"), key, encode(driver.instance))
    assert msgspec.msgpack.decode(reply[2]) == {"success": False, "data": b"", "context": {}}


@servers("shared-memory")
async def test_clients_may_leave_out_what_older_ones_did_not_have(
    driver: Driver, socket: zmq.asyncio.Socket
) -> None:
    registration = msgspec.to_builtins(driver.registration(secrets.randbits(62)))
    del registration["num_physical_slots"]
    name = encode("register_kv_cache_engine_driven_context")
    reply = await exchange(socket, encode(1), name, encode(registration))
    assert msgspec.msgpack.decode(reply[2])["pool_size"] == SIZE_BYTES
    key = msgspec.to_builtins(driver.key(fresh_tokens(1)))
    for field in ("cache_salt", "request_configs", "num_kv_readers"):
        del key[field]
    instance = encode(registration["instance_id"])
    reply = await exchange(socket, encode(2), encode("prepare_store"), encode(key), instance)
    slots = msgspec.msgpack.decode(reply[2])["context"]["slots"]
    assert slots[0]["shape"] == list(driver.chunks.shape)
    await exchange(socket, encode(3), encode("commit_store"), encode(key), instance, encode(b""))
    await exchange(socket, encode(4), encode("unregister_kv_cache_engine_driven_context"), instance)


@servers("shared-memory")
async def test_what_a_client_adds_to_its_key_is_no_matter(driver: Driver, socket: zmq.asyncio.Socket) -> None:
    key = msgspec.to_builtins(driver.key(fresh_tokens(1), worker_id=None))
    key |= {"request_configs": {"lmcache.tag": 1}, "of_tomorrow": [1, 2]}
    assert await exchange(socket, encode(1), encode("lookup"), encode(key), encode(1)) == [
        encode(1),
        encode("lookup"),
    ]


def wrong_requests(driver: Driver) -> dict[str, tuple[Operation[Any], tuple[Any, ...]]]:
    """Requests that the server cannot fulfil, by what is wrong with them."""
    tokens = fresh_tokens(2)
    key, here = driver.key, driver.instance
    unknown: Operation[None] = Operation("no_such_operation", 999, None)
    wrong: dict[str, tuple[Operation[Any], tuple[Any, ...]]] = {
        "an unknown operation": (unknown, ()),
        "a payload too few": (messages.LOOKUP, (key(tokens),)),
        "a payload too many": (messages.GET_CHUNK_SIZE, (1,)),
        "a key that is none": (messages.LOOKUP, ([1, 2], 1)),
        "a key without tokens": (messages.LOOKUP, ({"model_name": "m"}, 1)),
        "a request id that is a number": (messages.QUERY_PREFETCH_STATUS, (5,)),
        "no readers": (messages.LOOKUP, (key(tokens, worker_id=None, num_kv_readers=0), 1)),
        "a token beyond 32 bits": (messages.LOOKUP, (key([2**32] * 4, worker_id=None), 1)),
        "a negative token": (messages.LOOKUP, (key([-1] * 4, worker_id=None), 1)),
        "a dtype that torch has not": (messages.REGISTER, (driver.registration(77, dtype_str="floaty"),)),
        "a dtype that is none": (messages.REGISTER, (driver.registration(78, dtype_str="nn"),)),
        "chunks without tokens": (messages.REGISTER, (driver.registration(79, num_physical_slots=0),)),
        "a registration that is none": (messages.REGISTER, ({"instance_id": 3},)),
    }
    for salt in ("a@b", "a/b", "a\\b", "a\0b", "x" * 129):
        wrong[f"the salt {salt[:8]!r}"] = (messages.LOOKUP, (key(tokens, worker_id=None, cache_salt=salt), 1))
    for operation in messages.TRANSFERS:
        data = (b"",) if operation is messages.COMMIT_STORE else ()
        wrong[f"{operation.name} of nobody"] = (operation, (key(tokens), 12345, *data))
    for operation in (messages.PREPARE_STORE, messages.PREPARE_RETRIEVE):
        for what, wrong_key in {
            "without a worker": key(tokens, worker_id=None),
            "beyond its tokens": key(tokens, end=12),
            "of half a chunk": key(tokens, end=6),
            "from half a chunk": key(tokens, start=2),
            "of a model with an @": key(tokens, model_name="a@b"),
            "of a token beyond 32 bits": key([2**32] * 4),
        }.items():
            wrong[f"{operation.name} {what}"] = (operation, (wrong_key, here))
    return wrong


@servers()
async def test_an_error_is_silence_and_leaves_nothing(driver: Driver, place: Place) -> None:
    before = (await place.status())["registered_non_cuda_instance_ids"]
    wrong = wrong_requests(driver)
    outcomes = await asyncio.gather(
        *(driver.is_silent(operation, *payloads) for operation, payloads in wrong.values())
    )
    answered = [what for what, silent in zip(wrong, outcomes, strict=True) if not silent]
    assert answered == ([] if place.shared_memory else unreserved(wrong))
    assert await place.locked() == (0, 0)
    assert (await place.status())["registered_non_cuda_instance_ids"] == before


def unreserved(wrong: dict[str, Any]) -> list[str]:
    """Name the requests that the pickle plane does not look at."""
    return [what for what in wrong if what.startswith("prepare_store ") and "nobody" not in what]


@servers()
async def test_an_ended_session_of_an_unregistered_model_is_silent(driver: Driver) -> None:
    key = driver.key(fresh_tokens(1), model_name="nobody's")
    assert not (await driver.prepare_retrieve(key)).success
    assert await driver.is_silent(messages.END_SESSION, key.request_id)
    # It is ended all the same.
    await driver.call(messages.END_SESSION, key.request_id)
