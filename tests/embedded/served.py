"""The example servers in a test's own loop, over an embedded stack with a tiny model."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import fastapi_server
import server
from document_service import DocumentService, Limits
from serving import Servers

from lmcache_stream.embedded import EmbeddedStack
from lmcache_stream.embedded.engine import CausalModel

from .answer_client import get, samples

__all__ = ["CHUNK", "MODULES", "Served", "document", "serving", "until"]

CHUNK = 32
MODULES = (server, fastapi_server)


@dataclass(frozen=True)
class Served:
    """A server that listens, and what it stands on."""

    url: str
    service: DocumentService
    stack: EmbeddedStack
    tasks: frozenset[asyncio.Task[Any]]

    async def is_clean(self) -> str:
        """Return what is still in use of service, engine, cache and loop; nothing where all is free."""
        mine = await samples(self.url)
        streams = [
            f"{state} streams" for state in ("waiting", "running") if mine[f"document_streams{{{state}}}"]
        ]
        _, text = await get(f"{self.stack.engine_url}/metrics")
        counts = [
            line for line in text.splitlines() if line.startswith("vllm:") and not line.endswith(" 0.0")
        ]
        _, text = await get(f"{self.stack.http_url}/status")
        l1 = json.loads(text)["storage_manager"]["l1_manager"]
        locks = {key: l1[key] for key in ("read_locked_count", "write_locked_count") if l1[key]}
        left = [str(task) for task in asyncio.all_tasks() - self.tasks]
        return "; ".join([*streams, *counts, *map(str, locks.items()), *left])

    async def until_clean(self, seconds: float = 10) -> None:
        """Wait until nothing is in use."""
        end = time.monotonic() + seconds
        while what := await self.is_clean():
            assert time.monotonic() < end, what
            await asyncio.sleep(0.05)


@asynccontextmanager
async def serving(
    module: ModuleType,
    model: CausalModel,
    limits: Limits | None = None,
    change: Callable[[Servers], Servers] = replace,
) -> AsyncIterator[Served]:
    """Serve with ``module``; ``change`` may put something else in the place of cache or engine."""
    async with EmbeddedStack(model, chunk_size=CHUNK, cache_gb=0.2) as stack, stack.connect() as cache:
        servers = Servers(cache, stack.post_completion, stack.engine_url, stack.tokenizer, stack.model_name)
        # So that its own tasks and connections are there.
        await anext(aiter(stack.post_completion([1, 2, 3], {"max_tokens": 1}, "")))
        async with (
            DocumentService(change(servers), limits) as service,
            module.listening(service, "127.0.0.1", 0) as url,
        ):
            await get(f"{url}/healthz")
            await asyncio.sleep(0.05)
            yield Served(url, service, stack, frozenset(asyncio.all_tasks()))


def document(number: int, sentences: int = 6) -> str:
    """Return a text that begins like no other, of some 45 tokens a sentence."""
    return " ".join(f"Log {number}: at {hour} the ferry came in and left." for hour in range(sentences))


async def until(condition: Callable[[], bool | Awaitable[bool]], seconds: float = 10) -> None:
    """Wait until ``condition`` holds."""
    end = time.monotonic() + seconds
    while True:
        found = condition()
        if found if isinstance(found, bool) else await found:
            return
        assert time.monotonic() < end
        await asyncio.sleep(0.01)
