"""An engine and its cache server, embedded or real, as tests of both see them."""

from __future__ import annotations

import asyncio
import random
import secrets
import urllib.request
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

import lmcache_stream as lms

from ..real.stack import get_json

CHUNK_SIZE = 32
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def engines() -> pytest.MarkDecorator:
    """Run a test on the embedded stack and on the real one."""
    names: list[Any] = ["embedded", pytest.param("real", marks=pytest.mark.real)]
    return pytest.mark.parametrize("stack", names, indirect=True)


def fresh_prompt(length: int) -> list[int]:
    """Return token ids that every vocabulary here has, and no other test."""
    chance = random.Random(secrets.token_bytes(8))
    return [chance.randrange(20, 250) for _ in range(length)]


def fresh_salt() -> str:
    return f"test-{secrets.token_hex(6)}"


@dataclass(frozen=True)
class StackPlace:
    """Where a stack is.

    Attributes:
        model_name: the model on the cache server.
        served_name: the model in the engine's API.
        vocab_size: token ids are below it.
        max_model_len: the engine's limit.
        eos: the id that ends an answer.
    """

    url: str
    http_url: str
    engine_url: str
    model_name: str
    served_name: str
    vocab_size: int
    max_model_len: int
    eos: int

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[tuple[lms.AsyncLMCacheContext, lms.VLLMCompletions]]:
        async with (
            lms.connect(self.url, self.http_url, self.model_name) as context,
            lms.VLLMCompletions(self.engine_url, self.served_name) as completions,
        ):
            yield context, completions

    async def locked(self) -> tuple[int, int]:
        """Counts of read-locked and write-locked chunks."""
        status = await asyncio.to_thread(get_json, f"{self.http_url}/status")
        l1 = status["storage_manager"]["l1_manager"]
        return l1["read_locked_count"], l1["write_locked_count"]

    async def until_unlocked(self) -> None:
        await _until(self._is_unlocked)

    async def _is_unlocked(self) -> bool:
        return await self.locked() == (0, 0)

    async def clear(self, *, force: bool = False) -> None:
        body = {"tier": "l1", "force": force}
        await asyncio.to_thread(get_json, f"{self.http_url}/cache/clear", body=body)

    async def running(self) -> int:
        """Requests that the engine works on, by its own count."""

        def ask() -> int:
            with urllib.request.urlopen(f"{self.engine_url}/metrics", timeout=10) as answer:
                lines = answer.read().decode().splitlines()
            found = [line for line in lines if line.startswith("vllm:num_requests_running")]
            return round(sum(float(line.rsplit(" ", 1)[1]) for line in found))

        return await asyncio.to_thread(ask)

    async def until_idle(self) -> None:
        async def is_idle() -> bool:
            return await self.running() == 0

        await _until(is_idle)

    async def post(self, body: Any, path: str = "/v1/completions") -> tuple[int, Any]:
        """Return status and JSON of a request."""
        async with (
            aiohttp.ClientSession(self.engine_url) as session,
            session.post(path, json={"model": self.served_name, **body}) as response,
        ):
            return response.status, await response.json()


async def _until(check: Any) -> None:
    for _ in range(200):
        if await check():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not come about")


class Recording:
    """A PostCompletion that counts what it sends and can do something just before."""

    def __init__(self, engine: lms.VLLMCompletions) -> None:
        self.sent = 0
        self.before: Any = None
        self._engine = engine

    async def __call__(
        self, prompt: Sequence[int], params: Mapping[str, Any], salt: str, /
    ) -> AsyncIterator[lms.TokenEvent | lms.FinishEvent]:
        self.sent += 1
        if self.before is not None:
            await self.before()
        async for event in self._engine(prompt, params, salt):
            yield event
