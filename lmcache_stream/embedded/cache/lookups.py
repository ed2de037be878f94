"""Lookups, and the read locks they take."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import msgspec

from ...cache.messages import PrefixKey
from .clients import Clients
from .hashing import PrefixHashes
from .refusal import RefusedError
from .sessions import Sessions
from .shards import columns
from .storage import ChunkStore


class Lookups:
    """Finds and locks the longest prefix that is there, and tells it once."""

    def __init__(
        self,
        store: ChunkStore,
        clients: Clients,
        sessions: Sessions,
        *,
        chunk_size: int,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._clients = clients
        self._sessions = sessions
        self._chunk_size = chunk_size
        self._clock = clock
        # Results that nobody has asked for.
        self._found: dict[str, int] = {}

    @property
    def open(self) -> int:
        """Lookups whose result was not told yet."""
        return len(self._found)

    def lookup(self, key: PrefixKey, _: int) -> None:
        """Lock what is there of ``key``; without a second tier the result is known at once."""
        if not self._clients.knows(key.model_name, key.world_size):
            self._found[key.request_id] = 0
            return
        readers = _readers(key)
        size = self._chunk_size
        end = min(len(key.token_ids), key.end)
        hashes = PrefixHashes(size, key.token_ids).between(0, max(0, end - end % size))
        if not hashes:
            self._found[key.request_id] = 0
            return
        session = self._sessions.get_or_create(key.request_id, self._clock())
        session.hashes.tokens = key.token_ids
        session.key = key
        session.hit_chunks = None
        self._found[key.request_id] = self._store.lock_prefix(columns(key, hashes), readers)

    def query_prefetch_status(self, request_id: str) -> int | None:
        """Return the result of a lookup, and 0 for one that is unknown or was told already."""
        hits = self._found.pop(request_id, None)
        if hits is None:
            return 0
        self._sessions.get_or_create(request_id, self._clock()).hit_chunks = hits
        return hits

    def wait_prefetch_status(self, request_id: str, _: float) -> int | None:
        """As ``query_prefetch_status``: there is nothing to wait for."""
        return self.query_prefetch_status(request_id)

    def free_lookup_locks(self, key: PrefixKey, _: int) -> None:
        """Give back the locks on the part of ``key`` that its lookup has found.

        Raises:
            RefusedError: an unregistered model, or no number of readers.
        """
        if key.start >= key.end:
            return
        session = self._sessions.get_or_create(key.request_id, self._clock())
        if session.hit_chunks is None:
            self.query_prefetch_status(key.request_id)
        if session.hit_chunks is None:
            return
        size = self._chunk_size
        end = min(len(key.token_ids), key.end)
        hashes = PrefixHashes(size, key.token_ids).between(0, max(0, end - end % size))
        # The first chunk that does not begin before the range.
        first = max(0, -(-key.start // size))
        if not hashes[first:]:
            return
        self._require(key)
        locked = list(chain.from_iterable(columns(key, hashes[first : session.hit_chunks])))
        if locked:
            self._store.unlock(locked, _readers(key))

    def end_session(self, request_id: str) -> None:
        """Forget a request; the locks of its lookup stay.

        Raises:
            RefusedError: its model is not registered; the request is forgotten all the same.
        """
        session = self._sessions.end(request_id)
        if session is None or session.key is None:
            return
        hashes = session.hashes.all()
        self._require(session.key)
        everyone = msgspec.structs.replace(session.key, worker_id=None)
        self._store.touch(list(chain.from_iterable(columns(everyone, hashes))))

    def _require(self, key: PrefixKey) -> None:
        if not self._clients.knows(key.model_name, key.world_size):
            raise RefusedError(f"no client has registered {key.model_name!r} for {key.world_size} workers")


def _readers(key: PrefixKey) -> int:
    if key.num_kv_readers < 1:
        raise RefusedError(f"locks for {key.num_kv_readers} readers")
    return key.num_kv_readers
