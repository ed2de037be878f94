from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch

import lmcache_stream as lms

from ..fakes.lmcache import FakeLMCache

GEOMETRY = lms.KVGeometry(
    num_layers=2,
    num_kv_heads=2,
    head_size=8,
    dtype=torch.float32,
    layout="two-plane",
    block_size=4,
)
FAST = lms.Timeouts(connect=1, lookup=1, retrieve=1, store=1)


def random_kv(num_tokens: int, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(GEOMETRY.kv_shape(num_tokens), generator=generator)


@pytest.fixture(params=[True, False], ids=["shared-memory", "pickle"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[FakeLMCache]:
    async with FakeLMCache(shared_memory=request.param) as fake:
        yield fake
        assert fake.violations == []


@pytest.fixture
async def context(server: FakeLMCache) -> AsyncIterator[lms.AsyncLMCacheContext]:
    async with lms.connect(server.url, server.http_url, "model", geometry=GEOMETRY, timeouts=FAST) as opened:
        yield opened
