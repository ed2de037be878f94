"""One suite for two servers: the embedded one, and the real one that it must not differ from.

The real server is the measure. It takes part where ``LMCACHE_STREAM_REAL`` is set, see tests/real.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from lmcache_stream.embedded import EmbeddedStack
from lmcache_stream.embedded.cache import CacheOptions, EmbeddedCacheServer
from lmcache_stream.embedded.engine import CausalModel

from ..real.conftest import installed, logs, pytest_collection_modifyitems
from ..real.stack import MAX_MODEL_LEN, CacheServer, lmcache_server, vllm_server
from ..tiny_model import EOS, VOCAB_SIZE, write_tiny_llama
from .driver import CHUNK_SIZE, SIZE_BYTES, Driver, Place
from .engines import CHUNK_SIZE as STACK_CHUNK_SIZE
from .engines import StackPlace

__all__ = ["installed", "logs", "pytest_collection_modifyitems"]


@pytest.fixture(scope="session")
def real_server(installed: Path, logs: Path) -> Iterator[Callable[[bool], CacheServer]]:
    """Start a real server for each data plane when it is first asked for."""
    with contextlib.ExitStack() as stack:
        started: dict[bool, CacheServer] = {}

        def start(shared_memory: bool) -> CacheServer:
            if shared_memory not in started:
                started[shared_memory] = stack.enter_context(
                    lmcache_server(
                        installed,
                        logs,
                        shared_memory=shared_memory,
                        chunk_size=CHUNK_SIZE,
                        size_gb=SIZE_BYTES / (1 << 30),
                    )
                )
            return started[shared_memory]

        yield start


@pytest.fixture
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    """A server with an empty cache, by the name that ``servers`` gave it."""
    which, _, plane = request.param.partition("-")
    shared_memory = plane == "shared-memory"
    if which == "real":
        real = request.getfixturevalue("real_server")(shared_memory)
        place = Place(real.url, real.http_url, shared_memory)
        await place.clear(force=True)
        yield place
        return
    options = CacheOptions(chunk_size=CHUNK_SIZE, size_bytes=SIZE_BYTES, shared_memory=shared_memory)
    async with EmbeddedCacheServer(options=options) as server:
        yield Place(server.url, server.http_url, shared_memory)


@pytest.fixture
async def driver(place: Place) -> AsyncIterator[Driver]:
    """A client of the server that speaks its protocol without the library's care."""
    async with Driver(place) as driver:
        yield driver


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> CausalModel:
    return CausalModel.load(str(write_tiny_llama(tmp_path_factory.mktemp("tiny"))))


@pytest.fixture(scope="session")
def real_stack(installed: Path, logs: Path) -> Iterator[StackPlace]:
    with (
        lmcache_server(installed, logs, chunk_size=STACK_CHUNK_SIZE) as cache,
        vllm_server(installed, logs, cache, dtype="float32") as engine,
    ):
        config = json.loads((engine.model_path / "config.json").read_text())
        yield StackPlace(
            url=cache.url,
            http_url=cache.http_url,
            engine_url=engine.url,
            model_name=str(engine.model_path),
            served_name=engine.model,
            vocab_size=config["vocab_size"],
            max_model_len=MAX_MODEL_LEN,
            eos=config["eos_token_id"],
        )


@pytest.fixture
async def stack(request: pytest.FixtureRequest, tiny_model: CausalModel) -> AsyncIterator[StackPlace]:
    """A whole stack, by the name that ``engines`` gave it."""
    if request.param == "real":
        yield request.getfixturevalue("real_stack")
        return
    async with EmbeddedStack(tiny_model, chunk_size=STACK_CHUNK_SIZE, cache_gb=0.1) as embedded:
        yield StackPlace(
            url=embedded.url,
            http_url=embedded.http_url,
            engine_url=embedded.engine_url,
            model_name=embedded.model_name,
            served_name=embedded.model_name,
            vocab_size=VOCAB_SIZE,
            max_model_len=embedded.max_model_len,
            eos=EOS,
        )
