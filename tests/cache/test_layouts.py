"""The chunk layouts, against index arithmetic written out from ``shared/kv-layouts.md``."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lmcache_stream.cache import layouts
from lmcache_stream.cache.geometry import KVGeometry
from lmcache_stream.errors import GeometryError, LayoutError

# Of a token and a dim: plane, layer, token, head, dim -> index into the flat chunk tensor.
Index = Callable[[KVGeometry, int, int, int, int, int, int], int]


def geometry_of(layout: str, **changes: object) -> KVGeometry:
    sizes = {"num_layers": 2, "num_kv_heads": 2, "head_size": 32, "block_size": 32}
    sizes["num_kv_heads"] = 1 if layout == "mla" else 2
    fields = {**sizes, "dtype": torch.bfloat16, "layout": layout, **changes}
    return KVGeometry(**fields)  # type: ignore[arg-type]


def two_plane(g: KVGeometry, c: int, p: int, layer: int, t: int, h: int, d: int) -> int:
    return ((p * g.num_layers + layer) * c + t) * g.hidden_size + h * g.head_size + d


def fused(g: KVGeometry, c: int, p: int, layer: int, t: int, h: int, d: int) -> int:
    row = (layer * c + t) * g.num_kv_heads + h
    return row * 2 * g.head_size + p * g.head_size + d


def in_block(g: KVGeometry, c: int, layer: int, t: int, h: int, flat: int) -> int:
    """Index of element ``flat`` of a head's interior in the block that holds token ``t``."""
    row, column = divmod(flat, 2 * g.head_size)
    token = t // g.block_size * g.block_size + row
    return ((layer * c + token) * g.num_kv_heads + h) * 2 * g.head_size + column


def cpu_vec(g: KVGeometry, c: int, p: int, layer: int, t: int, h: int, d: int) -> int:
    b, bs, hs = t % g.block_size, g.block_size, g.head_size
    flat = d * bs + b if p == 0 else bs * hs + b * hs + d
    return in_block(g, c, layer, t, h, flat)


