"""What is noted for a request id between its operations."""

from __future__ import annotations

from dataclasses import dataclass

from ...cache.messages import PrefixKey
from .hashing import PrefixHashes


@dataclass(slots=True)
class Session:
    """One request.

    Attributes:
        created: when it was first heard of.
        hashes: of the tokens that its transfers named. They are computed once: a request id that is
            used for other tokens gets the hashes of the first.
        key: the first key that named its chunks, or that of its last lookup.
        hit_chunks: what its last lookup found and locked; None until that is known.
    """

    created: float
    hashes: PrefixHashes
    key: PrefixKey | None = None
    hit_chunks: int | None = None


class Sessions:
    """The requests that were heard of and not ended."""

    def __init__(self, chunk_size: int, ttl: float) -> None:
        self._chunk_size = chunk_size
        self._ttl = ttl
        self._sessions: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def get_or_create(self, request_id: str, now: float) -> Session:
        session = self._sessions.get(request_id)
        if session is None:
            session = self._sessions[request_id] = Session(now, PrefixHashes(self._chunk_size))
        return session

    def end(self, request_id: str) -> Session | None:
        return self._sessions.pop(request_id, None)

    def expire(self, now: float) -> None:
        """Forget the requests that began longer ago than the time to live."""
        for request_id, session in list(self._sessions.items()):
            if now - session.created > self._ttl:
                del self._sessions[request_id]
