"""From the keys of the protocol to the shards they name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...cache.messages import PrefixKey
from .refusal import RefusedError
from .storage import Shard

# In the names of LMCache's second tier it separates the fields.
_SEPARATOR = "@"
# LMCache has one byte for the number of workers.
_MOST_WORKERS = 255


def shards_of_worker(key: PrefixKey, hashes: Sequence[bytes]) -> list[Shard]:
    """Return the shards of the worker that ``key`` names, one for each hash.

    Raises:
        RefusedError: it names none, or a model that cannot be.
    """
    _check_model(key)
    if key.worker_id is None:
        raise RefusedError("a transfer without a worker")
    return [_shard(key, prefix, key.worker_id) for prefix in hashes]


def columns(key: PrefixKey, hashes: Sequence[bytes]) -> Iterator[list[Shard]]:
    """Yield for each hash the shards of the worker that ``key`` names, or of every worker.

    Raises:
        RefusedError: a model that cannot be.
    """
    _check_model(key)
    workers = range(key.world_size) if key.worker_id is None else (key.worker_id,)
    return ([_shard(key, prefix, worker) for worker in workers] for prefix in hashes)


def _shard(key: PrefixKey, prefix: bytes, worker: int) -> Shard:
    return Shard(prefix, key.model_name, key.world_size, worker, key.cache_salt)


def _check_model(key: PrefixKey) -> None:
    if _SEPARATOR in key.model_name:
        raise RefusedError(f"a model name {key.model_name!r}")
    if not 1 <= key.world_size <= _MOST_WORKERS:
        raise RefusedError(f"a world of {key.world_size} workers")
