"""The frames of requests and replies as the server sees them; no sockets.

A request is ``[uid, operation, payload...]``, each frame msgpack; the operation is a number or a
name. The first two frames are echoed in the reply as they came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from ...cache import messages
from ...cache.messages import (
    Encoded,
    Frame,
    Operation,
    PrefixKey,
    Registration,
    RetrieveContext,
    StoreContext,
)
from .refusal import RefusedError

WAIT_PREFETCH_STATUS: Operation[int | None] = Operation("wait_prefetch_status", 10, int | None)
CLEAR: Operation[None] = Operation("clear", 20, None)
PING: Operation[bool] = Operation("ping", 22, bool)
NOOP: Operation[str] = Operation("noop", 24, str)
GET_EXPERIMENTAL: Operation[list[str]] = Operation("get_experimental", 32, list[str])

_LONGEST_SALT = 128
_NOT_IN_A_SALT = frozenset("@/\\\0")


class ReceivedKey(PrefixKey, frozen=True, kw_only=True):
    """A key as clients of any version send it: what they may leave out, and what a salt may be."""

    token_ids: tuple[int, ...]
    cache_salt: str = ""
    request_configs: Any = None
    # Not sent: a lookup is refused.
    num_kv_readers: int = 0

    def __post_init__(self) -> None:
        if len(self.cache_salt) > _LONGEST_SALT or not _NOT_IN_A_SALT.isdisjoint(self.cache_salt):
            raise ValueError(f"a salt {self.cache_salt!r}")


class ReceivedRegistration(Registration, frozen=True, kw_only=True):
    """A registration as clients of any version send it."""

    num_physical_slots: int | None = None  # type: ignore[assignment]


class OfferedStore(StoreContext, frozen=True, omit_defaults=True):
    """Slots to fill; on the pickle plane an empty map."""


class OfferedSlots(RetrieveContext, frozen=True, omit_defaults=True):
    """Slots to read; on the pickle plane an empty map."""


_PAYLOADS: dict[Operation[Any], tuple[Any, ...]] = {
    messages.LOOKUP: (ReceivedKey, int),
    messages.QUERY_PREFETCH_STATUS: (str,),
    WAIT_PREFETCH_STATUS: (str, float),
    messages.FREE_LOOKUP_LOCKS: (ReceivedKey, int),
    messages.END_SESSION: (str,),
    messages.REGISTER: (ReceivedRegistration,),
    messages.UNREGISTER: (int,),
    messages.PREPARE_STORE: (ReceivedKey, int),
    messages.COMMIT_STORE: (ReceivedKey, int, memoryview),
    messages.PREPARE_RETRIEVE: (ReceivedKey, int),
    messages.COMMIT_RETRIEVE: (ReceivedKey, int),
    CLEAR: (bool,),
    messages.GET_CHUNK_SIZE: (),
    PING: (int | None,),
    NOOP: (),
    GET_EXPERIMENTAL: (),
}
_BY_IDENTIFIER: dict[int | str, Operation[Any]] = {
    identifier: operation for operation in _PAYLOADS for identifier in (operation.number, operation.name)
}


@dataclass(frozen=True, slots=True)
class Request:
    """One decoded request.

    Attributes:
        operation: what is asked for.
        payloads: its arguments, of the operation's types.
    """

    operation: Operation[Any]
    payloads: tuple[Any, ...]


def decode_request(frames: Sequence[Frame]) -> Request:
    """Read the frames behind the uid: the operation and its payloads.

    Raises:
        RefusedError: no operation of this server, or not its payloads.
    """
    if not frames:
        raise RefusedError("a message without an operation")
    operation = _decode_operation(frames[0])
    types = _PAYLOADS[operation]
    given = frames[1:]
    if len(given) != len(types):
        raise RefusedError(f"{operation.name} with {len(given)} payloads instead of {len(types)}")
    try:
        payloads = tuple(_decode(frame, kind) for frame, kind in zip(given, types, strict=True))
    except (msgspec.DecodeError, RecursionError) as error:
        raise RefusedError(f"{operation.name} with a payload that cannot be read: {error}") from error
    return Request(operation, payloads)


def _decode_operation(frame: Frame) -> Operation[Any]:
    try:
        identifier = msgspec.msgpack.decode(frame, type=int | str)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RefusedError(f"an operation that cannot be read: {error}") from error
    operation = _BY_IDENTIFIER.get(identifier)
    if operation is None:
        raise RefusedError(f"an operation {identifier!r} that this server does not have")
    return operation


def _decode(frame: Frame, kind: Any) -> Any:
    # LMCache, too, takes numbers in other clothes.
    return msgspec.msgpack.decode(frame, type=kind, strict=kind not in (int, bool))


def encode_reply(uid: Frame, operation: Frame, result: object) -> list[Frame]:
    """Return the frames of a reply; None is no frame at all."""
    if result is None:
        return [uid, operation]
    frame = result.frame if isinstance(result, Encoded) else msgspec.msgpack.encode(result)
    return [uid, operation, frame]
