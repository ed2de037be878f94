"""The frames of every operation, decoded here with plain msgspec, and replies that cannot be right."""

from __future__ import annotations

import contextlib
import mmap
import re
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_stream.cache import messages
from lmcache_stream.cache.messages import (
    ChunkMismatchError,
    Encoded,
    Operation,
    PrefixKey,
    PrepareRetrieveReply,
    PrepareStoreReply,
    Registration,
    RegistrationReply,
    Slot,
    decode_result,
    decode_uid,
    encode_request,
)
from lmcache_stream.errors import CacheError, GeometryError

encode, decode = msgspec.msgpack.encode, msgspec.msgpack.decode

KEY = PrefixKey(
    model_name="org/model",
    world_size=1,
    worker_id=0,
    token_ids=[5, 70_000, 2**31 - 1],
    start=32,
    end=64,
    request_id="r-1",
    cache_salt="sälz",
)
KEY_ON_THE_WIRE = {
    "model_name": "org/model",
    "world_size": 1,
    "worker_id": 0,
    "token_ids": [5, 70_000, 2**31 - 1],
    "start": 32,
    "end": 64,
    "request_id": "r-1",
    "cache_salt": "sälz",
    "request_configs": None,
    "num_kv_readers": 1,
}
LOOKUP_KEY = msgspec.structs.replace(KEY, worker_id=None)
REGISTRATION = Registration(
    instance_id=2**63 - 1,
    model_name="org/model##lmcs-1",
    world_size=1,
    block_size=32,
    num_layers=30,
    hidden_dim_size=384,
    dtype_str="bfloat16",
    use_mla=True,
    num_physical_slots=256,
)
REGISTRATION_ON_THE_WIRE = {
    "instance_id": 2**63 - 1,
    "model_name": "org/model##lmcs-1",
    "world_size": 1,
    "block_size": 32,
    "num_layers": 30,
    "hidden_dim_size": 384,
    "dtype_str": "bfloat16",
    "use_mla": True,
    "num_physical_slots": 256,
}
SLOT = {"offset": 4096, "length": 64, "shape": [2, 8], "dtype": "float32"}

# Name, number, payloads, the same on the wire: the table of protocol.md.
REQUESTS: list[tuple[str, int, list[Any], list[Any]]] = [
    ("lookup", 8, [LOOKUP_KEY, 1], [{**KEY_ON_THE_WIRE, "worker_id": None}, 1]),
    ("query_prefetch_status", 9, ["r-1"], ["r-1"]),
    ("free_lookup_locks", 12, [LOOKUP_KEY, 1], [{**KEY_ON_THE_WIRE, "worker_id": None}, 1]),
    ("end_session", 13, ["r-1"], ["r-1"]),
    ("register_kv_cache_engine_driven_context", 14, [REGISTRATION], [REGISTRATION_ON_THE_WIRE]),
    ("unregister_kv_cache_engine_driven_context", 15, [7], [7]),
    ("prepare_store", 16, [KEY, 7], [KEY_ON_THE_WIRE, 7]),
    ("commit_store", 17, [KEY, 7, b""], [KEY_ON_THE_WIRE, 7, b""]),
    ("commit_store", 17, [KEY, 7, b"pickle"], [KEY_ON_THE_WIRE, 7, b"pickle"]),
    ("prepare_retrieve", 18, [KEY, 7], [KEY_ON_THE_WIRE, 7]),
    ("commit_retrieve", 19, [KEY, 7], [KEY_ON_THE_WIRE, 7]),
    ("get_chunk_size", 21, [], []),
]
# Operation, result on the wire, what it means.
REPLIES: list[tuple[str, Any, Any]] = [
    ("query_prefetch_status", 0, 0),
    ("query_prefetch_status", 93, 93),
    ("register_kv_cache_engine_driven_context", {"shm_name": "", "pool_size": 0}, RegistrationReply("", 0)),
    (
        "register_kv_cache_engine_driven_context",
        {"shm_name": "lmc", "pool_size": 2**31, "of_a_later_version": [1]},
        RegistrationReply("lmc", 2**31),
    ),
    ("prepare_store", {"context": {}}, PrepareStoreReply()),
    (
        "prepare_store",
        {"context": {"slots": [SLOT], "chunk_indices": [3]}},
        PrepareStoreReply(messages.StoreContext([Slot(4096, 64, (2, 8), "float32")], [3])),
    ),
    (
        "prepare_store",
        {"context": {"slots": [], "chunk_indices": []}},
        PrepareStoreReply(messages.StoreContext([], [])),
    ),
    ("commit_store", True, True),
    ("commit_store", False, False),
    ("prepare_retrieve", {"success": False, "data": b"", "context": {}}, PrepareRetrieveReply(False)),
    (
        "prepare_retrieve",
        {"success": True, "data": b"pickle", "context": {}},
        PrepareRetrieveReply(True, memoryview(b"pickle")),
    ),
    (
        "prepare_retrieve",
        {"success": True, "data": b"", "context": {"slots": [SLOT]}},
        PrepareRetrieveReply(True, context=messages.RetrieveContext([Slot(4096, 64, (2, 8), "float32")])),
    ),
    ("commit_retrieve", True, True),
    ("get_chunk_size", 256, 256),
]
NULL = ["lookup", "free_lookup_locks", "end_session", "unregister_kv_cache_engine_driven_context"]
OPERATIONS: dict[str, Operation[Any]] = {
    operation.name: operation for operation in vars(messages).values() if isinstance(operation, Operation)
}


