"""Opening and closing of a context: what it owns, and the event loop that it belongs to."""

from __future__ import annotations

import asyncio
import logging
import warnings
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from .._background import to_the_end
from .._workers import Workers
from ..errors import ClosedError
from .lookups import Lookups
from .peer import Peer
from .server_queries import ServerQueries
from .threads import tensor_workers

__all__ = ["Lifecycle"]

logger = logging.getLogger(__name__)

# Seconds that closing waits for transfers which were left by their callers.
_CLOSE_GRACE = 5.0


class Lifecycle(ABC):
    """Owns a peer and worker threads; used on one event loop, closed once.

    Attributes:
        queries: the engine's queries, where ``connect`` was told to open their cache.
    """

    def __init__(self, peer: Peer) -> None:
        self.queries: ServerQueries | None = None
        self._peer = peer
        self._lookups = Lookups(peer)
        self._workers = tensor_workers("lmcache-stream")
        # Apart, so that edits, however long they take, never hold up the filling of a slot.
        self._edit_workers = Workers("lmcache-stream edit")
        # Apart again: a function that hangs must hold up nothing but others like it.
        self._caller_workers = Workers("lmcache-stream caller")
        self._is_closed = False
        self._closed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @property
    @abstractmethod
    def model_name(self) -> str:
        """The model's name on the cache server."""

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"the LMCache context of {self.model_name!r} is closed")
        self._check_loop()

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise ClosedError(
                f"the LMCache context of {self.model_name!r} belongs to the event loop that it was opened on"
            )

    async def aclose(self) -> None:
        """Unregister and close every socket; the server's pool stays. Idempotent."""
        self._check_loop()
        if self._is_closed:
            await self._closed.wait()
            return
        self._is_closed = True
        try:
            await to_the_end(self._close())
        finally:
            self._closed.set()

    async def _close(self) -> None:
        try:
            if self.queries is not None:
                await self.queries.aclose()
            self._lookups.release_all()
            left = await self._peer.aclose(grace=_CLOSE_GRACE)
        finally:
            self._workers.close()
            self._edit_workers.close()
            self._caller_workers.close()
        if left:
            logger.warning(
                "%d operations on LMCache at %s got no answer before closing; their locks end with "
                "their time to live",
                left,
                self._peer.requests.url,
            )

    async def __aenter__(self) -> Self:
        self._check_open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True):
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2)
