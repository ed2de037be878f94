"""The library's own context, which must find the embedded server no different from the real one."""

from __future__ import annotations

import secrets

import pytest
import torch

import lmcache_stream as lms
from lmcache_stream.cache.geometry import KVGeometry

from .driver import CHUNK_SIZE, SIZE_BYTES, Place, fresh_tokens, servers


def geometry(*, layout: str = "two-plane", head_size: int = 8) -> KVGeometry:
    return KVGeometry(
        num_layers=3,
        num_kv_heads=2,
        head_size=head_size,
        dtype=torch.bfloat16,
        layout=layout,
        block_size=CHUNK_SIZE,
    )


def connect(place: Place, model: str, shape: KVGeometry) -> lms.connect:
    return lms.connect(place.url, place.http_url, model, geometry=shape)


def model_name() -> str:
    return f"model-{secrets.token_hex(4)}"


def some_kv(shape: KVGeometry, tokens: list[int]) -> torch.Tensor:
    return torch.randn(shape.kv_shape(len(tokens))).to(shape.dtype)


def same(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    return one is not None and torch.equal(one.view(torch.int16), other.view(torch.int16))


@servers()
@pytest.mark.parametrize("layout", ["two-plane", "fused"])
async def test_what_is_stored_is_found_and_retrieved(place: Place, layout: str) -> None:
    shape, model, tokens = geometry(layout=layout), model_name(), fresh_tokens(5)
    kv = some_kv(shape, tokens)
    async with connect(place, model, shape) as one:
        assert await one.lookup(tokens) == 0
        assert await one.retrieve(tokens) is None
        assert await one.store(kv, tokens) == lms.StoreResult(stored=5, existing=0, refused=0)
        async with connect(place, model, shape) as other:
            assert await other.lookup([*tokens, 1, 2]) == len(tokens)
            assert same(await other.retrieve(tokens), kv)
            assert same(await other.retrieve([*tokens[:9], 1, 2, 3]), kv[:, :, :8])
            assert await other.lookup(tokens, "salted") == 0
    assert await place.locked() == (0, 0)


@servers()
async def test_a_store_tells_what_was_there(place: Place) -> None:
    shape, model, tokens = geometry(), model_name(), fresh_tokens(4)
    kv, others = some_kv(shape, tokens), some_kv(shape, tokens)
    async with connect(place, model, shape) as context:
        await context.store(kv[:, :, :8], tokens[:8])
        assert await context.store(kv, tokens) == lms.StoreResult(stored=2, existing=2, refused=0)
        refused = await context.store(others, tokens)
        assert refused == lms.StoreResult(stored=0, existing=0, refused=4, conflicting=4)
        assert same(await context.retrieve(tokens), kv)
        assert await context.store(others, tokens, "salted")
        assert same(await context.retrieve(tokens, "salted"), others)
    assert await place.locked() == (0, 0)


@servers()
async def test_a_store_that_does_not_fit_is_refused(place: Place) -> None:
    # Chunks of which three fit.
    head_size = SIZE_BYTES // 3 // (2 * 3 * CHUNK_SIZE * 2 * 2) - 64
    shape, tokens = geometry(head_size=head_size), fresh_tokens(4)
    async with connect(place, model_name(), shape) as context:
        result = await context.store(some_kv(shape, tokens), tokens)
        assert result == lms.StoreResult(stored=0, existing=0, refused=4)
        assert await context.lookup(tokens) == 0
    assert await place.locked() == (0, 0)


@servers()
async def test_a_cleared_cache_is_filled_again(place: Place) -> None:
    shape, tokens = geometry(), fresh_tokens(2)
    kv = some_kv(shape, tokens)
    async with connect(place, model_name(), shape) as context:
        for _ in range(2):
            assert await context.store(kv, tokens)
            assert same(await context.retrieve(tokens), kv)
            await place.clear()
            assert await context.lookup(tokens) == 0


@servers()
async def test_a_context_that_closes_leaves_nothing(place: Place) -> None:
    shape, model, tokens = geometry(), model_name(), fresh_tokens(2)
    async with connect(place, model, shape) as context:
        await context.store(some_kv(shape, tokens), tokens)
        entries = (await place.status())["non_cuda_context_meta"].values()
        assert [entry["model_name"] for entry in entries].count(model) == 1
    status = await place.status()
    assert model not in [entry["model_name"] for entry in status["non_cuda_context_meta"].values()]
    assert await place.locked() == (0, 0)
