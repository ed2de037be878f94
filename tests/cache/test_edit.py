"""Dropping tokens, against KV that was computed without the dropped tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lmcache_stream.cache import layouts
from lmcache_stream.cache.edit import drop_into, drop_tokens
from lmcache_stream.cache.geometry import KVGeometry
from lmcache_stream.cache.layouts import cpu_blocks
from lmcache_stream.cache.prints import fingerprint
from lmcache_stream.errors import GeometryError, InvalidRequestError, LayoutError
from lmcache_stream.rope import Pairing, RopeConfig
from tests.rope.reference import config_object, random_model

TOKENS = 300
ROPE = RopeConfig(head_size=8, inv_freq=(1.0, 0.1, 0.01, 0.001), pairing="half")
KEPT = {
    "the middle dropped": [*range(100), *range(200, 300)],
    "the head dropped": list(range(30, 300)),
    "the tail dropped": list(range(270)),
    "every third": list(range(0, 300, 3)),
    "scattered": sorted(torch.randperm(300, generator=torch.Generator().manual_seed(7))[:90].tolist()),
    "one": [299],
    "all": list(range(300)),
}


def one_layer(model_type: str) -> tuple[Any, RopeConfig]:
    """Return a random model whose K and V are functions of token and position alone."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    config = config_object({"model_type": model_type, **sizes, **heads})
    return random_model(config), RopeConfig.from_model_config(config.to_dict())


def prefill(model: Any, tokens: list[int]) -> Tensor:
    """Return the KV ``[2, 1, T, D]`` of a prompt as ``transformers`` computes it."""
    with torch.no_grad():
        layers = model(input_ids=torch.tensor([tokens]), use_cache=True).past_key_values.layers
    planes = [[each.transpose(1, 2).flatten(2)[0] for each in (x.keys, x.values)] for x in layers]
    return torch.stack([torch.stack(pair) for pair in zip(*planes, strict=True)])


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "glm4"])
@pytest.mark.parametrize("case", KEPT)
def test_what_is_left_is_as_if_nothing_else_had_been_there(model_type: str, case: str) -> None:
    """In a model of one layer an edit is exact: it equals a prefill of the kept tokens."""
    model, rope = one_layer(model_type)
    tokens = torch.randint(1, 64, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    wanted_tokens = [tokens[index] for index in KEPT[case]]
    kv = prefill(model, tokens)
    new_kv, new_tokens = drop_tokens(kv, tokens, torch.tensor(KEPT[case]), rope)
    wanted = prefill(model, wanted_tokens)
    assert new_tokens == wanted_tokens
    assert new_kv.shape == wanted.shape
    # Both sides are transformers' float32, whose angles are off by 1e-5 at these positions.
    assert (new_kv - wanted).norm() / wanted.norm() < 3e-5
    if case not in ("all", "the tail dropped"):
        moved = kv[:, :, KEPT[case]]
        assert (moved - wanted).norm() / wanted.norm() > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", KEPT)
def test_values_and_keys_in_place_are_copied_bit_for_bit(case: str, dtype: torch.dtype) -> None:
    kv = torch.randn(2, 3, TOKENS, 16).to(dtype)
    before = kv.clone()
    kept = torch.tensor(KEPT[case])
    new_kv, _ = drop_tokens(kv, range(TOKENS), kept, ROPE)
    assert torch.equal(new_kv[1], kv[1][:, kept])
    in_place = kept == torch.arange(len(kept))
    assert torch.equal(new_kv[0][:, in_place], kv[0][:, kept][:, in_place])
    assert torch.equal(kv, before)
    assert new_kv.is_contiguous()
    assert new_kv.untyped_storage().data_ptr() != kv.untyped_storage().data_ptr()
    new_kv.zero_()
    assert torch.equal(kv, before)


@pytest.mark.parametrize("case", KEPT)
def test_strides_change_nothing(case: str) -> None:
    kv = torch.randn(2, 3, TOKENS, 16)
    strided = kv.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)
    kept = torch.tensor(KEPT[case])
    wanted, _ = drop_tokens(kv, range(TOKENS), kept, ROPE)
    assert torch.equal(drop_tokens(strided, range(TOKENS), kept, ROPE)[0], wanted)


