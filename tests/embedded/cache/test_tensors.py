from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
import torch

from lmcache_stream.cache import messages
from lmcache_stream.cache.pickled import load_chunks
from lmcache_stream.embedded.cache.refusal import RefusedError
from lmcache_stream.embedded.cache.tensors import copy_chunks, encode_chunks, load_tensors


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


def test_tensors_of_any_shape_and_type_are_read() -> None:
    sent = [torch.randn(2, 3), torch.zeros(4, dtype=torch.bfloat16), torch.arange(6).reshape(2, 3).t()]
    back = load_tensors(memoryview(pickle.dumps(sent)))
    assert all(torch.equal(one, other) for one, other in zip(back, sent, strict=True))
    assert load_tensors(memoryview(pickle.dumps([]))) == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b".",
        b"\x80",
        b"garbage",
        pickle.dumps(None),
        pickle.dumps("text"),
        pickle.dumps([1]),
        pickle.dumps((torch.zeros(1),)),
        pickle.dumps({"a": torch.zeros(1)}),
        pickle.dumps(Evil()),
        pickle.dumps([torch.zeros(1), Evil()]),
        pickle.dumps([torch.zeros(4)])[:-20],
        pickle.dumps([torch.nn.Parameter(torch.zeros(1))]),
    ],
)
def test_nothing_else_is(data: bytes) -> None:
    with pytest.raises(RefusedError):
        load_tensors(memoryview(data))


def test_chunks_are_copied_and_converted() -> None:
    target = torch.zeros(4, dtype=torch.bfloat16)
    copy_chunks([(torch.tensor([1.0, 2.0, 3.0, 4.0]), target)])
    assert target.tolist() == [1, 2, 3, 4]


def test_a_reply_carries_the_chunks_and_not_their_storage() -> None:
    pool = torch.arange(100_000, dtype=torch.int16)
    reply = encode_chunks([pool[8:12].view(2, 2), pool[100:104].view(2, 2)])
    assert len(reply.frame) < 4096
    decoded = messages.decode_result(messages.PREPARE_RETRIEVE, [b"", b"", reply.frame])
    assert decoded.success
    back = load_chunks(decoded.data, 2, (2, 2), torch.int16)
    assert [one.tolist() for one in back] == [[[8, 9], [10, 11]], [[100, 101], [102, 103]]]
