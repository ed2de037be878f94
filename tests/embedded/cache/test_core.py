"""Requests in, results out, with time that passes when a test says so."""

from __future__ import annotations

import pickle
from collections.abc import Generator
from typing import Any

import pytest
import torch

from lmcache_stream.cache import messages
from lmcache_stream.cache.messages import Operation, PrefixKey, RegistrationReply
from lmcache_stream.embedded.cache.core import CacheCore, is_work
from lmcache_stream.embedded.cache.options import CacheOptions
from lmcache_stream.embedded.cache.pool import Pool
from lmcache_stream.embedded.cache.refusal import RefusedError
from lmcache_stream.embedded.cache.wire import PING, ReceivedKey, Request

from .clock import Clock
from .test_clients import registration

SHAPE = (2, 1, 4, 8)
TOKENS = tuple(range(8))


class Bench:
    """A core, and its requests as calls; the work that it gives out is done at once."""

    def __init__(self, *, shared_memory: bool) -> None:
        self.clock = Clock()
        options = CacheOptions(chunk_size=4, size_bytes=1 << 16)
        self._pool = Pool(options.size_bytes, shared=False)
        offer = RegistrationReply("a name" if shared_memory else "", options.size_bytes)
        self.core = CacheCore(options, offer, self._pool.view, self.clock, {})
        self.register()

    def register(self, instance: int = 1) -> None:
        body = registration(
            instance_id=instance, num_layers=1, num_physical_slots=4, hidden_dim_size=8, dtype_str="float32"
        )
        self.call(messages.REGISTER, body)

    def call(self, operation: Operation[Any], *payloads: Any) -> Any:
        result = self.core.answer(Request(operation, payloads))
        return run(result) if is_work(result) else result

    def key(self, tokens: tuple[int, ...] = TOKENS, request: str = "r", worker: int | None = 0) -> PrefixKey:
        return ReceivedKey(
            model_name="model",
            world_size=1,
            worker_id=worker,
            token_ids=tokens,
            start=0,
            end=len(tokens),
            request_id=request,
            num_kv_readers=1,
        )

    def commit(self, data: object = b"", *, request: str = "s") -> Any:
        raw = data if isinstance(data, bytes) else pickle.dumps(data)
        return self.call(messages.COMMIT_STORE, self.key(request=request), 1, memoryview(raw))

    def lookup(self, request: str = "r") -> int:
        self.call(messages.LOOKUP, self.key(request=request, worker=None), 1)
        hits = self.call(messages.QUERY_PREFETCH_STATUS, request)
        assert isinstance(hits, int)
        return hits

    @property
    def locked(self) -> tuple[int, int]:
        counts = self.core.store.counts()
        return counts.read_locked, counts.write_locked


def run(work: Generator[Any, Any, Any]) -> Any:
    try:
        step = next(work)
        while True:
            step = work.send(step())
    except StopIteration as end:
        return end.value


def chunks() -> list[torch.Tensor]:
    return [torch.full(SHAPE, value) for value in (1.0, 2.0)]


@pytest.fixture
def shared() -> Bench:
    return Bench(shared_memory=True)


@pytest.fixture
def pickled() -> Bench:
    return Bench(shared_memory=False)


def test_read_locks_end_after_300_seconds_and_slots_after_600(shared: Bench) -> None:
    assert shared.commit(chunks()) is True
    assert shared.lookup() == 2
    shared.call(messages.PREPARE_STORE, shared.key((9, 9, 9, 9), "other"), 1)
    shared.clock.advance(299)
    assert shared.locked == (2, 1)
    shared.clock.advance(1)
    assert shared.locked == (0, 1)
    assert not shared.call(messages.PREPARE_RETRIEVE, shared.key(), 1).success
    shared.clock.advance(300)
    assert shared.locked == (0, 0)


def test_locks_that_ended_are_not_taken_from_those_who_came_later(shared: Bench) -> None:
    shared.commit(chunks())
    shared.lookup("early")
    shared.clock.advance(300)
    shared.lookup("late")
    # There is one lock, and it cannot be told whose it was.
    shared.call(messages.FREE_LOOKUP_LOCKS, shared.key(request="early", worker=None), 1)
    assert shared.locked == (0, 0)


def test_a_client_that_is_forgotten_leaves_no_locks_and_its_slots_are_published(shared: Bench) -> None:
    shared.commit(chunks())
    shared.call(PING, 1)
    assert shared.lookup() == 2
    assert shared.call(messages.PREPARE_RETRIEVE, shared.key(), 1).success
    shared.call(messages.PREPARE_STORE, shared.key((9, 9, 9, 9), "pending"), 1)
    shared.clock.advance(120)
    shared.core.tend()
    assert shared.locked == (2, 1)
    shared.clock.advance(1)
    shared.core.tend()
    assert not shared.core.clients.all()
    assert shared.locked == (0, 0)
    assert shared.core.store.counts()[:2] == (3, 0)


