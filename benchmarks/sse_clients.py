"""The clients of ``sse.py``, which read the same streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import httpx
import openai

from benchmarks.sse_server import MODEL, PROMPT, Settings
from lmcache_stream import TokenEvent, VLLMCompletions

__all__ = ["CLIENTS", "OURS", "Client"]

Client = Callable[[str, Settings], Coroutine[Any, Any, int]]


async def lmcache_stream(url: str, settings: Settings) -> int:
    """Read all streams with this library."""
    async with VLLMCompletions(url, MODEL) as completions:

        async def one() -> int:
            total = 0
            async for event in completions(PROMPT, {"max_tokens": settings.tokens}, ""):
                if isinstance(event, TokenEvent):
                    total += event.token_id
            return total

        return await together(one, settings)


async def httpx_and_json(url: str, settings: Settings) -> int:
    """Read all streams with httpx and json, in the obvious loop."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": settings.tokens, "stream": True}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:

        async def one() -> int:
            total = 0
            async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    data = line.removeprefix("data: ")
                    if data == "[DONE]":
                        break
                    for choice in json.loads(data)["choices"]:
                        total += sum(choice["token_ids"])
            return total

        return await together(one, settings)


async def openai_client(url: str, settings: Settings) -> int:
    """Read all streams with the openai client."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=None) as client:

        async def one() -> int:
            total = 0
            stream = await client.completions.create(
                model=MODEL, prompt=PROMPT, max_tokens=settings.tokens, stream=True
            )
            async for chunk in stream:
                for choice in chunk.choices:
                    total += sum((choice.model_extra or {})["token_ids"])
            return total

        return await together(one, settings)


async def bytes_alone(url: str, settings: Settings) -> int:
    """Read the bytes of all streams and look at none."""
    address, _, path = url.removeprefix("http://").partition("/")
    host, _, port = address.partition(":")
    body = json.dumps({"model": MODEL, "prompt": PROMPT}).encode()
    request = f"POST /{path}/v1/completions HTTP/1.1\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body

    class Drain(asyncio.Protocol):
        def __init__(self) -> None:
            self.done = asyncio.get_running_loop().create_future()

        def data_received(self, data: bytes) -> None:
            if data.endswith(b"0\r\n\r\n"):
                self.done.set_result(None)

    async def one() -> int:
        transport, protocol = await asyncio.get_running_loop().create_connection(Drain, host, int(port))
        assert isinstance(transport, asyncio.Transport)
        transport.write(request)
        await protocol.done
        transport.close()
        return sum(range(settings.tokens))

    return await together(one, settings)


async def together(one: Callable[[], Awaitable[int]], settings: Settings) -> int:
    """Run ``one`` for every stream and return the sum of all ids."""

    async def run() -> int:
        return await one()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run()) for _ in range(settings.streams)]
    return sum(task.result() for task in tasks)


OURS = "lmcache_stream"
CLIENTS: dict[str, Client] = {
    OURS: lmcache_stream,
    "httpx + json": httpx_and_json,
    "openai client": openai_client,
    "bytes alone": bytes_alone,
}
