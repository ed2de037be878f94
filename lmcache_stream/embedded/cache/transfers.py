"""Stores and retrieves: which slots are written and read, and when they become visible."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from ...cache.messages import Encoded, PrefixKey, PrepareRetrieveReply, PrepareStoreReply, Slot
from .clients import Client, Clients
from .sessions import Sessions
from .shards import shards_of_worker
from .storage import ChunkStore, Shard
from .tensors import copy_chunks, encode_chunks, load_tensors
from .wire import OfferedSlots, OfferedStore

T = TypeVar("T")
# Work on bytes that the one who runs the generator does in a thread, sending in what came of it.
Steps = Generator[Callable[[], Any], Any, T]


class _Transfer(NamedTuple):
    """What makes two transfers of a client the same; the request id does not."""

    instance_id: int
    model_name: str
    world_size: int
    worker_id: int | None
    token_ids: Sequence[int]
    start: int
    end: int
    cache_salt: str

    @classmethod
    def of(cls, key: PrefixKey, instance_id: int) -> _Transfer:
        return cls(
            instance_id,
            key.model_name,
            key.world_size,
            key.worker_id,
            key.token_ids,
            key.start,
            key.end,
            key.cache_salt,
        )


class Transfers:
    """The two steps of a store and of a retrieve, on either data plane."""

    def __init__(
        self,
        store: ChunkStore,
        clients: Clients,
        sessions: Sessions,
        *,
        shared_memory: bool,
        view: Callable[[Slot], torch.Tensor],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._clients = clients
        self._sessions = sessions
        self._shared_memory = shared_memory
        self._view = view
        self._clock = clock
        self._writes: dict[_Transfer, list[Shard]] = {}
        self._reads: dict[_Transfer, list[Shard]] = {}

    def prepare_store(self, key: PrefixKey, instance_id: int) -> PrepareStoreReply:
        """Reserve slots for the chunks of ``key`` that are neither there nor being written."""
        client = self._client(instance_id)
        if not self._shared_memory:
            self._sessions.get_or_create(key.request_id, self._clock())
            return PrepareStoreReply(OfferedStore())
        shards = self._shards(key)
        reserved = self._store.reserve(shards, client.layout)
        indices = [index for index, shard in enumerate(shards) if shard in reserved]
        if indices:
            self._writes[_Transfer.of(key, instance_id)] = [shards[index] for index in indices]
        slots = [reserved[shards[index]] for index in indices]
        return PrepareStoreReply(OfferedStore(slots, indices))

    def commit_store(self, key: PrefixKey, instance_id: int, data: memoryview) -> bool | Steps[bool]:
        """Publish what an equal ``prepare_store`` has reserved, or write what ``data`` holds."""
        client = self._client(instance_id)
        if data.nbytes or not self._shared_memory:
            return self._store_pickle(key, client, data)
        shards = self._writes.pop(_Transfer.of(key, instance_id), None)
        if shards is None:
            return False
        self._store.publish(shards)
        return True

    def _store_pickle(self, key: PrefixKey, client: Client, data: memoryview) -> Steps[bool]:
        shards = self._shards(key)
        tensors: list[torch.Tensor] = yield partial(load_tensors, data)
        reserved = self._store.reserve(shards, client.layout)
        given = {
            shard: tensor
            for shard, tensor in zip(shards, tensors, strict=False)
            if shard in reserved and tensor.shape == reserved[shard].shape
        }
        # A forced clear may drop them while a thread copies.
        self._store.hold(reserved.values())
        try:
            pairs = [(tensor, self._view(reserved[shard])) for shard, tensor in given.items()]
            yield partial(copy_chunks, pairs)
            self._store.publish(list(given))
        finally:
            # What was not written after all. The real server would keep it locked for its whole TTL.
            self._store.discard(reserved)
            self._store.let_go(reserved.values())
        return len(given) == len(reserved)

    def prepare_retrieve(
        self, key: PrefixKey, instance_id: int
    ) -> PrepareRetrieveReply | Steps[PrepareRetrieveReply | Encoded]:
        """Tell where the chunks of ``key`` lie, all of which a lookup must have locked."""
        self._client(instance_id)
        shards = self._shards(key)
        slots = self._store.read(shards) if shards else None
        if slots is None:
            return PrepareRetrieveReply(False, context=OfferedSlots())
        if not self._shared_memory:
            return self._retrieve_pickle(shards, slots)
        self._reads[_Transfer.of(key, instance_id)] = shards
        return PrepareRetrieveReply(True, context=OfferedSlots(slots))

    def _retrieve_pickle(self, shards: list[Shard], slots: list[Slot]) -> Steps[Encoded]:
        self._store.hold(slots)
        try:
            reply: Encoded = yield partial(encode_chunks, [self._view(slot) for slot in slots])
        finally:
            self._store.let_go(slots)
            self._store.unlock(shards)
        return reply

    def commit_retrieve(self, key: PrefixKey, instance_id: int) -> bool:
        """Give back the locks of the chunks that an equal ``prepare_retrieve`` has told of."""
        self._client(instance_id)
        self._store.unlock(self._reads.pop(_Transfer.of(key, instance_id), ()))
        return True

    def forget(self, instance_ids: Iterable[int]) -> None:
        """End the transfers of clients that are gone: what they reserved is published as it is."""
        gone = set(instance_ids)
        for transfer in [one for one in self._writes if one.instance_id in gone]:
            self._store.publish(self._writes.pop(transfer))
        for transfer in [one for one in self._reads if one.instance_id in gone]:
            self._store.unlock(self._reads.pop(transfer))

    def _client(self, instance_id: int) -> Client:
        return self._clients.of_transfer(instance_id, self._clock())

    def _shards(self, key: PrefixKey) -> list[Shard]:
        session = self._sessions.get_or_create(key.request_id, self._clock())
        session.hashes.tokens = key.token_ids
        session.key = session.key or key
        return shards_of_worker(key, session.hashes.between(key.start, key.end))
