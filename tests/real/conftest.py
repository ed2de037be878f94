"""The real stack as fixtures: one a session for each engine dtype and data plane."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from .install_stack import default_folder, is_installed, model_of
from .stack import CacheServer, Engine, lmcache_server, vllm_server

STACKS = [
    "bfloat16-shared-memory",
    "bfloat16-pickle",
    "float32-shared-memory",
    "float32-pickle",
]
PREFIX_CACHING = "-prefix-caching"


@dataclass(frozen=True)
class RealStack:
    cache: CacheServer
    engine: Engine
    dtype: torch.dtype

    @property
    def model_name(self) -> str:
        return str(self.engine.model_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("LMCACHE_STREAM_REAL"):
        return
    reason = "real servers: `python tests/real/install_stack.py`, then LMCACHE_STREAM_REAL=1"
    for item in items:
        if item.get_closest_marker("real"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def installed() -> Path:
    folder = default_folder()
    if not is_installed(folder):
        pytest.fail(f"LMCACHE_STREAM_REAL is set, but no real stack is installed in {folder}")
    return folder


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def stack(request: pytest.FixtureRequest, installed: Path, logs: Path) -> Iterator[RealStack]:
    """A stack by name; tests take it with ``@pytest.mark.parametrize("stack", ..., indirect=True)``."""
    name: str = request.param.removesuffix(PREFIX_CACHING)
    caching = name != request.param
    dtype, _, plane = name.partition("-")
    with (
        lmcache_server(installed, logs, shared_memory=plane == "shared-memory") as cache,
        vllm_server(installed, logs, cache, dtype=dtype, prefix_caching=caching) as engine,
    ):
        yield RealStack(cache, engine, getattr(torch, dtype))


@functools.cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_of(default_folder()))


def long_prompt(characters: int = 9000) -> list[int]:
    """A real English text with a question behind it, as token ids of the chat template."""
    import pydoc_data.topics

    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in ("assert", "with", "try", "raise", "for", "while"))
    question = "\n\nQuestion: what does the assert statement do? Answer in two sentences."
    messages = [{"role": "user", "content": text[:characters] + question}]
    ids: list[int] = tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return ids


async def until_unlocked(cache: CacheServer) -> None:
    """Wait, three seconds at the most, until the server counts no lock."""
    locked = (1, 1)
    for _ in range(60):
        locked = await asyncio.to_thread(lambda: cache.locked)
        if locked == (0, 0):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{locked} objects are still read-locked and write-locked")


async def until_idle(engine: Engine, seconds: float = 20) -> None:
    """Wait until vLLM counts no running request."""
    running = 1
    for _ in range(round(seconds / 0.1)):
        running = await asyncio.to_thread(lambda: engine.running)
        if running == 0:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{running} requests still run in vLLM")
