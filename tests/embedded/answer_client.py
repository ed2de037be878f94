"""A client of the example servers, over real sockets."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

__all__ = ["Reply", "Told", "ask", "asking", "get", "samples"]

Told = tuple[str, dict[str, Any]]


@dataclass
class Reply:
    """An answer: either ``problem`` (JSON) or events, in the order of their arrival.

    Attributes:
        comments: heartbeats before the first event.
    """

    response: aiohttp.ClientResponse
    problem: dict[str, str] | None = None
    events: list[Told] = field(default_factory=list)
    comments: int = 0

    @property
    def status(self) -> int:
        return self.response.status

    @property
    def retry_after(self) -> int:
        return int(self.response.headers["Retry-After"])

    @property
    def text(self) -> str:
        """What the ``token`` events say together."""
        return "".join(data["text"] for name, data in self.events if name == "token")

    def data(self, name: str) -> dict[str, Any]:
        """Return the data of the one event ``name``."""
        (found,) = (data for kind, data in self.events if kind == name)
        return found

    async def read(self) -> AsyncIterator[Told | None]:
        """Yield events as they come, and None for a heartbeat."""
        name = ""
        async for raw in self.response.content:
            line = raw.decode().rstrip("\n")
            if line.startswith(":"):
                self.comments += not self.events
                yield None
            elif line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                self.events.append((name, json.loads(line.removeprefix("data: "))))
                yield self.events[-1]
            else:
                assert line == "", line


@asynccontextmanager
async def asking(url: str, body: object) -> AsyncIterator[Reply]:
    """Post a request over a connection of its own; leaving the block leaves the answer."""
    data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
    connector = aiohttp.TCPConnector(force_close=True)
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(f"{url}/v1/answers", data=data) as response,
    ):
        reply = Reply(response)
        if response.content_type != "text/event-stream":
            reply.problem = (await response.json())["error"]
        try:
            yield reply
        finally:
            # Not back to the pool: the rest of the answer is not waited for.
            response.close()
            await asyncio.sleep(0)


async def ask(url: str, body: object) -> Reply:
    """Return a whole answer."""
    async with asking(url, body) as reply:
        if reply.problem is None:
            async for _ in reply.read():
                pass
    return reply


async def get(url: str) -> tuple[int, str]:
    """GET ``url`` over a connection of its own."""
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session, session.get(url) as response:
        return response.status, await response.text()


async def samples(url: str) -> dict[str, float]:
    """Return what ``/metrics`` says: ``name{label}`` and value, of metrics with one label at most."""
    status, text = await get(f"{url}/metrics")
    assert status == 200
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "le" not in sample.labels:
                label = "".join(f"{{{value}}}" for value in sample.labels.values())
                found[sample.name + label] = sample.value
    return found
