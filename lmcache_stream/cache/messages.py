"""The operations of an LMCache multiprocess server and the frames that carry them; no sockets.

A request is ``[uid, operation, payload...]`` and a reply ``[uid, operation]`` or
``[uid, operation, result]``, each frame msgpack. Format: lmcache 0.5.6, multiprocess ZMQ transport.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Self, TypeVar, cast

import msgspec
import torch

from ..errors import CacheError, GeometryError

T = TypeVar("T")
Frame = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Operation(Generic[T]):
    """One operation: its name, its number on the wire and the type of its result."""

    name: str
    number: int
    result: Any


class PrefixKey(msgspec.Struct, frozen=True, kw_only=True):
    """Names a range of one prompt's chunks; the server hashes the token ids.

    ``start`` and ``end`` are tokens, multiples of a chunk. ``worker_id`` is None in a lookup, which
    asks for every worker's shard.
    """

    model_name: str
    world_size: int
    worker_id: int | None
    token_ids: Sequence[int]
    start: int
    end: int
    request_id: str
    cache_salt: str
    request_configs: None = None
    num_kv_readers: int = 1


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """Announces an engine-driven client and the shape of its chunks."""

    instance_id: int
    model_name: str
    world_size: int
    block_size: int
    num_layers: int
    hidden_dim_size: int
    dtype_str: str
    use_mla: bool
    num_physical_slots: int


class RegistrationReply(msgspec.Struct, frozen=True):
    """Which data plane the server offers: an empty name means pickled chunks."""

    shm_name: str = ""
    pool_size: int = 0


class Slot(msgspec.Struct, frozen=True):
    """Where in the shared pool one chunk lies; ``offset`` and ``length`` in bytes."""

    offset: int
    length: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """The element type.

        Raises:
            CacheError: the server named a dtype that torch does not know.
        """
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CacheError(f"LMCache named a chunk dtype {self.dtype!r} that torch does not know")
        return dtype

    def check(self, pool_size: int) -> None:
        """Raise CacheError unless the slot lies within the pool and has room for its shape."""
        itemsize = self.torch_dtype.itemsize
        wanted = math.prod(self.shape) * itemsize
        inside = self.offset >= 0 and self.offset + self.length <= pool_size
        aligned = self.offset % itemsize == 0
        if not (inside and aligned) or min(self.shape, default=0) < 1 or self.length < wanted:
            raise CacheError(
                f"LMCache gave a slot at {self.offset} of {self.length} bytes for {self.dtype}"
                f"{list(self.shape)} in a pool of {pool_size} bytes: refused"
            )


class ChunkMismatchError(GeometryError):
    """The server's chunks have another shape or dtype than the geometry gives.

    Attributes:
        dtype: the element type that the server has.
        shape: the chunk shape that the server has.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        wanted_dtype: torch.dtype,
        wanted_shape: tuple[int, ...],
    ) -> None:
        super().__init__(
            f"LMCache's chunks are {dtype}{list(shape)}, but the geometry gives "
            f"{wanted_dtype}{list(wanted_shape)}: does model_config= or geometry= belong to the model "
            "that the engine serves?"
        )
        self.dtype = dtype
        self.shape = shape


class StoreContext(msgspec.Struct, frozen=True):
    """Slots to fill and the chunks they are for; both empty on the pickle plane."""

    slots: list[Slot] | None = None
    chunk_indices: list[int] | None = None


class PrepareStoreReply(msgspec.Struct, frozen=True):
    context: StoreContext = StoreContext()


class RetrieveContext(msgspec.Struct, frozen=True):
    """Slots to read; empty on the pickle plane."""

    slots: list[Slot] | None = None


class PrepareRetrieveReply(msgspec.Struct, frozen=True):
    """What a retrieve found: slots with shared memory, else ``data``, the pickled chunks."""

    success: bool
    data: memoryview = memoryview(b"")
    context: RetrieveContext = RetrieveContext()


LOOKUP: Operation[None] = Operation("lookup", 8, None)
QUERY_PREFETCH_STATUS: Operation[int | None] = Operation(
    "query_prefetch_status", 9, Annotated[int, msgspec.Meta(ge=0)] | None
)
FREE_LOOKUP_LOCKS: Operation[None] = Operation("free_lookup_locks", 12, None)
END_SESSION: Operation[None] = Operation("end_session", 13, None)
REGISTER: Operation[RegistrationReply] = Operation(
    "register_kv_cache_engine_driven_context", 14, RegistrationReply
)
UNREGISTER: Operation[None] = Operation("unregister_kv_cache_engine_driven_context", 15, None)
PREPARE_STORE: Operation[PrepareStoreReply] = Operation("prepare_store", 16, PrepareStoreReply)
COMMIT_STORE: Operation[bool] = Operation("commit_store", 17, bool)
PREPARE_RETRIEVE: Operation[PrepareRetrieveReply] = Operation("prepare_retrieve", 18, PrepareRetrieveReply)
COMMIT_RETRIEVE: Operation[bool] = Operation("commit_retrieve", 19, bool)
# Operations that need a registration; without one they are silent.
TRANSFERS = (PREPARE_STORE, COMMIT_STORE, PREPARE_RETRIEVE, COMMIT_RETRIEVE)
GET_CHUNK_SIZE: Operation[int] = Operation("get_chunk_size", 21, int)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A payload whose frame was made before, off the loop, because it is large."""

    frame: bytes

    @classmethod
    def of(cls, payload: Any) -> Self:
        """Encode ``payload``.

        Raises:
            CacheError: it has more bytes than msgpack can carry, 4 GiB.
        """
        try:
            return cls(msgspec.msgpack.encode(payload))
        except msgspec.EncodeError as error:
            raise CacheError(
                f"more KV than LMCache's pickle plane carries in one store: {error}. Run on the server's "
                "machine with --shm-name, or store fewer tokens"
            ) from error


def encode_request(uid: int, operation: Operation[Any], payloads: Sequence[Any]) -> list[bytes]:
    """Return the frames of one request."""
    encode = msgspec.msgpack.encode
    frames = (one.frame if isinstance(one, Encoded) else encode(one) for one in payloads)
    return [encode(uid), encode(operation.number), *frames]


def decode_uid(frames: Sequence[Frame]) -> int | None:
    """Return the uid that a reply answers, or None for a message that is no reply of the protocol."""
    try:
        return msgspec.msgpack.decode(frames[0], type=int)
    except (IndexError, msgspec.DecodeError):
        return None


def decode_result(operation: Operation[T], frames: Sequence[Frame]) -> T:
    """Return the result in a reply's frames.

    Raises:
        CacheError: the result is not of the operation's type.
    """
    if len(frames) < 3:
        empty: Any = None
        if operation.result is None or operation is QUERY_PREFETCH_STATUS:
            return cast(T, empty)
        raise CacheError(f"LMCache answered {operation.name} without a result")
    try:
        return cast(T, msgspec.msgpack.decode(frames[2], type=operation.result))
    except (msgspec.DecodeError, RecursionError) as error:
        raise CacheError(
            f"LMCache answered {operation.name} with what this version cannot read: {error}"
        ) from error
