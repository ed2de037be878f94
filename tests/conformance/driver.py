"""The protocol, operation by operation, without the care that the library takes."""

from __future__ import annotations

import asyncio
import itertools
import math
import pickle
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import pytest
import torch

from lmcache_stream.cache import messages
from lmcache_stream.cache.messages import (
    Operation,
    PrefixKey,
    PrepareRetrieveReply,
    PrepareStoreReply,
    Registration,
    RegistrationReply,
    Slot,
)
from lmcache_stream.cache.requests import RequestClient
from lmcache_stream.cache.shared_memory import SharedPool
from lmcache_stream.embedded.cache.wire import CLEAR, GET_EXPERIMENTAL, NOOP, PING, WAIT_PREFETCH_STATUS
from lmcache_stream.errors import CacheTimeoutError

from ..real.stack import get_json

T = TypeVar("T")

CHUNK_SIZE = 4
SIZE_BYTES = 8 << 20
PLANES = ("shared-memory", "pickle")
# Far above what either server takes for an answer here.
_ANSWER_SECONDS = 10.0
# How long a silence must last; what is silent goes unanswered for ever.
_SILENCE_SECONDS = 1.0
_tokens = itertools.count(1000)


def servers(*planes: str) -> pytest.MarkDecorator:
    """Run a test on both servers, on the given data planes or on both."""
    names: list[Any] = []
    for plane in planes or PLANES:
        names += [f"embedded-{plane}", pytest.param(f"real-{plane}", marks=pytest.mark.real)]
    return pytest.mark.parametrize("place", names, indirect=True)


def fresh_tokens(chunks: int) -> list[int]:
    """Return tokens of which no other test has a chunk."""
    return list(itertools.islice(_tokens, chunks * CHUNK_SIZE))


@dataclass
class Place:
    """Where a server is."""

    url: str
    http_url: str
    shared_memory: bool

    async def status(self) -> dict[str, Any]:
        answer: dict[str, Any] = await asyncio.to_thread(get_json, f"{self.http_url}/status")
        return answer

    async def l1(self) -> dict[str, Any]:
        status = await self.status()
        section: dict[str, Any] = status["storage_manager"]["l1_manager"]
        return section

    async def locked(self) -> tuple[int, int]:
        """Counts of read-locked and write-locked chunks."""
        l1 = await self.l1()
        return l1["read_locked_count"], l1["write_locked_count"]

    async def clear(self, *, force: bool = False) -> Any:
        body = {"tier": "l1", "force": force}
        return await asyncio.to_thread(get_json, f"{self.http_url}/cache/clear", body=body)


