"""The request client: one DEALER socket, replies matched to requests by uid."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from typing import Any, TypeVar

import anyio
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from .._background import Background
from .._listener import Spoken, listener_at
from ..errors import CacheConnectError, CacheTimeoutError, ClosedError
from .messages import Frame, Operation, decode_result, decode_uid, encode_request

T = TypeVar("T")
logger = logging.getLogger(__name__)

_HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)
# How long an error may take to find out who it is that answers in place of LMCache.
_LOOK_SECONDS = 2.0


class RequestClient:
    """Sends operations to one LMCache server and awaits their results.

    The socket's monitor tells when the server is gone, so that a dead server is an error at once and
    not a deadline. ``connections`` counts how often the connection came up: a change of it means
    that the server may have been restarted and know nothing of what was registered.
    """

    def __init__(self, url: str, *, connect_timeout: float) -> None:
        self._url = url
        self._connect_timeout = connect_timeout
        self._uids = itertools.count(1)
        self._waiting: dict[int, tuple[Operation[Any], asyncio.Future[Sequence[Frame]]]] = {}
        self._up = asyncio.Event()
        self._is_refused = False
        self._background = Background(f"LMCache at {url}")
        self._context: zmq.asyncio.Context | None = None
        self._socket: zmq.asyncio.Socket | None = None
        self._monitor: zmq.asyncio.Socket | None = None
        self.connections = 0

    @property
    def url(self) -> str:
        return self._url

    @property
    def is_up(self) -> bool:
        """Whether a server is connected just now."""
        return self._socket is not None and self._up.is_set()

    async def start(self) -> None:
        """Open the socket; the connection itself is waited for by the first call."""
        self._context = zmq.asyncio.Context()
        try:
            self._socket = socket = self._context.socket(zmq.DEALER)
            socket.setsockopt(zmq.LINGER, 0)
            # Nothing is queued for a server that is not there and may come back as another one.
            socket.setsockopt(zmq.IMMEDIATE, 1)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.CONNECT_TIMEOUT, max(1, round(self._connect_timeout * 1000)))
            socket.setsockopt(zmq.RECONNECT_IVL, 100)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
            # Answered by the server's I/O thread however busy it is: finds a dead network, not a slow
            # handler.
            socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20000)
            socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
            socket.setsockopt(zmq.IPV6, 1)
            self._monitor = socket.get_monitor_socket()
            socket.connect(self._url)
        except zmq.ZMQError as error:
            await self.aclose()
            raise CacheConnectError(f"cannot open a socket to LMCache at {self._url}: {error}") from error
        await self._background.start()
        self._background.spawn(self._watch(self._monitor))
        self._background.spawn(self._receive(socket))

    async def call(self, operation: Operation[T], *payloads: Any, deadline: float) -> T:
        """Send one operation and return its result within ``deadline`` seconds.

        Raises:
            CacheConnectError: no connection, or it broke before the reply.
            CacheTimeoutError: silence, which is also how this server answers its own errors.
            ClosedError: the client is closed.
        """
        socket = await self._connected(operation)
        uid = next(self._uids)
        reply: asyncio.Future[Sequence[Frame]] = asyncio.get_running_loop().create_future()
        self._waiting[uid] = (operation, reply)
        try:
            with anyio.fail_after(deadline):
                await _send(socket, encode_request(uid, operation, payloads), reply)
                frames = await reply
        except TimeoutError as error:
            if not self.is_up:
                raise self._broken(operation) from error
            raise CacheTimeoutError(
                f"LMCache at {self._url} did not answer {operation.name} within {deadline:g} s"
            ) from error
        except zmq.ZMQError as error:
            raise CacheConnectError(
                f"{operation.name} could not be sent to LMCache at {self._url}: {error}"
            ) from error
        finally:
            self._waiting.pop(uid, None)
        return decode_result(operation, frames)

    def _open_socket(self) -> zmq.asyncio.Socket:
        if self._socket is None:
            raise ClosedError(f"the connection to LMCache at {self._url} is closed")
        return self._socket

    async def _connected(self, operation: Operation[Any]) -> zmq.asyncio.Socket:
        self._open_socket()
        try:
            with anyio.fail_after(self._connect_timeout):
                await self._up.wait()
        except TimeoutError as error:
            raise CacheConnectError(
                f"{operation.name}: no LMCache server at {self._url} within "
                f"{self._connect_timeout:g} s{await self._who()}. Is `lmcache server` running, and is "
                "this the port of its --port option?"
            ) from error
        return self._open_socket()

    async def _who(self) -> str:
        if not self._is_refused:
            return ""
        found = await listener_at(self._url, deadline=_LOOK_SECONDS)
        who = found.spoken.value if found.spoken is Spoken.HTTP else "something answers there"
        return f" ({who}, but it does not speak ZeroMQ)"

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.connections += 1
                self._is_refused = False
                self._up.set()
            elif event in _HANDSHAKE_FAILURES:
                self._is_refused = True
            elif event == zmq.EVENT_DISCONNECTED:
                self._up.clear()
                self._fail_waiting()
            elif event == zmq.EVENT_MONITOR_STOPPED:
                return

    def _broken(self, operation: Operation[Any]) -> CacheConnectError:
        return CacheConnectError(
            f"the connection to LMCache at {self._url} broke during {operation.name}: "
            "was the server stopped or restarted?"
        )

    def give_up(self, operations: Sequence[Operation[Any]]) -> None:
        """Let what waits for the reply of one of ``operations`` fail, where none can come."""
        for operation, reply in self._waiting.values():
            if operation in operations:
                _fail(reply, self._broken(operation))

    def _fail_waiting(self) -> None:
        self.give_up([operation for operation, _ in self._waiting.values()])

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            parts = await socket.recv_multipart(copy=False)
            frames = [part.buffer for part in parts]
            uid = decode_uid(frames)
            waiting = self._waiting.get(uid) if uid is not None else None
            if waiting is None:
                logger.debug("LMCache at %s: a late or unknown reply is dropped", self._url)
            elif not waiting[1].done():
                waiting[1].set_result(frames)

    async def aclose(self) -> None:
        """Close the socket and fail what still waits; idempotent."""
        socket, self._socket = self._socket, None
        monitor, self._monitor = self._monitor, None
        context, self._context = self._context, None
        # Wakes what waits for a connection.
        self._up.set()
        for operation, reply in self._waiting.values():
            _fail(
                reply,
                ClosedError(f"the connection to LMCache at {self._url} was closed during {operation.name}"),
            )
        await self._background.aclose()
        if socket is not None:
            if monitor is not None:
                socket.disable_monitor()
                monitor.close(linger=0)
            socket.close(linger=0)
        if context is not None:
            context.term()


async def _send(socket: zmq.asyncio.Socket, frames: list[bytes], reply: asyncio.Future[Any]) -> None:
    """Send ``frames``, unless ``reply`` fails first."""
    sent = asyncio.ensure_future(socket.send_multipart(frames, copy=False))
    try:
        # Where the connection has just broken, this would wait for the next server.
        await asyncio.wait({sent, reply}, return_when=asyncio.FIRST_COMPLETED)
        if sent.done() and not sent.cancelled():
            sent.result()
    finally:
        sent.cancel()


def _fail(reply: asyncio.Future[Any], error: Exception) -> None:
    if not reply.done():
        reply.set_exception(error)
        # Marks it as seen: who waited may have just left.
        reply.exception()