def test_every_operation_is_in_the_tables() -> None:
    assert set(OPERATIONS) == {name for name, *_ in REQUESTS}
    assert set(OPERATIONS) == {name for name, *_ in REPLIES} | set(NULL)


@pytest.mark.parametrize(("name", "number", "payloads", "wire"), REQUESTS)
def test_a_request_is_uid_number_and_a_frame_for_each_payload(
    name: str, number: int, payloads: list[Any], wire: list[Any]
) -> None:
    frames = encode_request(2**40, OPERATIONS[name], payloads)
    assert [type(frame) for frame in frames] == [bytes] * (2 + len(payloads))
    assert [decode(frame) for frame in frames] == [2**40, number, *wire]


def test_bytes_travel_as_binary_and_text_as_text() -> None:
    *_, data = encode_request(1, messages.COMMIT_STORE, [KEY, 7, b"abc"])
    assert data == b"\xc4\x03abc"
    *_, text = encode_request(1, messages.END_SESSION, ["abc"])
    assert text == b"\xa3abc"


@pytest.mark.parametrize("payload", [b"", b"pickle", "text", 7, KEY])
def test_a_payload_that_was_encoded_before_is_the_same_frame(payload: Any) -> None:
    encoded = encode_request(1, messages.COMMIT_STORE, [KEY, Encoded.of(payload)])
    assert encoded == encode_request(1, messages.COMMIT_STORE, [KEY, payload])


def test_more_than_a_message_can_carry_says_what_to_do() -> None:
    # Never touched, and so no memory.
    large = memoryview(mmap.mmap(-1, 2**32))
    with pytest.raises(CacheError, match=r"pickle plane .* --shm-name"):
        Encoded.of(large)


@pytest.mark.parametrize("frame_type", [bytes, memoryview])
@pytest.mark.parametrize(("name", "wire", "meaning"), REPLIES)
def test_a_reply_means_what_the_server_sent(name: str, wire: Any, meaning: Any, frame_type: Any) -> None:
    operation = OPERATIONS[name]
    frames = [frame_type(encode(part)) for part in (5, operation.number, wire)]
    assert decode_uid(frames) == 5
    found = decode_result(operation, frames)
    assert found == meaning
    assert type(found) is type(meaning)


@pytest.mark.parametrize("name", [*NULL, "query_prefetch_status"])
@pytest.mark.parametrize("result", [[], [b"\xc0"]], ids=["no frame", "nil"])
def test_a_null_result_is_none(name: str, result: list[bytes]) -> None:
    operation = OPERATIONS[name]
    assert decode_result(operation, [encode(5), encode(operation.number), *result]) is None


@pytest.mark.parametrize("name", sorted({name for name, *_ in REPLIES} - {"query_prefetch_status"}))
@pytest.mark.parametrize("result", [[], [b"\xc0"]], ids=["no frame", "nil"])
def test_where_a_result_is_due_null_is_an_error(name: str, result: list[bytes]) -> None:
    operation = OPERATIONS[name]
    with pytest.raises(CacheError, match=name):
        decode_result(operation, [encode(5), encode(operation.number), *result])


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("get_chunk_size", encode("256")),
        ("get_chunk_size", encode(256.0)),
        ("get_chunk_size", encode(True)),
        ("get_chunk_size", b""),
        ("get_chunk_size", b"\xc1"),
        ("get_chunk_size", encode(1) + encode(2)),
        ("query_prefetch_status", encode(-1)),
        ("query_prefetch_status", encode([1])),
        ("commit_store", encode(1)),
        ("commit_retrieve", encode("true")),
        ("prepare_retrieve", encode({"data": b"", "context": {}})),
        ("prepare_retrieve", encode({"success": True, "data": "text"})),
        ("prepare_retrieve", encode({"success": True, "context": {"slots": [{"offset": 0}]}})),
        ("prepare_store", encode({"context": {"slots": [{**SLOT, "offset": "0"}], "chunk_indices": [0]}})),
        ("prepare_store", encode({"context": {"slots": [{**SLOT, "shape": [1.5]}]}})),
        ("prepare_store", encode({"context": {"slots": [{**SLOT, "dtype": None}]}})),
        ("prepare_store", encode({"context": {"chunk_indices": ["0"]}})),
        ("prepare_store", encode({"context": []})),
        # A text that is no UTF-8, and lists without an end to their depth.
        ("register_kv_cache_engine_driven_context", b"\x81\xa8shm_name\xa2\xff\xfe"),
        ("prepare_store", b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"),
    ],
)
def test_a_result_of_another_type_is_an_error_that_names_the_operation(name: str, result: bytes) -> None:
    operation = OPERATIONS[name]
    with pytest.raises(CacheError, match=f"answered {name} with what"):
        decode_result(operation, [encode(5), encode(operation.number), result])