def test_a_slot_that_was_late_is_not_published_when_its_client_is_gone(shared: Bench) -> None:
    shared.call(messages.PREPARE_STORE, shared.key(), 1)
    shared.clock.advance(600)
    shared.call(messages.UNREGISTER, 1)
    assert shared.core.store.counts()[:2] == (0, 2)


def test_requests_are_forgotten_after_600_seconds(shared: Bench) -> None:
    shared.commit(chunks())
    shared.lookup()
    shared.clock.advance(600)
    shared.core.tend()
    assert len(shared.core.sessions) == 2
    shared.clock.advance(1)
    shared.core.tend()
    assert len(shared.core.sessions) == 0


def test_what_is_tended_makes_room(pickled: Bench) -> None:
    # Sixteen pages, of a chunk each.
    for first in range(14):
        key = pickled.key((first, 0, 0, 0), f"s{first}")
        data = memoryview(pickle.dumps(chunks()[:1]))
        assert pickled.call(messages.COMMIT_STORE, key, 1, data) is True
    pickled.core.tend()
    assert pickled.core.store.counts().resident == 12


def test_a_store_cut_short_leaves_nothing(pickled: Bench) -> None:
    for steps in (1, 2):
        work = pickled.core.answer(
            Request(messages.COMMIT_STORE, (pickled.key(), 1, memoryview(pickle.dumps(chunks()))))
        )
        step = next(work)
        if steps == 2:
            step = work.send(step())
            assert pickled.locked == (0, 2)
        work.close()
        assert pickled.locked == (0, 0)
        assert pickled.core.store.used_bytes == 0


def test_a_store_whose_copy_fails_leaves_nothing(pickled: Bench) -> None:
    work = pickled.core.answer(
        Request(messages.COMMIT_STORE, (pickled.key(), 1, memoryview(pickle.dumps(chunks()))))
    )
    work.send(next(work)())
    with pytest.raises(MemoryError):
        work.throw(MemoryError())
    assert pickled.core.store.used_bytes == 0


def test_chunks_that_do_not_fit_leave_nothing(pickled: Bench) -> None:
    assert pickled.commit([chunks()[0], torch.zeros(3)]) is False
    assert pickled.locked == (0, 0)
    assert pickled.core.store.counts().resident == 1


@pytest.mark.parametrize("data", [b"", b"garbage", pickle.dumps(print), pickle.dumps([1, 2])])
def test_what_is_no_pickle_of_tensors_is_refused_and_leaves_nothing(pickled: Bench, data: bytes) -> None:
    with pytest.raises(RefusedError):
        pickled.commit(data)
    assert pickled.locked == (0, 0)
    assert pickled.core.store.used_bytes == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_retrieve_cut_short_gives_its_locks_back(pickled: Bench, fails: bool) -> None:
    pickled.commit(chunks())
    assert pickled.lookup() == 2
    work = pickled.core.answer(Request(messages.PREPARE_RETRIEVE, (pickled.key(), 1)))
    next(work)
    assert pickled.locked == (2, 0)
    if fails:
        with pytest.raises(MemoryError):
            work.throw(MemoryError())
    else:
        work.close()
    assert pickled.locked == (0, 0)


def test_what_is_retrieved_is_as_it_was_when_it_was_asked_for(pickled: Bench) -> None:
    pickled.commit(chunks())
    pickled.lookup()
    reply = pickled.call(messages.PREPARE_RETRIEVE, pickled.key(), 1)
    decoded = messages.decode_result(messages.PREPARE_RETRIEVE, [b"", b"", reply.frame])
    assert decoded.success
    loaded = pickle.loads(decoded.data)
    assert [float(one.flatten()[0]) for one in loaded] == [1, 2]
    # Not the pool, of which they were a part.
    assert len(decoded.data) < 4096


def test_a_key_of_too_many_workers_is_refused(shared: Bench) -> None:
    shared.core.clients.register(registration(instance_id=9, world_size=10**9), 0)
    for operation, worker in ((messages.PREPARE_STORE, 0), (messages.LOOKUP, None)):
        key = shared.key(worker=worker)
        key = ReceivedKey(
            **{**{name: getattr(key, name) for name in key.__struct_fields__}, "world_size": 10**9}
        )
        with pytest.raises(RefusedError, match="workers"):
            shared.call(operation, key, 1)
