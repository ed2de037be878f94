"""Batches over a scripted cache server and an engine a stream."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import torch

import lmcache_stream as lms

from ..cache.conftest import FAST, GEOMETRY
from ..fakes.engine import ScriptedEngine
from ..fakes.lmcache import FakeLMCache

SHAPE = GEOMETRY.kv_shape(1)
BYTES = 16 * GEOMETRY.bytes_per_token
ROPE = lms.RopeConfig(head_size=8, inv_freq=(1.0, 0.1, 0.01, 0.001), pairing="half")
ANSWER = [[1, "length"], [7, 8, "stop"]]

Batch = lms.AsyncLMCacheBatchedStream
MakeStream = Callable[..., lms.AsyncLMCacheStream]


def prompt_of(number: int) -> list[int]:
    """Return four whole chunks of 4 and two tokens more, which no other number's prompt begins with."""
    return list(range(1000 * number + 100, 1000 * number + 118))


def number_of(tokens: Sequence[int]) -> int:
    return (tokens[0] - 100) // 1000


def first_half(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    half = len(tokens) // 2
    return kv[:, :, :half], tokens[:half]


def batch_of(streams: Sequence[lms.AsyncLMCacheStream], limit: int | None = None, **options: Any) -> Batch:
    """Return a batch that does not wait long before it tries again."""
    batch = Batch(limit, **options)
    batch._retries = dataclasses.replace(batch._retries, first=0.001)
    for stream in streams:
        batch.add(stream)
    return batch


@pytest.fixture
async def server() -> AsyncIterator[FakeLMCache]:
    async with FakeLMCache() as fake:
        yield fake
        assert fake.violations == []
        assert fake.locked == (0, 0)


@pytest.fixture
async def context(server: FakeLMCache) -> AsyncIterator[lms.AsyncLMCacheContext]:
    async with lms.connect(
        server.url, server.http_url, "model", geometry=GEOMETRY, rope=ROPE, timeouts=FAST
    ) as opened:
        yield opened


@pytest.fixture
def engines() -> list[ScriptedEngine]:
    """The engines of the streams that were made, in order."""
    return []


@pytest.fixture
def make(server: FakeLMCache, context: lms.AsyncLMCacheContext, engines: list[ScriptedEngine]) -> MakeStream:
    """Make the next stream; its engine plays ``scripts``, by default one token, then two."""

    def make_stream(*scripts: list[Any]) -> lms.AsyncLMCacheStream:
        engine = ScriptedEngine(server, SHAPE, scripts=list(scripts or ANSWER))
        engines.append(engine)
        return lms.create_request(context, engine, prompt_of(len(engines) - 1))

    return make_stream