@dataclass(frozen=True)
class Chunks:
    """The shape of a client's chunks."""

    num_layers: int = 2
    hidden: int = 8
    dtype: torch.dtype = torch.bfloat16
    use_mla: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        plane = (self.num_layers, CHUNK_SIZE, self.hidden)
        return plane if self.use_mla else (2, *plane)

    @property
    def length(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def filled(self, *values: float) -> list[torch.Tensor]:
        """Return a chunk for each value, full of it."""
        return [torch.full(self.shape, value, dtype=self.dtype) for value in values]


@dataclass
class Driver:
    """One connection to a server and one registration, ``instance``, of the model ``model``."""

    place: Place
    chunks: Chunks = field(default_factory=Chunks)
    model: str = ""
    world_size: int = 1
    instance: int = 0
    reply: RegistrationReply = field(default_factory=RegistrationReply)

    def __post_init__(self) -> None:
        self.requests = RequestClient(self.place.url, connect_timeout=_ANSWER_SECONDS)
        self.model = self.model or f"model-{secrets.token_hex(4)}"
        self._pool: SharedPool | None = None

    async def __aenter__(self) -> Self:
        await self.requests.start()
        self.instance = secrets.randbits(62)
        self.reply = await self.register(self.instance)
        if self.reply.shm_name:
            self._pool = SharedPool(self.reply.shm_name, self.reply.pool_size)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.close()
        await self.call(messages.UNREGISTER, self.instance)
        await self.requests.aclose()

    async def call(self, operation: Operation[T], *payloads: Any) -> T:
        return await self.requests.call(operation, *payloads, deadline=_ANSWER_SECONDS)

    async def is_silent(self, operation: Operation[Any], *payloads: Any) -> bool:
        try:
            await self.requests.call(operation, *payloads, deadline=_SILENCE_SECONDS)
        except CacheTimeoutError:
            return True
        return False

    def registration(self, instance: int, **changes: Any) -> Registration:
        fields: dict[str, Any] = {
            "instance_id": instance,
            "model_name": self.model,
            "world_size": self.world_size,
            "block_size": CHUNK_SIZE,
            "num_layers": self.chunks.num_layers,
            "hidden_dim_size": self.chunks.hidden,
            "dtype_str": str(self.chunks.dtype).removeprefix("torch."),
            "use_mla": self.chunks.use_mla,
            "num_physical_slots": CHUNK_SIZE,
        }
        return Registration(**{**fields, **changes})

    async def register(self, instance: int, **changes: Any) -> RegistrationReply:
        return await self.call(messages.REGISTER, self.registration(instance, **changes))

    def key(self, tokens: Sequence[int], **changes: Any) -> PrefixKey:
        """Name all of ``tokens`` under a fresh request id, as worker 0."""
        fields: dict[str, Any] = {
            "model_name": self.model,
            "world_size": self.world_size,
            "worker_id": 0,
            "token_ids": list(tokens),
            "start": 0,
            "end": len(tokens),
            "request_id": secrets.token_hex(8),
            "cache_salt": "",
        }
        return PrefixKey(**{**fields, **changes})

    # Lookups.

    async def lookup(self, tokens: Sequence[int], **changes: Any) -> tuple[PrefixKey, int]:
        """Look up, and leave the locks; return the key that gives them back, and the hit chunks."""
        key = self.key(tokens, **{"worker_id": None, **changes})
        await self.call(messages.LOOKUP, key, 1)
        hits = await self.call(messages.QUERY_PREFETCH_STATUS, key.request_id)
        assert hits is not None
        return key, hits

    async def free(self, key: PrefixKey) -> None:
        await self.call(messages.FREE_LOOKUP_LOCKS, key, 1)

    async def found(self, tokens: Sequence[int], **changes: Any) -> int:
        """Return the hit chunks of a lookup that leaves nothing behind."""
        key, hits = await self.lookup(tokens, **changes)
        await self.free(key)
        await self.call(messages.END_SESSION, key.request_id)
        return hits

    # Stores.

    async def prepare_store(self, key: PrefixKey, instance: int | None = None) -> PrepareStoreReply:
        return await self.call(messages.PREPARE_STORE, key, self.instance if instance is None else instance)

    async def commit_store(self, key: PrefixKey, data: bytes = b"", instance: int | None = None) -> bool:
        return await self.call(
            messages.COMMIT_STORE, key, self.instance if instance is None else instance, data
        )

    def slot(self, slot: Slot) -> torch.Tensor:
        """View a slot of the shared pool."""
        assert self._pool is not None
        return self._pool.chunk(slot, slot.shape, slot.torch_dtype)

    async def store(self, tokens: Sequence[int], *values: float, **changes: Any) -> bool:
        """Store a chunk full of each value, on whichever plane this is, and return the commit's word."""
        key = self.key(tokens, **changes)
        chunks = self.chunks.filled(*values)
        context = (await self.prepare_store(key)).context
        data = b"" if self.place.shared_memory else pickle.dumps(chunks)
        for slot, index in zip(context.slots or [], context.chunk_indices or [], strict=True):
            self.slot(slot).copy_(chunks[index])
        return await self.commit_store(key, data)

    # Retrieves.

    async def prepare_retrieve(self, key: PrefixKey) -> PrepareRetrieveReply:
        return await self.call(messages.PREPARE_RETRIEVE, key, self.instance)

    async def commit_retrieve(self, key: PrefixKey) -> bool:
        return await self.call(messages.COMMIT_RETRIEVE, key, self.instance)

    def read(self, reply: PrepareRetrieveReply) -> list[torch.Tensor]:
        """Return copies of the chunks that a retrieve has told of."""
        assert reply.success
        if reply.context.slots is None:
            chunks: list[torch.Tensor] = pickle.loads(reply.data)
            return chunks
        return [self.slot(slot).clone() for slot in reply.context.slots]

    async def values(self, tokens: Sequence[int], **changes: Any) -> list[float]:
        """Look ``tokens`` up, retrieve what is there and return the value that fills each chunk."""
        found, hits = await self.lookup(tokens, **changes)
        key = self.key(tokens[: hits * CHUNK_SIZE], request_id=found.request_id, **changes)
        if not hits:
            return []
        chunks = self.read(await self.prepare_retrieve(key))
        await self.commit_retrieve(key)
        await self.call(messages.END_SESSION, key.request_id)
        assert all(bool((chunk == chunk.flatten()[0]).all()) for chunk in chunks)
        return [float(chunk.flatten()[0]) for chunk in chunks]


__all__ = [
    "CHUNK_SIZE",
    "CLEAR",
    "GET_EXPERIMENTAL",
    "NOOP",
    "PING",
    "SIZE_BYTES",
    "WAIT_PREFETCH_STATUS",
    "Chunks",
    "Driver",
    "Place",
    "fresh_tokens",
    "servers",
]
