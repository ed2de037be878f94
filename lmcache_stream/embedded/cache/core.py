"""The cache server without its sockets: requests in, results out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch

from ...cache import messages
from ...cache.geometry import KVGeometry
from ...cache.messages import Operation, Registration, RegistrationReply, Slot
from . import wire
from .clients import Clients
from .lookups import Lookups
from .options import CacheOptions
from .sessions import Sessions
from .storage import ChunkStore
from .transfers import Steps, Transfers
from .wire import Request

logger = logging.getLogger(__name__)


class CacheCore:
    """All state of a cache server. Not for several threads: what it gives out to be done in one is
    bytes only.

    Attributes:
        options: the settings.
        pool: the name and size of the shared pool; no name on the pickle plane.
        store: the chunks.
        clients: the registrations.
        sessions: the requests.
        lookups: the open lookups.
        transfers: the open stores and retrieves.
    """

    def __init__(
        self,
        options: CacheOptions,
        pool: RegistrationReply,
        view: Callable[[Slot], torch.Tensor],
        clock: Callable[[], float],
        announced: Mapping[str, KVGeometry],
        back: Callable[[int, int], bool] = lambda offset, length: True,
    ) -> None:
        self.options = options
        self.pool = pool
        self.store = ChunkStore(options, clock, back)
        self.clients = Clients(options, announced)
        self.sessions = Sessions(options.chunk_size, options.session_ttl)
        self.lookups = Lookups(
            self.store, self.clients, self.sessions, chunk_size=options.chunk_size, clock=clock
        )
        self.transfers = Transfers(
            self.store,
            self.clients,
            self.sessions,
            shared_memory=bool(pool.shm_name),
            view=view,
            clock=clock,
        )
        self._clock = clock
        self._handlers: dict[Operation[Any], Callable[..., Any]] = {
            messages.LOOKUP: self.lookups.lookup,
            messages.QUERY_PREFETCH_STATUS: self.lookups.query_prefetch_status,
            wire.WAIT_PREFETCH_STATUS: self.lookups.wait_prefetch_status,
            messages.FREE_LOOKUP_LOCKS: self.lookups.free_lookup_locks,
            messages.END_SESSION: self.lookups.end_session,
            messages.REGISTER: self._register,
            messages.UNREGISTER: self._unregister,
            messages.PREPARE_STORE: self.transfers.prepare_store,
            messages.COMMIT_STORE: self.transfers.commit_store,
            messages.PREPARE_RETRIEVE: self.transfers.prepare_retrieve,
            messages.COMMIT_RETRIEVE: self.transfers.commit_retrieve,
            wire.CLEAR: self._clear,
            messages.GET_CHUNK_SIZE: lambda: options.chunk_size,
            wire.PING: self._ping,
            wire.NOOP: lambda: "OK",
            # No event stream here, the only one that LMCache 0.5.6 names.
            wire.GET_EXPERIMENTAL: list,
        }

    def answer(self, request: Request) -> Any | Steps[Any]:
        """Do what is asked for and return the result.

        Where that takes work on bytes, a generator of it: whoever runs it runs what it yields,
        sends in the outcome, and closes it whatever happens.

        Raises:
            RefusedError: the answer is silence.
        """
        return self._handlers[request.operation](*request.payloads)

    def tend(self) -> None:
        """Do what is due now and then: make room, forget requests and clients."""
        now = self._clock()
        self.store.evict()
        self.sessions.expire(now)
        gone = self.clients.reap(now)
        if gone:
            logger.warning("clients that were silent for too long are forgotten: %s", gone)
            self.transfers.forget(gone)

    def _register(self, registration: Registration) -> RegistrationReply:
        self.clients.register(registration, self._clock())
        return self.pool

    def _unregister(self, instance_id: int) -> None:
        if self.clients.unregister(instance_id):
            self.transfers.forget([instance_id])

    def _ping(self, instance_id: int | None) -> bool:
        if instance_id is not None:
            self.clients.ping(instance_id, self._clock())
        return True

    def _clear(self, force: bool) -> None:
        self.store.clear(force=force)


def is_work(result: Any) -> bool:
    """Tell whether ``answer`` gave work instead of a result."""
    return isinstance(result, Generator)
