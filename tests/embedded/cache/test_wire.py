from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_stream.cache import messages
from lmcache_stream.cache.messages import (
    Encoded,
    Operation,
    PrepareRetrieveReply,
    PrepareStoreReply,
    Registration,
    RegistrationReply,
    Slot,
)
from lmcache_stream.embedded.cache.refusal import RefusedError
from lmcache_stream.embedded.cache.wire import (
    GET_EXPERIMENTAL,
    PING,
    WAIT_PREFETCH_STATUS,
    OfferedSlots,
    OfferedStore,
    decode_request,
    encode_reply,
)

encode = msgspec.msgpack.encode

KEY: dict[str, Any] = {
    "model_name": "m",
    "world_size": 1,
    "worker_id": None,
    "token_ids": [1, 2],
    "start": 0,
    "end": 2,
    "request_id": "r",
}
DEEP = msgspec.Raw(b"\x91" * 100_000 + b"\xc0")


@pytest.mark.parametrize(
    ("operation", "payloads"),
    [
        (messages.LOOKUP, [KEY, 1]),
        (WAIT_PREFETCH_STATUS, ["r", 1]),
        (PING, [None]),
        (GET_EXPERIMENTAL, []),
    ],
)
def test_an_operation_by_number_and_by_name(operation: Operation[Any], payloads: list[Any]) -> None:
    for identifier in (operation.number, operation.name):
        request = decode_request([encode(identifier), *(encode(payload) for payload in payloads)])
        assert request.operation is operation
        assert len(request.payloads) == len(payloads)


def test_what_a_key_may_leave_out() -> None:
    key, _ = decode_request([encode(8), encode(KEY), encode(1)]).payloads
    assert (key.cache_salt, key.request_configs, key.num_kv_readers) == ("", None, 0)
    assert key.token_ids == (1, 2)


def test_what_a_registration_may_leave_out() -> None:
    body = {
        "instance_id": 1,
        "model_name": "m",
        "world_size": 1,
        "block_size": 1,
        "num_layers": 1,
        "hidden_dim_size": 1,
        "dtype_str": "float16",
        "use_mla": False,
    }
    for more in ({}, {"num_physical_slots": None}):
        (found,) = decode_request([encode(14), encode({**body, **more})]).payloads
        assert isinstance(found, Registration)
        assert found.num_physical_slots is None


@pytest.mark.parametrize("value", [5, 5.0, "5"])
def test_numbers_in_other_clothes(value: Any) -> None:
    assert decode_request([encode(15), encode(value)]).payloads == (5,)


def test_bytes_are_not_copied() -> None:
    frame = encode(b"x" * 100)
    *_, data = decode_request([encode(17), encode(KEY), encode(1), frame]).payloads
    assert isinstance(data, memoryview)
    assert data.obj is frame


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"\xc1"],
        [encode(None)],
        [encode(3.5)],
        [encode([8])],
        [encode(11)],
        [encode(-8)],
        [encode(2**64 - 1)],
        [encode("no such")],
        [encode("")],
        [encode("LOOKUP")],
        [encode(21), encode(1)],
        [encode(8), encode(KEY)],
        [encode(8), encode(KEY), encode(1), encode(1)],
        [encode(8), b"", encode(1)],
        [encode(8), b"\xdd\xff\xff\xff\xff", encode(1)],
        [encode(8), b"\x91" * 100_000, encode(1)],
        [encode(8), encode({**KEY, "token_ids": "12"}), encode(1)],
        [encode(8), encode({**KEY, "token_ids": [1.5]}), encode(1)],
        [encode(8), encode({**KEY, "token_ids": None}), encode(1)],
        [encode(8), encode({**KEY, "cache_salt": "a/b"}), encode(1)],
        [encode(8), encode({**KEY, "cache_salt": "a" * 129}), encode(1)],
        [encode(8), encode({**KEY, "request_id": 1}), encode(1)],
        [encode(8), encode({**KEY, "start": 2**63 * 1.0}), encode(1)],
        [encode(8), encode({**KEY, "request_configs": DEEP}), encode(1)],
        [encode(9), b"\xa2\xff\xff"],
        [encode(9), encode(None)],
        [encode(10), encode("r"), encode("soon")],
        [encode(17), encode(KEY), encode(1), encode("text")],
        [encode(20), encode("perhaps")],
    ],
)
def test_what_is_no_request_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(RefusedError):
        decode_request(frames)


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_nothing_but_a_refusal_comes_of_garbage(frames: list[bytes]) -> None:
    with contextlib.suppress(RefusedError):
        decode_request(frames)


@given(
    st.sampled_from([8, 9, 14, 16, 17]),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(sorted(KEY)), inner),
        max_leaves=8,
    ),
)
def test_nothing_but_a_refusal_comes_of_wrong_types(number: int, payload: Any) -> None:
    with contextlib.suppress(RefusedError):
        decode_request([encode(number), encode(payload)])


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (0, 0),
        (False, False),
        ([], []),
        (RegistrationReply("n", 5), {"shm_name": "n", "pool_size": 5}),
        (PrepareStoreReply(OfferedStore()), {"context": {}}),
        (PrepareStoreReply(OfferedStore([], [])), {"context": {"slots": [], "chunk_indices": []}}),
        (
            PrepareRetrieveReply(True, context=OfferedSlots([Slot(4096, 8, (2, 2), "float16")])),
            {
                "success": True,
                "data": b"",
                "context": {"slots": [{"offset": 4096, "length": 8, "shape": [2, 2], "dtype": "float16"}]},
            },
        ),
        (PrepareRetrieveReply(False, context=OfferedSlots()), {"success": False, "data": b"", "context": {}}),
        (Encoded(encode([7])), [7]),
    ],
)
def test_a_result_is_a_frame(result: object, expected: object) -> None:
    uid, operation, frame = encode_reply(b"u", b"o", result)
    assert (uid, operation) == (b"u", b"o")
    assert msgspec.msgpack.decode(frame) == expected


def test_no_result_is_no_frame() -> None:
    assert encode_reply(b"u", b"o", None) == [b"u", b"o"]
