"""What a cache server is told before it starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import InvalidRequestError

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """The settings of a cache server; the defaults are those of LMCache 0.5.6.

    Attributes:
        chunk_size: tokens of a chunk.
        size_bytes: bytes of the L1 pool.
        shared_memory: whether clients of this machine read and write the pool themselves; otherwise
            chunks travel as pickles.
        read_ttl: seconds after which a read lock that nobody gave back ends.
        write_ttl: the same for the lock of a slot that was reserved and never committed.
        trigger_watermark: the used part of the pool from which on chunks are evicted.
        eviction_ratio: the part of all chunks that one round of eviction drops.
        reap_timeout: seconds of silence after which a client that has pinged is forgotten.
        registration_grace: the same for a client that never pinged.
        session_ttl: seconds after which what was noted for a request is dropped.
    """

    chunk_size: int = 256
    size_bytes: int = _GIB
    shared_memory: bool = True
    read_ttl: float = 300.0
    write_ttl: float = 600.0
    trigger_watermark: float = 0.8
    eviction_ratio: float = 0.2
    reap_timeout: float = 120.0
    registration_grace: float = 3600.0
    session_ttl: float = 600.0

    def __post_init__(self) -> None:
        for name in ("chunk_size", "size_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidRequestError(f"cache server: {name} must be a positive int, not {value!r}")
        for name in ("read_ttl", "write_ttl", "reap_timeout", "registration_grace", "session_ttl"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 < value < math.inf:
                raise InvalidRequestError(f"cache server: {name} must be positive seconds, not {value!r}")
        for name in ("trigger_watermark", "eviction_ratio"):
            value = getattr(self, name)
            if not _is_number(value) or not 0 < value <= 1:
                raise InvalidRequestError(f"cache server: {name} must be in (0, 1], not {value!r}")


def bytes_of(size_gb: float) -> int:
    """Return the bytes of a pool of ``size_gb`` GiB, as LMCache rounds them.

    Raises:
        InvalidRequestError: not a positive number.
    """
    if not _is_number(size_gb) or not 0 < size_gb < math.inf:
        raise InvalidRequestError(f"cache server: size_gb must be a positive number, not {size_gb!r}")
    return max(1, int(size_gb * _GIB))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