@given(name=st.sampled_from(sorted(OPERATIONS)), result=st.binary(max_size=60))
def test_no_bytes_are_a_crash(name: str, result: bytes) -> None:
    operation = OPERATIONS[name]
    decode_uid([result])
    with contextlib.suppress(CacheError):
        decode_result(operation, [encode(5), encode(operation.number), result])


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [b"garbage"],
        [encode("5")],
        [encode(5.0)],
        [encode(None)],
        [encode(True)],
        [encode({"uid": 5})],
        [encode(5) + b"x"],
        [b"\x91" * 100_000],
    ],
)
def test_a_message_without_a_uid_answers_nothing(frames: list[bytes]) -> None:
    assert decode_uid(frames) is None


def slot(**changes: Any) -> Slot:
    fields: dict[str, Any] = {"offset": 64, "length": 64, "shape": (2, 8), "dtype": "float32"}
    return Slot(**{**fields, **changes})


@pytest.mark.parametrize(
    "good",
    [
        slot(),
        slot(offset=0),
        slot(offset=128 - 64),
        slot(length=60, shape=(3, 5)),
        slot(dtype="bfloat16", length=32),
        slot(dtype="bfloat16", offset=2, length=32),
        # Slots are rounded up to the allocator's step.
        slot(shape=(2, 7)),
        slot(shape=(1,), length=4),
    ],
    ids=repr,
)
def test_a_slot_within_the_pool_passes(good: Slot) -> None:
    good.check(128)


@pytest.mark.parametrize(
    "bad",
    [
        slot(offset=-1),
        slot(offset=-64),
        slot(offset=65),
        slot(offset=128),
        slot(offset=2**63 - 1),
        slot(length=0),
        slot(length=-64),
        slot(length=63),
        slot(length=65),
        slot(length=2**63 - 1),
        slot(shape=(2, 9)),
        slot(shape=(2**32, 2**32)),
        slot(shape=()),
        slot(shape=(0, 8)),
        slot(shape=(2, 0)),
        slot(shape=(-2, -8)),
        slot(shape=(-2, 8)),
        slot(dtype="float64"),
        slot(dtype="float33"),
        slot(dtype=""),
        slot(dtype="torch.float32"),
        slot(dtype="Tensor"),
        slot(dtype="__name__"),
        # torch cannot view it there.
        slot(offset=62),
    ],
    ids=repr,
)
def test_a_slot_that_does_not_fit_its_pool_or_its_shape_is_refused(bad: Slot) -> None:
    with pytest.raises(CacheError):
        bad.check(128)


@given(
    offset=st.integers(-300, 300),
    length=st.integers(-300, 300),
    shape=st.lists(st.integers(-2, 6), max_size=4).map(tuple),
    dtype=st.sampled_from(["float32", "bfloat16", "float64", "uint8"]),
)
def test_what_passes_can_be_viewed_in_the_pool(
    offset: int, length: int, shape: tuple[int, ...], dtype: str
) -> None:
    pool = torch.zeros(256, dtype=torch.uint8)
    tried = Slot(offset, length, shape, dtype)
    try:
        tried.check(256)
    except CacheError:
        return
    view = pool[offset : offset + length]
    assert view.numel() == length
    elements = view[: length // tried.torch_dtype.itemsize * tried.torch_dtype.itemsize]
    wanted = torch.Size(shape).numel()
    assert elements.view(tried.torch_dtype)[:wanted].view(shape).numel() == wanted > 0


def test_a_mismatch_says_both_sides_and_is_the_callers_to_mend() -> None:
    error = ChunkMismatchError(torch.float16, (2, 3), torch.float32, (2, 4))
    assert isinstance(error, GeometryError)
    assert (error.dtype, error.shape) == (torch.float16, (2, 3))
    assert re.search(r"torch.float16\[2, 3\].*torch.float32\[2, 4\].*model_config=", str(error))
