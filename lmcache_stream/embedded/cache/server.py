"""The server: one ROUTER socket and one HTTP port over a ``CacheCore``."""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import zmq
import zmq.asyncio
from aiohttp import web

from ..._background import Background, to_the_end
from ..._workers import Workers
from ...cache.geometry import KVGeometry
from ...cache.messages import RegistrationReply
from ...errors import CacheConnectError, ClosedError, GeometryError, InvalidRequestError
from .core import CacheCore
from .http_api import application
from .options import CacheOptions, bytes_of
from .pool import Pool
from .requests import Requests
from .status import config_of, status_of

logger = logging.getLogger(__name__)

_TENDING_SECONDS = 1.0
_LARGEST_PORT = 65535


class EmbeddedCacheServer:
    """A cache server in this process, for one ``async with`` on the loop that it runs on.

    It speaks the protocol of LMCache 0.5.6 as ``lmcache server`` does with one tier, in memory, so
    that this library, ``lmcache.sdk`` and an engine find in it what they would find there.

    Args:
        host: an address of this machine to listen on.
        port: for the operations; 0 takes a free one.
        http_port: for HTTP; 0 takes a free one.
        chunk_size: tokens of a chunk.
        size_gb: GiB of the pool.
        shared_memory: whether clients of this machine map the pool; otherwise chunks travel as
            pickles.
        options: all settings at once, in place of the three before.
        clock: seconds, for the lifetimes of locks, requests and clients.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        http_port: int = 0,
        chunk_size: int = 256,
        size_gb: float = 1.0,
        shared_memory: bool = True,
        options: CacheOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for number, name in ((port, "port"), (http_port, "http_port")):
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number <= _LARGEST_PORT:
                raise InvalidRequestError(f"cache server: {name} must be a port number, not {number!r}")
        self._options = options or CacheOptions(
            chunk_size=chunk_size, size_bytes=bytes_of(size_gb), shared_memory=shared_memory
        )
        self._host = host
        self._port = port
        self._http_port = http_port
        self._clock = clock
        self._announced: dict[str, KVGeometry] = {}
        self._background = Background("cache server")
        self._workers = Workers("lmcache-stream cache server", limit=2)
        self._pool: Pool | None = None
        self._let_go: weakref.finalize[..., EmbeddedCacheServer] | None = None
        self._runner: web.AppRunner | None = None
        self._is_closed = False

    @property
    def url(self) -> str:
        """Where the operations are, as ``tcp://HOST:PORT``."""
        return f"tcp://{self._reachable}:{self._port}"

    @property
    def http_url(self) -> str:
        """Where HTTP is, as ``http://HOST:PORT``."""
        return f"http://{self._reachable}:{self._http_port}"

    @property
    def shm_name(self) -> str:
        """The name of the shared pool under /dev/shm; empty on the pickle plane."""
        return self._pool.name if self._pool is not None else ""

    @property
    def _reachable(self) -> str:
        return _in_url({"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}.get(self._host, self._host))

    def announce(self, model_name: str, geometry: KVGeometry) -> None:
        """Register an engine's KV as engines do that keep it on a device: with all that is to be known.

        ``lmcache.sdk`` finds no other engines, and clients need no configuration of the model then.

        Raises:
            GeometryError: the chunks are not of two planes, the only layout described here.
        """
        if geometry.layout != "two-plane":
            raise GeometryError(f"only a two-plane layout can be announced, not {geometry.layout!r}")
        self._announced[model_name] = geometry

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def start(self) -> None:
        """Begin to answer; ``async with`` does it.

        Raises:
            CacheError: no room for the pool.
            CacheConnectError: a port cannot be had.
            ClosedError: it was started before.
        """
        if self._is_closed or self._pool is not None:
            raise ClosedError("a cache server is started once")
        try:
            await self._start()
        except BaseException:
            await self.aclose()
            raise

    async def _start(self) -> None:
        options = self._options
        self._pool = pool = Pool(options.size_bytes, shared=options.shared_memory)
        offer = RegistrationReply(pool.name, pool.size if pool.name else 0)
        context = zmq.asyncio.Context()
        sockets: list[zmq.asyncio.Socket] = []
        # Also of a server that is forgotten, before the parts of it are finalized in any order.
        self._let_go = weakref.finalize(self, _let_go, pool, context, sockets)
        core = CacheCore(options, offer, pool.view, self._clock, self._announced, pool.back)
        socket = context.socket(zmq.ROUTER)
        sockets.append(socket)
        self._listen(socket)
        await self._background.start()
        requests = Requests(core, socket, self._background, self._workers)
        await self._serve_http(core)
        self._background.spawn(requests.serve())
        self._background.spawn(_tend(core))

    def _listen(self, socket: zmq.asyncio.Socket) -> None:
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.setsockopt(zmq.IPV6, int(":" in self._host))
            socket.bind(f"tcp://{_in_url(self._host)}:{self._port or '*'}")
        except zmq.ZMQError as error:
            raise CacheConnectError(
                f"the cache server cannot listen on {self._host}:{self._port}: {error}"
            ) from error
        endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        self._port = int(endpoint.rstrip(b"\0").rpartition(b":")[2])

    async def _serve_http(self, core: CacheCore) -> None:
        def config() -> dict[str, Any]:
            return config_of(core, host=self._host, port=self._port, http_port=self._http_port)

        app = application(core, lambda: status_of(core), config)
        self._runner = runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        host = None if self._host == "*" else self._host
        try:
            await web.TCPSite(runner, host, self._http_port).start()
        except OSError as error:
            raise CacheConnectError(
                f"the cache server cannot listen on {self._host}:{self._http_port} for HTTP: {error}"
            ) from error
        self._http_port = runner.addresses[0][1]

    async def aclose(self) -> None:
        """Stop answering and let go of everything; the segment is unlinked. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            await to_the_end(self._close())

    async def _close(self) -> None:
        try:
            await self._background.aclose()
            if self._runner is not None:
                await self._runner.cleanup()
        finally:
            self._workers.close()
            if self._let_go is not None:
                self._let_go()

    def __del__(self) -> None:
        if not getattr(self, "_is_closed", True) and self._pool is not None:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _let_go(pool: Pool, context: zmq.asyncio.Context, sockets: list[zmq.asyncio.Socket]) -> None:
    for socket in sockets:
        # ZeroMQ waits for ever for the end of a context that has an open one.
        socket.close(linger=0)
    context.term()
    pool.close()


async def _tend(core: CacheCore) -> None:
    while True:
        await asyncio.sleep(_TENDING_SECONDS)
        try:
            core.tend()
        except Exception:
            logger.exception("the cache server could not make room")
