"""The tiny model, loaded once, and an embedded engine over it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import lmcache_stream as lms
from lmcache_stream.embedded import EmbeddedCacheServer, EmbeddedEngine
from lmcache_stream.embedded.engine import CausalModel

from ..tiny_model import write_tiny_llama

CHUNK_SIZE = 16


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def endless_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, but no token ends its answers."""
    folder = write_tiny_llama(tmp_path_factory.mktemp("endless"))
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": []}))
    return folder


@pytest.fixture(scope="session")
def model(tiny_folder: Path) -> CausalModel:
    return CausalModel.load(str(tiny_folder))


@pytest.fixture(scope="session")
def endless(endless_folder: Path) -> CausalModel:
    """The model of ``endless_folder``."""
    return CausalModel.load(str(endless_folder))


@pytest.fixture
async def cache() -> AsyncIterator[EmbeddedCacheServer]:
    async with EmbeddedCacheServer(chunk_size=CHUNK_SIZE, size_gb=0.02) as server:
        yield server


@pytest.fixture
async def engine(model: CausalModel, cache: EmbeddedCacheServer) -> AsyncIterator[EmbeddedEngine]:
    async with EmbeddedEngine(
        model, served_model_name="tiny", cache_url=cache.url, cache_http_url=cache.http_url
    ) as running:
        yield running


@pytest.fixture
async def completions(engine: EmbeddedEngine) -> AsyncIterator[lms.VLLMCompletions]:
    async with lms.VLLMCompletions(engine.url, "tiny") as client:
        yield client
