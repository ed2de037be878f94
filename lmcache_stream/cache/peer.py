"""One registered client of one LMCache server."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from .._background import Background
from ..errors import (
    CacheConnectError,
    CacheError,
    CacheTimeoutError,
    ClosedError,
    LMCacheStreamError,
)
from . import layouts
from .geometry import KVGeometry
from .http import CacheHTTP
from .messages import (
    END_SESSION,
    REGISTER,
    TRANSFERS,
    UNREGISTER,
    Operation,
    PrefixKey,
    Registration,
    RegistrationReply,
)
from .requests import RequestClient
from .shared_memory import SharedPool
from .timeouts import Timeouts

T = TypeVar("T")

# The server reaps a client that never pinged after an hour; one that comes back from a pause, or to
# a server that was restarted, registers again instead of pinging, which would start a 120 s clock.
_IDLE_SECONDS = 30.0
# What the server holds for us it lets go of by itself after this time (its read-lock TTL). Until then
# a late reply is still waited for, in the background, so that what it grants can be given back.
LATE_SECONDS = 300.0
# How long closing waits for the locks of callers that are still at work to be given back.
_LEAVE_SECONDS = 1.0
# Names of registrations that are no engine's: ours, and the server's query caches.
OWN_MARK = "##lmcs-"


class Peer:
    """The server as everything above sees it: operations, keys, a registration that is renewed.

    Registered under a name of our own, because registering the engine's name would replace the
    layout that the live engine's lookups use; the keys carry the engine's name.
    """

    def __init__(
        self,
        requests: RequestClient,
        http: CacheHTTP,
        *,
        model_name: str,
        chunk_size: int,
        timeouts: Timeouts,
        alone: bool,
    ) -> None:
        self.requests = requests
        self.http = http
        self.model_name = model_name
        self.chunk_size = chunk_size
        self.timeouts = timeouts
        self.background = Background(f"LMCache context of {model_name}")
        self.pool: SharedPool | None = None
        self.instance_id = 0
        # Stores whose slots the server reserved for us and that were not committed: unregistering, or
        # being unregistered, would publish them unfilled.
        self.unfilled: dict[str, int] = {}
        # Ends what only waits for its caller, once closing waits no longer; then nothing more is used of it.
        self.leaving: list[Callable[[], None]] = []
        self.has_left = False
        # Registrations that ended before this one; transfers may still run on them until closing.
        self._outdated: list[int] = []
        self._alone = alone
        self._geometry: KVGeometry | None = None
        self._registering = asyncio.Lock()
        self._connections = 0
        self._announced = 0
        self._last_used = -math.inf

    @property
    def geometry(self) -> KVGeometry:
        """The geometry that was registered."""
        assert self._geometry is not None, "register() comes first"
        return self._geometry

    async def register(self, geometry: KVGeometry) -> None:
        """Announce ``geometry`` under a new instance id; an earlier one lives on for what runs on it.

        Raises:
            CacheTimeoutError: the server does not take this client; it says so by silence.
        """
        async with self._registering:
            before = self.instance_id, self._geometry
            self.instance_id, self._geometry = secrets.randbits(63), geometry
            try:
                await self._register()
            except BaseException as error:
                if not isinstance(error, CacheTimeoutError):
                    # It may have arrived all the same.
                    self._outdated.append(self.instance_id)
                self.instance_id, self._geometry = before
                raise
            if before[0]:
                self._outdated.append(before[0])

    def adopt_layout(self, layout: str) -> None:
        """Decode chunks by another layout of the same shape; the server knows shapes only."""
        self._geometry = replace(self.geometry, layout=layout)

    def retire(self) -> None:
        """Let the next operation register under a new id; what runs on this one keeps it."""
        if self.instance_id:
            self._outdated.append(self.instance_id)
            self.instance_id = secrets.randbits(63)

    async def call(self, operation: Operation[T], *payloads: Any, deadline: float) -> T:
        """Send one operation; see ``RequestClient.call``."""
        result = await self.requests.call(operation, *payloads, deadline=deadline)
        if operation is REGISTER or operation in TRANSFERS:
            # Nothing else keeps the server from taking this client for gone.
            self._last_used = time.monotonic()
        return result

    def end_session_soon(self, request_id: str) -> None:
        """Let the server forget an operation, in the background: nothing depends on it, and where the
        engine has unregistered its model the server does so without an answer.
        """
        with contextlib.suppress(ClosedError):
            self.background.spawn(self._end_session(request_id))

    async def _end_session(self, request_id: str) -> None:
        with contextlib.suppress(CacheError, ClosedError):
            await self.call(END_SESSION, request_id, deadline=self.timeouts.connect)

    async def ensure_registered(self) -> None:
        """Register again after idleness, or after the connection came up anew.

        A registration that is under way is waited for: the server works on requests side by side.
        """
        if self._is_fresh():
            return
        async with self._registering:
            if not self._is_fresh():
                await self._register()

    def _is_fresh(self) -> bool:
        idle = time.monotonic() - self._last_used
        is_same = self._connections == self.requests.connections and self._announced == self.instance_id
        return is_same and idle < _IDLE_SECONDS

    async def _register(self) -> None:
        geometry = self.geometry
        layout = layouts.get(geometry.layout)
        name = self.model_name if self._alone else f"{self.model_name}{OWN_MARK}{self.instance_id:x}"
        reply = await self.call(
            REGISTER,
            Registration(
                instance_id=self.instance_id,
                model_name=name,
                world_size=geometry.world_size,
                block_size=geometry.block_size,
                num_layers=geometry.num_layers,
                hidden_dim_size=layout.hidden_dim_size(geometry),
                dtype_str=str(geometry.dtype).removeprefix("torch."),
                use_mla=layout.single_plane,
                num_physical_slots=self.chunk_size,
            ),
            deadline=self.timeouts.connect,
        )
        self._map_pool(reply)
        # After the pool: where that cannot be mapped, the one before it must not stay in use.
        self._connections, self._announced = self.requests.connections, self.instance_id

    def _map_pool(self, reply: RegistrationReply) -> None:
        if not reply.shm_name or reply.pool_size <= 0:
            pool, self.pool = self.pool, None
            # Nothing is reserved on the pickle plane.
            self.unfilled.clear()
        elif self.pool is not None and self.pool.is_current(reply.shm_name, reply.pool_size):
            return
        else:
            pool, self.pool = self.pool, SharedPool(reply.shm_name, reply.pool_size)
            # A new pool means a new server, which holds nothing of ours.
            self.unfilled.clear()
        if pool is not None:
            pool.close()

    def key(
        self,
        tokens: Sequence[int],
        cache_salt: str,
        request_id: str,
        *,
        start: int = 0,
        worker_id: int | None = 0,
    ) -> PrefixKey:
        """Name the chunks of ``tokens[start:]`` behind the prefix before them."""
        return PrefixKey(
            model_name=self.model_name,
            world_size=self.geometry.world_size,
            worker_id=worker_id,
            token_ids=tokens,
            start=start,
            end=len(tokens),
            request_id=request_id,
            cache_salt=cache_salt,
        )

    async def explain(self, what: str, deadline: float) -> CacheError:
        """Return the error for a silence: what the server's status says is the likely reason."""
        tried = (
            f"{what} at {self.requests.url} (model {self.model_name!r}) got no answer within {deadline:g} s"
        )
        if not self.requests.is_up:
            return CacheConnectError(f"{tried}: no server is connected there. Is `lmcache server` running?")
        try:
            status = await self.http.status()
        except LMCacheStreamError as error:
            return CacheConnectError(f"{tried}, and {self.http.url} says: {error}")
        registered = status.get("registered_non_cuda_instance_ids")
        ours = {self.instance_id, *self._outdated}
        if isinstance(registered, list) and ours.isdisjoint(registered):
            # Then no reply will come to what still waits, and nothing of ours is left to commit.
            self._last_used = -math.inf
            self.requests.give_up(TRANSFERS)
            self.unfilled.clear()
            return CacheTimeoutError(
                f"{tried}: the server no longer knows this client (was it restarted?). It registers "
                "again before the next operation: try once more"
            )
        if not status.get("is_healthy", True):
            return CacheTimeoutError(f"{tried}: {self.http.url}/status calls the server unhealthy")
        return CacheTimeoutError(
            f"{tried}, though its status is healthy. It is busy, or the operation failed there, "
            "which it answers with silence: see the server's log"
        )

    async def aclose(self, *, grace: float) -> int:
        """Let what runs come to its end, unregister, close everything.

        Returns the number of operations that had to be left before their end.
        """
        await self.background.settle(grace)
        self.has_left = True
        for end in self.leaving:
            end()
        left = await self.background.settle(min(_LEAVE_SECONDS, self.timeouts.connect))
        known = [*self._outdated, *([self.instance_id] if self.instance_id else [])]
        self.instance_id = 0
        self._outdated.clear()
        try:
            for instance_id in known:
                if self.requests.is_up and instance_id not in self.unfilled.values():
                    await self.call(UNREGISTER, instance_id, deadline=min(2.0, self.timeouts.connect))
        except CacheError:
            # The server forgets silent clients by itself.
            pass
        finally:
            # First the connection, so that nothing of what is left waits for a reply.
            await self.requests.aclose()
            await self.background.aclose()
            await self.http.aclose()
            if self.pool is not None:
                self.pool.close()
                self.pool = None
        return left
