"""A healthy engine and cache server in this process, to be examined or to be made ill."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from lmcache_stream.doctor import Targets
from lmcache_stream.embedded import EmbeddedCacheServer, EmbeddedEngine
from lmcache_stream.embedded.engine import CausalModel

from ..tiny_model import write_tiny_llama

CHUNK_SIZE = 16


@dataclass(frozen=True)
class Stage:
    """Running servers.

    Attributes:
        targets: their addresses.
        cache: the cache server.
        model: what the engine serves as ``tiny``.
    """

    targets: Targets
    cache: EmbeddedCacheServer
    model: CausalModel

    def with_config(self, folder: Path, **changes: Any) -> Targets:
        """Return the targets with another configuration of the model in ``folder``."""
        config = json.loads((Path(self.model.name) / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        return replace(self.targets, model_path=str(folder))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    return CausalModel.load(str(write_tiny_llama(tmp_path_factory.mktemp("tiny"))))


@asynccontextmanager
async def staged(
    model: CausalModel,
    *,
    connected: bool = True,
    shared_memory: bool = True,
    chunk_size: int = CHUNK_SIZE,
    size_gb: float = 0.05,
) -> AsyncIterator[Stage]:
    """Open a cache server and an engine, which is connected to it or not."""
    async with EmbeddedCacheServer(
        chunk_size=chunk_size, size_gb=size_gb, shared_memory=shared_memory
    ) as cache:
        way: dict[str, Any] = {"cache_url": cache.url, "cache_http_url": cache.http_url} if connected else {}
        async with EmbeddedEngine(model, served_model_name="tiny", **way) as engine:
            targets = Targets(
                engine_url=engine.url, cache_url=cache.url, http_url=cache.http_url, model="tiny"
            )
            yield Stage(targets, cache, model)


@pytest.fixture
async def stage(model: CausalModel) -> AsyncIterator[Stage]:
    async with staged(model) as opened:
        yield opened


async def status_of(cache: EmbeddedCacheServer) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{cache.http_url}/status") as answer:
        found: dict[str, Any] = await answer.json()
        return found


async def clients_of(cache: EmbeddedCacheServer) -> list[int]:
    """The clients that are registered."""
    listed: list[int] = (await status_of(cache))["registered_non_cuda_instance_ids"]
    return listed


async def nothing_is_held(cache: EmbeddedCacheServer, clients: list[int]) -> None:
    """Assert that no lock is left and nobody registered but ``clients``, a second after at the latest."""
    held: Any = None
    for _ in range(50):
        status = await status_of(cache)
        l1 = status["storage_manager"]["l1_manager"]
        held = (
            status["registered_non_cuda_instance_ids"],
            l1["read_locked_count"],
            l1["write_locked_count"],
            status["active_sessions"],
        )
        if held == (clients, 0, 0, 0):
            return
        await asyncio.sleep(0.02)
    assert held == (clients, 0, 0, 0)


@asynccontextmanager
async def http_server(answer: Callable[[web.Request], Any]) -> AsyncIterator[str]:
    """A server on which ``answer`` answers everything."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@asynccontextmanager
async def in_between(url: str, rewrite: Callable[[str, str], str]) -> AsyncIterator[str]:
    """A proxy to ``url`` that gives each answer as ``rewrite(path, answer)`` has it."""
    async with aiohttp.ClientSession() as session:

        async def answer(request: web.Request) -> web.Response:
            async with session.request(request.method, url + request.path, data=await request.read()) as real:
                text = rewrite(request.path, await real.text())
                return web.Response(text=text, status=real.status, content_type=real.content_type)

        async with http_server(answer) as address:
            yield address
