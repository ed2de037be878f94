"""A server on loopback that does, byte by byte, what a script says."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

STREAM = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"


def event(
    ids: Sequence[int] | None = None, text: str = "", reason: str | None = None, **further: Any
) -> bytes:
    """Return one event as vLLM sends it."""
    choice = {
        "index": 0,
        "text": text,
        "logprobs": None,
        "finish_reason": reason,
        "stop_reason": None,
        "prompt_token_ids": None,
        "token_ids": ids,
        **further,
    }
    chunk = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


def usage(prompt: int, completion: int, cached: int | None = None) -> bytes:
    """Return the event that ends a stream's choices."""
    counts: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    if cached is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return b"data: " + json.dumps({"id": "cmpl-1", "choices": [], "usage": counts}).encode() + b"\n\n"


@dataclass
class Incoming:
    """A request as it came."""

    line: str
    headers: dict[str, str]
    json: dict[str, Any]


class Connection:
    """The server's end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def request(self) -> Incoming:
        """Read one request, body and all."""
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *rest = head.strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in rest)}
        body = b""
        if headers.get("transfer-encoding") == "chunked":
            while size := int(await self._reader.readline(), 16):
                body += await self._reader.readexactly(size)
                await self._reader.readline()
            await self._reader.readline()
        else:
            body = await self._reader.readexactly(int(headers.get("content-length", 0)))
        return Incoming(line, headers, json.loads(body) if body else {})

    async def raw(self, data: bytes) -> None:
        """Send ``data`` as it is."""
        self._writer.write(data)
        await self._writer.drain()

    async def head(self, status: str = "200 OK", content_type: str = STREAM, *further: str) -> None:
        """Send the head of a chunked response."""
        lines = [
            f"HTTP/1.1 {status}",
            f"content-type: {content_type}",
            "transfer-encoding: chunked",
            *further,
        ]
        await self.raw("\r\n".join([*lines, "", ""]).encode())

    async def send(self, *pieces: bytes) -> None:
        """Send each of ``pieces`` in an HTTP chunk of its own."""
        for piece in pieces:
            await self.raw(b"%x\r\n%s\r\n" % (len(piece), piece))

    async def end(self) -> None:
        """Send the chunk that ends a response; the connection stays open."""
        await self.raw(b"0\r\n\r\n")

    async def answer(self, *events: bytes) -> None:
        """Send a whole response."""
        await self.head()
        await self.answer_body(*events)

    async def answer_body(self, *events: bytes) -> None:
        """Send the rest of a response, from the body on."""
        await self.send(*events)
        await self.end()

    async def reply(self, status: str, body: bytes, content_type: str = "application/json") -> None:
        """Send a whole response that is no stream."""
        length = f"content-length: {len(body)}"
        await self.raw(
            f"HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\n{length}\r\n\r\n".encode() + body
        )

    def close(self) -> None:
        """Close the connection in an orderly way."""
        self._writer.close()

    def reset(self) -> None:
        """Break the connection."""
        self._writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )
        self._writer.transport.abort()

    async def lost(self) -> None:
        """Wait until the client has closed its end."""
        with contextlib.suppress(ConnectionError):
            while await self._reader.read(65536):
                pass

    async def stays(self, seconds: float = 0.15) -> bool:
        """Whether the client keeps its end open for a while."""
        try:
            async with asyncio.timeout(seconds):
                await self.lost()
        except TimeoutError:
            return True
        return False


Script = Callable[[Connection], Awaitable[None]]


@dataclass
class ScriptedServer:
    """Runs a script for each connection, the last of ``scripts`` for all that follow.

    A script that fails fails the test, when the server is left.
    """

    scripts: Sequence[Script]
    connections: int = 0
    failures: list[BaseException] = field(default_factory=list)
    _server: asyncio.Server | None = None
    _running: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**24)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)
        if self.failures:
            raise self.failures[0]

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def url(self) -> str:
        """Where it listens, as an address."""
        return f"http://127.0.0.1:{self.port}"

    async def finished(self) -> None:
        """Wait until every script that has begun has ended."""
        if self._running:
            await asyncio.wait_for(asyncio.wait(set(self._running)), 10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        script = self.scripts[min(self.connections, len(self.scripts) - 1)]
        self.connections += 1
        try:
            await script(Connection(reader, writer))
        except (asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        except BaseException as error:
            self.failures.append(error)
        finally:
            self._running.discard(task)
            writer.close()


@contextlib.asynccontextmanager
async def serving(*scripts: Script) -> AsyncIterator[ScriptedServer]:
    """Run a server for the time of a test, and see that what its scripts assert holds."""
    async with ScriptedServer(scripts) as server:
        yield server


def playing(*events: bytes) -> Script:
    """Return a script that answers every request with the same events."""

    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            await connection.answer(*events)

    return script