def cpu_amx(g: KVGeometry, c: int, p: int, layer: int, t: int, h: int, d: int) -> int:
    b, bs, hs = t % g.block_size, g.block_size, g.head_size
    if p == 0:
        flat = ((b // 16 * (hs // 2) + d // 2) * 16 + b % 16) * 2 + d % 2
    else:
        flat = bs * hs + ((d // 16 * (bs // 2) + b // 2) * 16 + d % 16) * 2 + b % 2
    return in_block(g, c, layer, t, h, flat)


def mla(g: KVGeometry, c: int, p: int, layer: int, t: int, h: int, d: int) -> int:
    return (layer * c + t) * g.hidden_size + d


REFERENCES: dict[str, Index] = {
    "two-plane": two_plane,
    "fused": fused,
    "cpu-vec": cpu_vec,
    "cpu-amx": cpu_amx,
    "mla": mla,
}
WRITABLE = [name for name in REFERENCES if name != "mla"]


def bits_of(tensor: Tensor) -> Tensor:
    bits = {2: torch.int16, 4: torch.int32}[tensor.dtype.itemsize]
    return tensor.contiguous().view(bits)


def decoded_by_hand(layout: str, chunk: Tensor, g: KVGeometry, tokens: int) -> Tensor:
    """Return the bits of ``[planes, L, tokens, D]``, element by element."""
    flat, index = bits_of(chunk).flatten().tolist(), REFERENCES[layout]
    planes = 1 if layout == "mla" else 2
    sizes = (planes, g.num_layers, tokens, g.num_kv_heads, g.head_size)
    places = itertools.product(*map(range, sizes))
    values = [flat[index(g, tokens, *place)] for place in places]
    return torch.tensor(values).to(bits_of(chunk).dtype).view(planes, g.num_layers, tokens, -1)


def numbered(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return values whose bits count up, so that each is told from all others, NaNs included."""
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    count = torch.Size(shape).numel()
    assert count <= 2**16
    return torch.arange(count).to(bits).view(dtype).view(shape)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits_of(a), bits_of(b))


@pytest.mark.parametrize("layout", REFERENCES)
def test_decoding_equals_index_arithmetic(layout: str) -> None:
    g, tokens, codec = geometry_of(layout), 64, layouts.get(layout)
    chunk = numbered(codec.chunk_shape(g, tokens), g.dtype)
    out = torch.zeros(codec.kv_shape(g, tokens), dtype=g.dtype)
    codec.decode(chunk, out, g)
    assert torch.equal(bits_of(out), decoded_by_hand(layout, chunk, g, tokens))


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("cpu-vec", {"head_size": 80, "num_kv_heads": 1}),
        ("cpu-vec", {"block_size": 16, "dtype": torch.float32}),
        ("cpu-vec", {"block_size": 128, "head_size": 48, "num_layers": 1}),
        ("cpu-amx", {"block_size": 128, "head_size": 64, "num_layers": 1}),
        ("cpu-amx", {"block_size": 64, "head_size": 96, "num_layers": 1}),
        ("fused", {"block_size": 16, "head_size": 48, "dtype": torch.float16}),
    ],
)
def test_decoding_other_sizes_equals_index_arithmetic(layout: str, changes: dict[str, object]) -> None:
    g, codec = geometry_of(layout, **changes), layouts.get(layout)
    tokens = 2 * g.block_size if g.block_size < 128 else g.block_size
    chunk = numbered(codec.chunk_shape(g, tokens), g.dtype)
    out = torch.zeros(codec.kv_shape(g, tokens), dtype=g.dtype)
    codec.decode(chunk, out, g)
    assert torch.equal(bits_of(out), decoded_by_hand(layout, chunk, g, tokens))


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("two-plane", torch.bfloat16),
        ("two-plane", torch.float16),
        ("fused", torch.bfloat16),
        ("fused", torch.float16),
        ("cpu-vec", torch.bfloat16),
        ("cpu-vec", torch.float16),
        ("cpu-amx", torch.bfloat16),
    ],
)
def test_chunks_survive_a_round_through_a_longer_strided_kv(layout: str, dtype: torch.dtype) -> None:
    g, size, codec = geometry_of(layout, dtype=dtype), 64, layouts.get(layout)
    shape = codec.chunk_shape(g, size)
    chunks = [numbered(shape, dtype).flip(0) if i else numbered(shape, dtype) for i in range(3)]
    # Tokens outermost: no stride of the views is that of a fresh tensor.
    kv = torch.zeros(3 * size, 2, g.num_layers, g.hidden_size, dtype=dtype).permute(1, 2, 0, 3)
    for i, chunk in enumerate(chunks):
        codec.decode(chunk, kv[:, :, i * size : (i + 1) * size], g)
    for i, chunk in enumerate(chunks):
        again = torch.empty(2, *shape, dtype=dtype).transpose(0, 1)[:, 1]
        codec.encode(kv[:, :, i * size : (i + 1) * size], again, g)
        assert same_bits(again, chunk)


@pytest.mark.parametrize("layout", WRITABLE)
def test_each_token_is_decoded_whole_and_once(layout: str) -> None:
    """A permutation: every element of the chunk arrives somewhere."""
    g, codec = geometry_of(layout), layouts.get(layout)
    chunk = numbered(codec.chunk_shape(g, 32), g.dtype)
    out = torch.zeros(codec.kv_shape(g, 32), dtype=g.dtype)
    codec.decode(chunk, out, g)
    assert torch.equal(bits_of(out).flatten().sort().values, bits_of(chunk).flatten().sort().values)


@pytest.mark.parametrize(
    ("layout", "single_plane", "hidden", "shape"),
    [
        ("two-plane", False, 64, (2, 2, 32, 64)),
        ("fused", True, 128, (2, 32, 128)),
        ("cpu-vec", True, 128, (2, 32, 128)),
        ("cpu-amx", True, 128, (2, 32, 128)),
        ("mla", True, 32, (2, 32, 32)),
    ],
)
def test_shapes_are_those_of_a_registration(
    layout: str, single_plane: bool, hidden: int, shape: tuple[int, ...]
) -> None:
    g, codec = geometry_of(layout), layouts.get(layout)
    assert codec.name == layout
    assert codec.single_plane is single_plane
    assert codec.hidden_dim_size(g) == hidden
    assert codec.chunk_shape(g, 32) == shape


@pytest.mark.parametrize(
    ("layout", "changes", "chunk_size", "reason"),
    [
        ("two-plane", {}, 40, "chunk of 40 tokens is not a multiple of the engine's block of 32"),
        ("fused", {}, 0, "not a multiple"),
        ("cpu-vec", {"block_size": 64}, 32, "not a multiple"),
        ("cpu-amx", {"block_size": 16}, 32, "block of 16 is not a multiple of 32"),
        ("cpu-amx", {"head_size": 80}, 32, "head of 80 is not a multiple of 32"),
        ("cpu-amx", {"dtype": torch.float32}, 32, "bfloat16 only"),
    ],
)
def test_check_refuses(layout: str, changes: dict[str, object], chunk_size: int, reason: str) -> None:
    with pytest.raises(LayoutError, match=reason):
        layouts.get(layout).check(geometry_of(layout, **changes), chunk_size)


@pytest.mark.parametrize("layout", WRITABLE)
@pytest.mark.parametrize("what", ["tokens", "layers", "width", "chunk dtype", "kv dtype", "rank"])
def test_a_misfit_is_refused_before_anything_is_written(layout: str, what: str) -> None:
    g, codec = geometry_of(layout), layouts.get(layout)
    chunk = torch.zeros(codec.chunk_shape(g, 64), dtype=g.dtype)
    kv = torch.ones(codec.kv_shape(g, 64), dtype=g.dtype)
    if what == "tokens":
        kv = kv[:, :, :32]
    elif what == "layers":
        kv = kv[:, :1]
    elif what == "width":
        kv = kv[..., :32]
    elif what == "chunk dtype":
        chunk = chunk.half()
    elif what == "kv dtype":
        kv = kv.float()
    else:
        kv = kv[0]
    with pytest.raises(LayoutError):
        codec.encode(kv, chunk, g)
    with pytest.raises(LayoutError):
        codec.decode(chunk, kv, g)
    assert not chunk.any()
    assert kv.all()


def test_a_latent_is_never_stored() -> None:
    g, codec = geometry_of("mla"), layouts.get("mla")
    chunk = torch.zeros(codec.chunk_shape(g, 32), dtype=g.dtype)
    with pytest.raises(LayoutError, match="retrieved only"):
        codec.encode(torch.ones(codec.kv_shape(g, 32), dtype=g.dtype), chunk, g)
    assert not chunk.any()


def test_an_unknown_layout_is_refused_with_the_known_ones() -> None:
    with pytest.raises(GeometryError, match=r"'hnd'.*two-plane, fused, cpu-vec, cpu-amx, mla"):
        layouts.get("hnd")


# All names of EngineKVFormat in lmcache 0.5.6.
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("NB_NL_TWO_BS_NH_HS", "two-plane"),
        ("NB_NL_TWO_NH_BS_HS", "two-plane"),
        ("NL_X_NBBS_ONE_HS", "mla"),
        ("NL_X_NB_BSV_BSS", None),
        ("NL_X_NB_BS_HS", "mla"),
        ("NL_X_NB_BS_NH_CS", "fused"),
        ("NL_X_NB_BS_NH_HS", None),
        ("NL_X_NB_BS_NH_TWO_HS", "fused"),
        ("NL_X_NB_NH_BS_CS", "fused"),
        ("NL_X_NB_NH_BS_TWO_HS", "fused"),
        ("NL_X_NB_TWO_BS_NH_HS", "two-plane"),
        ("NL_X_NB_TWO_NH_BS_HS", "two-plane"),
        ("NL_X_NP_X_NB_BS_ONE_HS", "mla"),
        ("NL_X_TWO_NB_BS_NH_HS", "two-plane"),
        ("NL_X_TWO_NB_NH_BS_HS", "two-plane"),
        ("NL_X_TWO_NB_NH_ONE_BS_HS", "two-plane"),
        ("NL_X_TWO_X_NB_BS_NH_HS", "two-plane"),
        ("TWO_X_NL_X_NBBS_NH_HS", "two-plane"),
        ("TWO_X_NL_X_NB_BS_NH_HS", "two-plane"),
        ("NL_X_TWO_NB_BS_NH_FP8", None),
        ("", None),
    ],
)
def test_engine_formats(name: str, layout: str | None) -> None:
    if layout is None:
        with pytest.raises(GeometryError, match=f"engine format '{name}' is not supported"):
            layouts.layout_of_format(name)
    else:
        assert layouts.layout_of_format(name) == layout
