"""``connect(layout=, check_layout=)``, on KV that a RoPE decoder could have written."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import AsyncIterator

import pytest
import torch

import lmcache_stream as lms
from lmcache_stream.rope import rotate_keys

from ..fakes.engine import ScriptedEngine
from ..fakes.lmcache import FakeLMCache
from .conftest import FAST

GEOMETRY = lms.KVGeometry(
    num_layers=2, num_kv_heads=2, head_size=32, dtype=torch.bfloat16, layout="cpu-amx", block_size=32
)
ROPE = lms.RopeConfig(head_size=32, inv_freq=tuple(2.0**-i for i in range(16)), pairing="half")
OTHER_ROPE = dataclasses.replace(ROPE, pairing="interleaved")
TOKENS = [random.Random(1).randrange(20) for _ in range(64)]
UNIQUE = list(range(100, 164))


def kv_of(tokens: list[int]) -> torch.Tensor:
    torch.manual_seed(0)
    kv = torch.randn(GEOMETRY.kv_shape(len(tokens)))
    words = torch.randn(200, GEOMETRY.hidden_size)
    count = range(len(tokens))
    kv[0, 0] = rotate_keys(words[tokens], [0] * len(tokens), count, ROPE)
    return kv.bfloat16()


@pytest.fixture
async def server() -> AsyncIterator[FakeLMCache]:
    """A cache with the KV of TOKENS and UNIQUE, as an engine with AMX writes it."""
    async with FakeLMCache(chunk_size=32, engine_block_size=32, engine_use_mla=True) as fake:
        async with connecting(fake, check_layout=False) as context:
            assert await context.store(kv_of(TOKENS), TOKENS)
            assert await context.store(kv_of(UNIQUE), UNIQUE)
        yield fake
        assert fake.violations == []
        assert fake.locked == (0, 0)


def connecting(server: FakeLMCache, **options: object) -> lms.connect:
    given: dict[str, object] = {"geometry": GEOMETRY, "rope": ROPE, "timeouts": FAST, **options}
    return lms.connect(server.url, server.http_url, "model", **given)  # type: ignore[arg-type]


FUSED = dataclasses.replace(GEOMETRY, layout="fused")


@pytest.mark.parametrize("believed", ["fused", "cpu-vec", "cpu-amx"])
async def test_auto_finds_the_layout_at_the_first_retrieve(server: FakeLMCache, believed: str) -> None:
    geometry = dataclasses.replace(GEOMETRY, layout=believed)
    async with connecting(server, geometry=geometry, layout="auto") as context:
        before = context.layout_spread
        found = await context.retrieve(TOKENS)
        assert found is not None
        assert torch.equal(found, kv_of(TOKENS))
        assert context.geometry.layout == "cpu-amx"
        assert before is None
        assert context.layout_spread is not None
        assert context.layout_spread < 0.003
        # Once it is found, other prompts need no repeats.
        assert torch.equal(await context.retrieve(UNIQUE), kv_of(UNIQUE))  # type: ignore[arg-type]


async def test_auto_that_cannot_be_decided_is_refused(server: FakeLMCache) -> None:
    async with connecting(server, geometry=FUSED, layout="auto") as context:
        with pytest.raises(lms.LayoutError, match=r"too few tokens .* repeat .* fused, cpu-vec, cpu-amx"):
            await context.retrieve(UNIQUE)
        assert server.locked == (0, 0)
        assert await context.retrieve(TOKENS) is not None
    async with connecting(server, geometry=FUSED, rope=OTHER_ROPE, layout="auto") as context:
        with pytest.raises(lms.LayoutError, match=r"no layout fits; .*fused .*cpu-vec .*cpu-amx"):
            await context.retrieve(TOKENS)
    async with connecting(server, geometry=FUSED, rope=None, layout="auto") as context:
        with pytest.raises(lms.LayoutError, match=r"found by the model's RoPE, and: .*model_config="):
            await context.retrieve(TOKENS)


async def test_a_named_layout_is_believed_and_checked(server: FakeLMCache) -> None:
    async with connecting(server, geometry=FUSED, layout="cpu-amx") as context:
        assert torch.equal(await context.retrieve(TOKENS), kv_of(TOKENS))  # type: ignore[arg-type]
    async with connecting(server, layout="cpu-vec") as context:
        with pytest.raises(lms.LayoutError, match=r"decoded as cpu-vec, .*; cpu-amx fits"):
            await context.retrieve(TOKENS)


async def test_the_check_can_be_turned_off_by_name(server: FakeLMCache) -> None:
    async with connecting(server, rope=OTHER_ROPE) as context:
        with pytest.raises(lms.LayoutError, match="nothing else fits"):
            await context.retrieve(TOKENS)
    async with connecting(server, rope=OTHER_ROPE, check_layout=False) as context:
        assert torch.equal(await context.retrieve(TOKENS), kv_of(TOKENS))  # type: ignore[arg-type]
        assert context.layout_spread is None


async def test_that_it_could_not_be_checked_is_said_once(
    server: FakeLMCache, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="lmcache_stream")
    async with connecting(server) as context:
        for _ in range(3):
            assert await context.retrieve(UNIQUE) is not None
        said = [record for record in caplog.records if "could not be checked" in record.getMessage()]
        assert len(said) == 1
        assert context.layout_spread is None
        await context.retrieve(TOKENS)
        assert context.layout_spread is not None


async def test_an_edit_reports_the_spread(server: FakeLMCache) -> None:
    engine = ScriptedEngine(server, GEOMETRY.kv_shape(1))
    async with connecting(server) as context:
        stream = lms.create_request(context, engine, TOKENS)
        await stream.modify_kv(lms.keep(range(16, 48)))
        (report,) = stream.edits
        assert report.layout_spread == context.layout_spread
        assert report.layout_spread is not None
        assert 0 < report.layout_spread < 0.003
    async with connecting(server, check_layout=False) as context:
        stream = lms.create_request(context, engine, TOKENS)
        await stream.modify_kv(lms.keep(range(16, 48)))
        assert stream.edits[0].layout_spread is None


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"layout": "paged"}, lms.GeometryError, "unknown layout 'paged'; known: two-plane"),
        ({"layout": "two-plane"}, lms.GeometryError, "layout='two-plane' does not fit .* one plane"),
        ({"layout": "auto", "check_layout": False}, lms.InvalidRequestError, "check_layout must be on"),
    ],
)
async def test_what_cannot_be_is_refused(
    server: FakeLMCache, options: dict[str, object], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        await connecting(server, **options)


async def test_nothing_is_stored_in_a_layout_that_is_still_to_be_found(server: FakeLMCache) -> None:
    async with connecting(server, geometry=GEOMETRY, layout="auto") as context:
        with pytest.raises(lms.GeometryError, match=r"layout='auto': .* retrieve first"):
            await context.store(torch.zeros(GEOMETRY.kv_shape(32)).bfloat16(), UNIQUE[32:])
    assert len(server.chunks) == 4


@pytest.mark.parametrize("head_size", [4, 16])
async def test_a_rotation_of_other_heads_is_refused(server: FakeLMCache, head_size: int) -> None:
    rope = lms.RopeConfig(head_size=head_size, inv_freq=(1.0, 0.1), pairing="half")
    with pytest.raises(lms.GeometryError, match=f"rope= has heads of {head_size} .* KV's heads have 32"):
        await connecting(server, geometry=GEOMETRY, rope=rope, check_layout=False)