def test_two_edits_equal_one() -> None:
    kv = torch.randn(2, 3, TOKENS, 16)
    first, second = torch.arange(0, TOKENS, 2), torch.arange(0, TOKENS // 2, 3)
    once, once_tokens = drop_tokens(kv, range(TOKENS), first[second], ROPE)
    between, tokens = drop_tokens(kv, range(TOKENS), first, ROPE)
    twice, twice_tokens = drop_tokens(between, tokens, second, ROPE)
    assert twice_tokens == once_tokens
    assert (twice - once).norm() / once.norm() < 1e-6


KV = torch.zeros(2, 3, 10, 16)


@pytest.mark.parametrize(
    ("kv", "tokens", "kept", "reason"),
    [
        (KV, range(9), [0], "is not .* of 9 tokens"),
        (KV[0], range(10), [0], "is not"),
        (KV[:1], range(10), [0], "is not"),
        (KV, range(10), [3, 3], "increase strictly within the 10 tokens"),
        (KV, range(10), [3, 2], "increase strictly"),
        (KV, range(10), [-1, 2], "increase strictly"),
        (KV, range(10), [2, 10], "increase strictly"),
        (KV, range(10), [0.0, 1.0], "int64"),
        (KV, range(10), [[0, 1]], "int64"),
        (KV, range(10), [True] * 10, "int64"),
        (KV, ["a"] * 10, [0], "tokens must be"),
    ],
)
def test_misfits_are_refused(kv: Tensor, tokens: Any, kept: list[Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        drop_tokens(kv, tokens, torch.tensor(kept), ROPE)


def test_another_head_size_is_refused() -> None:
    with pytest.raises(GeometryError, match="heads of 8"):
        drop_tokens(KV[..., :12], range(10), torch.tensor([0, 5]), ROPE)


SIZE = 64
CHUNKED = {
    "the middle dropped": [*range(64), *range(192, 256)],
    "a quarter chunk dropped": [*range(70), *range(86, 208)],
    "scattered": sorted(torch.randperm(256, generator=torch.Generator().manual_seed(3))[:128].tolist()),
    "one of two": list(range(1, 256, 2)),
    "nothing dropped": list(range(256)),
    "the last chunk": list(range(192, 256)),
}


def chunks_of(kv: Tensor, geometry: KVGeometry) -> list[Tensor]:
    codec = layouts.get(geometry.layout)
    chunks = []
    for start in range(0, kv.shape[2], SIZE):
        chunk = torch.empty(codec.chunk_shape(geometry, SIZE), dtype=geometry.dtype)
        codec.encode(kv[:, :, start : start + SIZE], chunk, geometry)
        chunks.append(chunk)
    return chunks


@pytest.mark.parametrize("threads", ["one", "several"])
@pytest.mark.parametrize(
    ("pairing", "rotated"), [("half", 32), ("interleaved", 32), ("half", 24), ("interleaved", 20)]
)
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("two-plane", torch.bfloat16),
        ("two-plane", torch.float16),
        ("fused", torch.bfloat16),
        ("fused", torch.float32),
        ("cpu-vec", torch.float32),
        ("cpu-amx", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("case", CHUNKED)
def test_chunk_by_chunk_gives_the_same_bits(
    case: str,
    layout: str,
    dtype: torch.dtype,
    pairing: Pairing,
    rotated: int,
    threads: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    geometry = KVGeometry(
        num_layers=2, num_kv_heads=3, head_size=32, dtype=dtype, layout=layout, block_size=32
    )
    rope = RopeConfig(
        head_size=32, inv_freq=tuple(10.0 ** (-i / 8) for i in range(rotated // 2)), pairing=pairing
    )
    torch.manual_seed(1)
    kv = torch.randn(geometry.kv_shape(256)).to(dtype)
    sources = chunks_of(kv, geometry)
    before = [source.clone() for source in sources]
    kept = torch.tensor(CHUNKED[case])
    wanted, _ = drop_tokens(kv, range(256), kept, rope)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1 if threads == "one" else 2)
    if threads == "several":
        # A layer at a time, as of large models; else all at once.
        monkeypatch.setattr(cpu_blocks, "_BUFFER_BYTES", 1)
    codec = layouts.get(layout)
    for index, chunk in enumerate(chunks_of(wanted, geometry)):
        target = torch.full_like(chunk, torch.nan)
        sums = drop_into(sources, kept, index, target, rope=rope, codec=codec, geometry=geometry)
        assert torch.equal(target, chunk)
        assert torch.equal(sums, fingerprint(wanted, SIZE, 32)[index])
    assert all(torch.equal(one, other) for one, other in zip(sources, before, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("plane", [0, 1])
@pytest.mark.parametrize("layout", ["two-plane", "cpu-vec"])
def test_kv_that_is_not_finite_is_refused_where_it_is_kept(layout: str, plane: int, value: float) -> None:
    geometry = KVGeometry(
        num_layers=2, num_kv_heads=2, head_size=8, dtype=torch.float32, layout=layout, block_size=32
    )
    kv = torch.randn(geometry.kv_shape(128))
    kv[plane, 1, 100, 3] = value
    sources, codec = chunks_of(kv, geometry), layouts.get(layout)

    def drop(kept: range) -> None:
        target = torch.empty_like(sources[0])
        drop_into(sources, torch.tensor(kept), 0, target, rope=ROPE, codec=codec, geometry=geometry)

    drop(range(36, 100))
    with pytest.raises(InvalidRequestError, match="layer 1 holds NaN or infinities"):
        drop(range(37, 101))


def test_a_latent_has_no_keys_to_move() -> None:
    geometry = KVGeometry(
        num_layers=2, num_kv_heads=1, head_size=8, dtype=torch.float32, layout="mla", block_size=32
    )
    chunks, codec = [torch.zeros(2, SIZE, 8)], layouts.get("mla")
    with pytest.raises(LayoutError, match="no K and V"):
        drop_into(chunks, torch.arange(SIZE), 0, chunks[0].clone(), rope=ROPE, codec=codec, geometry=geometry)
