"""One request and its response: the only place that knows aiohttp's ways."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import aiohttp

from ..errors import (
    EngineConnectError,
    EngineError,
    EngineStatusError,
    EngineStreamError,
    EngineTimeoutError,
    TruncatedStreamError,
)
from .body import lighten
from .endpoint import Proxy
from .foreign import FOREIGN, advice, said
from .problems import hint, problem, retry_after
from .sse import ServerSentEvent, SSEDecoder

__all__ = ["Exchange", "Request", "ask", "new_session"]

# vLLM closes a connection that was idle for 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE): one that is used
# before that cannot be closed while a request is on its way.
_KEEP_ALIVE = 4.0
_PIECE = 2**20
_BODY_LIMIT = 65_536
_BODY_TIME = 5.0
_END_TIME = 0.25
_LOOK_AFTER = 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent, and how long a connection may take, in seconds."""

    url: str
    headers: Mapping[str, str]
    connect: float | None
    proxy: Proxy | None = None
    body: bytes = b""
    method: str = "POST"

    @property
    def where(self) -> str:
        """Method and address, as errors name them."""
        return f"{self.method} {self.url}"

    def with_body(self, body: bytes) -> Request:
        """Return the same request with ``body``."""
        return replace(self, body=body)


@dataclass(slots=True, eq=False)
class Exchange:
    """A connection from the POST to its end.

    Attributes:
        request: what is sent.
        connected: there is a connection, so that the engine may know of the request.
        reused: the connection had served another request before.
        left: nobody waits for the answer any more.
        arrived: ``time.perf_counter()`` of the last read in ``open``.
        events: what ``open`` has read.
    """

    session: aiohttp.ClientSession
    request: Request
    sse: SSEDecoder = field(default_factory=SSEDecoder)
    connected: bool = False
    reused: bool = False
    left: bool = False
    arrived: float = 0.0
    events: list[ServerSentEvent] = field(default_factory=list)
    _response: aiohttp.ClientResponse | None = None
    _open: bool = False
    _opening: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Send the request and hold the connection until the engine has begun to answer.

        To close it earlier can end the engine for everybody: it may be loading KV for this request
        from the cache (LMCache#4938). So this runs in a task of its own, which nobody's leaving
        stops, and closes the connection itself if nobody is there by then. A comment is no answer:
        vLLM's front end sends them while the engine is still busy.
        """
        self._opening = asyncio.current_task()
        _current.set(self)
        if not self.left:
            await self._hold()

    async def _hold(self) -> None:
        try:
            response = self._response = await self._post()
            lighten(response.content)
            self._look_after(response)
            if not self.left:
                await self._refuse_other_answers(response)
            while not (self.events or self.sse.inside_data):
                chunk = await response.content.readany()
                if not chunk:
                    break
                self.arrived = time.perf_counter()
                self.events = self.sse.feed(chunk)
        except FOREIGN as error:
            self.close()
            raise self.error(error) from error
        except BaseException:
            self.close()
            raise
        self._open = True
        if self.left:
            self.close()

    async def _post(self) -> aiohttp.ClientResponse:
        try:
            return await self.send()
        except (aiohttp.ServerDisconnectedError, ConnectionResetError, aiohttp.ClientOSError) as error:
            # The server closed an idle connection just when it was taken out of the pool. Where a
            # part of an answer came, it was not idle.
            part = isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str)
            if not self.reused or part or self.left:
                raise
        return await self.send()

    async def send(self) -> aiohttp.ClientResponse:
        """Send the request and return the response once its headers are there."""
        request = self.request
        # What is large is sent piece by piece, as from a file, so that it does not hold the loop.
        large = len(request.body) > _PIECE
        return await self.session.request(
            request.method,
            request.url,
            data=io.BytesIO(request.body) if large else request.body or None,
            headers=request.headers,
            allow_redirects=False,
            proxy=request.proxy.url if request.proxy is not None else None,
            timeout=aiohttp.ClientTimeout(total=None, connect=request.connect),
        )

    async def _refuse_other_answers(self, response: aiohttp.ClientResponse) -> None:
        if response.status < 300 and response.content_type == "text/event-stream":
            return
        body = await _beginning(response)
        where = self.request.where
        detail = problem(body)
        if response.status >= 300:
            if response.status < 400:
                detail = f"redirect to {response.headers.get('Location')}"
            raise EngineStatusError(
                f"{where}: HTTP {response.status}: {detail or response.reason}; {hint(response.status)}",
                status=response.status,
                detail=detail,
                retry_after=retry_after(response.headers.get("Retry-After")),
            )
        raise EngineStreamError(
            f"{where}: the answer is {response.content_type}, not an event stream: {detail!r}; "
            "is base_url= the address of a vLLM server?"
        )

    def _look_after(self, response: aiohttp.ClientResponse) -> None:
        # A chunk that is none makes aiohttp (3.14) drop the connection and leave the reader waiting.
        if response.connection is None:
            return
        if response.connection.transport is None:
            response.close()
        else:
            asyncio.get_running_loop().call_later(_LOOK_AFTER, self._look_after, response)

    def reader(self) -> Callable[[], Awaitable[bytes]]:
        """Return what waits for bytes and returns all that arrived; none at the end of the answer."""
        assert self._response is not None
        return self._response.content.readany

    def rest(self) -> bytes:
        """Return what had arrived before the connection failed and was not read yet."""
        assert self._response is not None
        content = self._response.content
        # aiohttp gives the failure before the bytes in front of it, unless it is taken away.
        content.set_exception(None)  # type: ignore[arg-type]
        return content.read_nowait()

    async def finish(self) -> None:
        """Read to the end of an answer that is complete, so that its connection can be used again."""
        read = self.reader()
        try:
            async with asyncio.timeout(_END_TIME):
                while await read():
                    pass
        except FOREIGN:
            self.close()

    def leave(self) -> None:
        """Close the connection, or let ``open`` close it where the engine has not answered yet."""
        self.left = True
        if self._open:
            self.close()
        elif self._opening is not None and not self.connected:
            self._opening.cancel()

    def close(self) -> None:
        """Close the connection; a reader is woken. One whose answer was read goes back to the pool."""
        if self._response is not None and not self._response.content.is_eof():
            self._response.close()

    def error(self, error: BaseException, token_ids: list[int] | None = None) -> EngineError:
        """Return the library's error for one of aiohttp's."""
        where = self.request.where
        ids = token_ids or []
        if self._response is not None:
            return TruncatedStreamError(
                f"{where}: the connection broke after {len(ids)} tokens ({said(error)}): the answer "
                "is not complete; see the engine's log, and any proxy between",
                token_ids=ids,
            )
        if isinstance(error, aiohttp.ServerTimeoutError | asyncio.TimeoutError):
            return EngineTimeoutError(
                f"{where}: no connection within {self.request.connect} s: is the engine up, and "
                "base_url= right? timeouts= sets the deadline",
                connecting=True,
            )
        return EngineConnectError(f"{where}: {said(error)}; {advice(error, self.request.proxy)}")


async def ask(session: aiohttp.ClientSession, request: Request, timeout: float) -> bytes:
    """Send a small question and return the answer's body.

    Raises:
        EngineError: it was not answered with success in time.
    """
    exchange = Exchange(session, request)
    try:
        async with asyncio.timeout(timeout), await exchange.send() as response:
            body = await response.read()
            if response.status != 200:
                raise EngineStatusError(
                    f"{request.where}: HTTP {response.status}: {problem(body)}; {hint(response.status)}",
                    status=response.status,
                    detail=problem(body),
                )
            return body
    except FOREIGN as error:
        raise exchange.error(error) from error


async def _beginning(response: aiohttp.ClientResponse) -> bytes:
    body = b""
    try:
        async with asyncio.timeout(_BODY_TIME):
            while len(body) < _BODY_LIMIT and (chunk := await response.content.readany()):
                body += chunk
    except FOREIGN:
        # A part of the explanation is better than none.
        pass
    return body[:_BODY_LIMIT]


_current: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


async def _mark(session: object, context: object, params: object) -> None:
    exchange = _current.get()
    if exchange is not None:
        exchange.connected = True
        exchange.reused = isinstance(params, aiohttp.TraceConnectionReuseconnParams)


def new_session() -> aiohttp.ClientSession:
    """Return a session for :class:`Exchange`: any number of connections, nothing kept but these."""
    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(_mark)
    trace.on_connection_reuseconn.append(_mark)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        trace_configs=[trace],
    )
