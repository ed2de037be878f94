"""Scores against references written another way (token by token, in Python's own floats), and budgets."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lmcache_stream.dropping import (
    RKV,
    TOVA,
    AlwaysKeep,
    CachedPrefix,
    Chain,
    DropPolicy,
    KeyDiff,
    KNorm,
    Layers,
    RandomDrop,
    Scored,
    SnapKV,
    StreamingLLM,
    ValueDiff,
    WholeChunks,
)
from lmcache_stream.errors import InvalidRequestError
from lmcache_stream.rope import RopeConfig

LAYERS, LENGTH, HEADS, QUERY_HEADS, SIZE = 2, 48, 2, 4, 8
Rows = list[list[float]]

ROPE = RopeConfig(head_size=SIZE, inv_freq=(1.0, 0.3, 0.1, 0.01), pairing="half")

POLICIES: list[Callable[..., DropPolicy]] = [
    *(RandomDrop, StreamingLLM, KNorm, KeyDiff, ValueDiff),
    *(TOVA, SnapKV, RKV),
]


def make_prefix(
    length: int = LENGTH, window: int = 16, seed: int = 0, *, num_behind: int = 0
) -> CachedPrefix:
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(2, LAYERS, length, HEADS * SIZE, generator=generator)
    queries = torch.randn(LAYERS, min(window, length), QUERY_HEADS * SIZE, generator=generator)
    return CachedPrefix.of(
        kv, list(range(length)), num_kv_heads=HEADS, queries=queries, num_behind=num_behind, rope=ROPE
    )


def key_rows(prefix: CachedPrefix, layer: int, head: int) -> Rows:
    rows: Rows = prefix.keys[layer][:, head].tolist()
    return rows


def norm(row: list[float]) -> float:
    return math.sqrt(sum(x * x for x in row))


def dot(one: list[float], other: list[float]) -> float:
    return sum(x * y for x, y in zip(one, other, strict=True))


def cosine(one: list[float], other: list[float]) -> float:
    return dot(one, other) / (norm(one) * norm(other))


def averaged(of_head: Callable[[int, int], list[float]], heads: int = HEADS) -> list[float]:
    """The mean over heads and layers of a list of scores a head."""
    every = [of_head(layer, head) for layer in range(LAYERS) for head in range(heads)]
    return [sum(column) / len(every) for column in zip(*every, strict=True)]


def attention(prefix: CachedPrefix, layer: int, query_head: int, back: int) -> list[float]:
    """The weights of the query ``back`` places from the end (1 is the last), maybe behind the prefix."""
    assert prefix.queries is not None
    query = prefix.queries[layer, -back, query_head].tolist()
    keys = key_rows(prefix, layer, query_head // (QUERY_HEADS // HEADS))
    seen = prefix.num_tokens - max(0, back - 1 - prefix.num_behind)
    exponents = [math.exp(dot(query, key) / math.sqrt(SIZE)) for key in keys[:seen]]
    return [one / sum(exponents) for one in exponents] + [0.0] * (prefix.num_tokens - seen)


def window_mean(prefix: CachedPrefix, layer: int, query_head: int, window: int) -> list[float]:
    rows = [attention(prefix, layer, query_head, back) for back in range(1, window + 1)]
    return [sum(column) / window for column in zip(*rows, strict=True)]


def assert_scores(policy: DropPolicy, prefix: CachedPrefix, wanted: list[float]) -> None:
    torch.testing.assert_close(
        policy.score(prefix).double(), torch.tensor(wanted).double(), rtol=1e-4, atol=1e-6
    )


def test_knorm_prefers_small_keys() -> None:
    prefix = make_prefix()
    wanted = averaged(lambda layer, head: [-norm(row) for row in key_rows(prefix, layer, head)])
    assert_scores(KNorm(ratio=0.5), prefix, wanted)


def unlike_the_mean_direction(rows: Rows) -> list[float]:
    units = [[x / norm(row) for x in row] for row in rows]
    anchor = [sum(column) / len(units) for column in zip(*units, strict=True)]
    return [-cosine(row, anchor) for row in rows]


def test_keydiff_prefers_keys_unlike_the_mean_direction() -> None:
    prefix = make_prefix()
    wanted = averaged(lambda layer, head: unlike_the_mean_direction(key_rows(prefix, layer, head)))
    assert_scores(KeyDiff(ratio=0.5, rotated=True), prefix, wanted)
    alike = torch.ones(2, 1, 32, SIZE)
    alike[0, 0, 5] = -1.0
    outlier = CachedPrefix.of(alike, list(range(32)), num_kv_heads=1)
    assert int(KeyDiff(ratio=0.5, rotated=True).score(outlier).argmax()) == 5


def test_valuediff_prefers_values_unlike_the_mean_direction_whatever_their_length() -> None:
    kv = torch.randn(2, LAYERS, LENGTH, HEADS * SIZE, generator=torch.Generator().manual_seed(8)) + 0.5
    tokens = list(range(LENGTH))

    def of_head(layer: int, head: int) -> list[float]:
        rows: Rows = kv[1, layer, :, head * SIZE : (head + 1) * SIZE].tolist()
        return unlike_the_mean_direction(rows)

    # Values are not rotated: it need not be known how keys are.
    prefix = CachedPrefix.of(kv, tokens, num_kv_heads=HEADS)
    assert_scores(ValueDiff(ratio=0.5), prefix, averaged(of_head))
    lengths = torch.linspace(0.01, 100, LENGTH)[:, None]
    longer = CachedPrefix.of(kv * lengths, tokens, num_kv_heads=HEADS)
    torch.testing.assert_close(ValueDiff(ratio=0.5).score(longer), ValueDiff(ratio=0.5).score(prefix))
    # Computed with more digits than KV has: in bfloat16 itself scores would be right to two or three.
    half = CachedPrefix.of(kv.bfloat16(), tokens, num_kv_heads=HEADS)
    same = CachedPrefix.of(kv.bfloat16().double(), tokens, num_kv_heads=HEADS)
    torch.testing.assert_close(ValueDiff(ratio=0.5).score(half), ValueDiff(ratio=0.5).score(same))


def rotated_by_hand(keys: Tensor, positions: Sequence[int]) -> Tensor:
    """Rotate ``[L, T, H * SIZE]``, pair by pair, as complex numbers."""
    by_head = keys.double().view(*keys.shape[:2], HEADS, SIZE)
    pairs = torch.complex(by_head[..., : SIZE // 2], by_head[..., SIZE // 2 :])
    angles = torch.tensor([[place * freq for freq in ROPE.inv_freq] for place in positions])
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None].to(pairs)
    return torch.cat((turned.real, turned.imag), dim=-1).flatten(2).to(keys.dtype)


def test_keydiff_compares_keys_as_they_were_before_the_rotation() -> None:
    plain = torch.randn(2, LAYERS, LENGTH, HEADS * SIZE, generator=torch.Generator().manual_seed(3))
    turned = plain.clone()
    turned[0] = rotated_by_hand(plain[0], range(LENGTH))
    tokens = list(range(LENGTH))
    cached = CachedPrefix.of(turned, tokens, num_kv_heads=HEADS, rope=ROPE)
    wanted = KeyDiff(ratio=0.5, rotated=True).score(CachedPrefix.of(plain, tokens, num_kv_heads=HEADS))
    assert torch.allclose(KeyDiff(ratio=0.5).score(cached), wanted, atol=1e-6)
    assert not torch.allclose(KeyDiff(ratio=0.5, rotated=True).score(cached), wanted, atol=1e-2)
    # A chain's second policy knows where its tokens were.
    kept = torch.arange(7, LENGTH, 2)
    rest = KeyDiff(ratio=0.5, rotated=True).score(
        CachedPrefix.of(plain[:, :, kept], kept.tolist(), num_kv_heads=HEADS)
    )
    assert torch.allclose(KeyDiff(ratio=0.5).score(cached.select(kept)), rest, atol=1e-6)
    again = cached.select(torch.arange(3, LENGTH)).select(kept - 3)
    assert torch.allclose(KeyDiff(ratio=0.5).score(again), rest, atol=1e-6)
    with pytest.raises(InvalidRequestError, match="does not say how its keys are rotated"):
        KeyDiff(ratio=0.5).score(dataclasses.replace(cached, rope=None))


def test_a_layer_is_loaded_once_however_often_it_is_looked_at() -> None:
    loads: list[int] = []

    def load(layer: int) -> Tensor:
        loads.append(layer)
        return torch.full((4, 1, 2), float(layer))

    layers = Layers(3, load)
    for layer in (0, 0, 2, -1, 1):
        assert float(layers[layer][0, 0, 0]) == layer % 3
    assert loads == [0, 2, 1]
    assert layers.select(torch.tensor([1, 3])).stack().shape == (3, 2, 1, 2)
    with pytest.raises(IndexError, match="layer 3 of 3"):
        layers[3]


@pytest.mark.parametrize("num_behind", [0, 3])
def test_tova_is_the_last_query_s_attention(num_behind: int) -> None:
    prefix = make_prefix(num_behind=num_behind)
    wanted = averaged(lambda layer, head: attention(prefix, layer, head, 1), QUERY_HEADS)
    assert_scores(TOVA(ratio=0.5), prefix, wanted)


@pytest.mark.parametrize("num_behind", [0, 1, 6, 40])
@pytest.mark.parametrize(("window", "kernel_size"), [(4, 1), (8, 3), (16, 5)])
def test_snapkv_is_the_window_s_attention_smoothed(window: int, kernel_size: int, num_behind: int) -> None:
    prefix = make_prefix(num_behind=num_behind)
    mean = averaged(lambda layer, head: window_mean(prefix, layer, head, window), QUERY_HEADS)
    before = mean[: LENGTH - window]
    half = kernel_size // 2
    smooth = []
    for place in range(len(before)):
        near = before[max(0, place - half) : place + half + 1]
        smooth.append(sum(near) / len(near))
    policy = SnapKV(ratio=0.5, window=window, kernel_size=kernel_size)
    assert_scores(policy, prefix, [*smooth, *[0.0] * window])


def test_snapkv_may_take_the_head_that_looks_most() -> None:
    prefix = make_prefix(num_behind=2)
    highest = [0.0] * 40
    for layer in range(LAYERS):
        for head in range(QUERY_HEADS):
            before = window_mean(prefix, layer, head, 8)[:40]
            near = [before[max(0, place - 1) : place + 2] for place in range(40)]
            highest = [max(one, sum(few) / len(few)) for one, few in zip(highest, near, strict=True)]
    policy = SnapKV(ratio=0.5, window=8, kernel_size=3, reduce="max")
    assert_scores(policy, prefix, [*highest, *[0.0] * 8])


@pytest.mark.parametrize(
    ("recent", "threshold", "lam"), [(1, 0.2, 0.1), (0, 0.2, 0.3), (3, 0.0, 0.0), (1, 0.5, 1)]
)
def test_rkv_is_importance_minus_redundancy(recent: int, threshold: float, lam: float) -> None:
    prefix = make_prefix()

    def of_head(layer: int, head: int) -> list[float]:
        groups = [window_mean(prefix, layer, query_head, 8) for query_head in range(2 * head, 2 * head + 2)]
        mean = [sum(column) / 2 for column in zip(*groups, strict=True)]
        importance = [max(mean[max(0, place - 1) : place + 2]) for place in range(LENGTH)]
        rows = key_rows(prefix, layer, head)
        means = []
        for place, row in enumerate(rows):
            alike = [0.0 if other == place else cosine(row, rows[other]) for other in range(LENGTH)]
            similar = [other for other in range(LENGTH) if alike[other] > threshold]
            for other in similar[len(similar) - min(recent, len(similar)) :]:
                alike[other] = 0.0
            means.append(sum(alike) / LENGTH)
        exponents = [math.exp(one) for one in means]
        redundancy = [one / sum(exponents) for one in exponents]
        return [lam * i - (1 - lam) * r for i, r in zip(importance, redundancy, strict=True)]

    policy = RKV(ratio=0.5, window=8, lam=lam, threshold=threshold, recent=recent, kernel_size=3)
    assert_scores(policy, prefix, averaged(of_head))


def test_rkv_needs_no_more_memory_for_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = make_prefix(640)
    policy = RKV(ratio=0.5, window=8)
    whole = policy.score(prefix)
    monkeypatch.setattr("lmcache_stream.dropping.rkv._ROWS", 7)
    torch.testing.assert_close(policy.score(prefix), whole)


def test_random_drop_is_its_seed_s() -> None:
    prefix = make_prefix()
    one, again, other = (RandomDrop(ratio=0.5, seed=seed).score(prefix) for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_streaming_llm_keeps_both_ends() -> None:
    kept = StreamingLLM(ratio=0.5, sinks=3).kept_indices(make_prefix(), 8)
    assert kept.tolist() == [0, 1, 2, *range(27, 48)]


@pytest.mark.parametrize("make", POLICIES)
@pytest.mark.parametrize(
    ("length", "changes", "count"),
    [
        (48, {"ratio": 0}, 48),
        (48, {"ratio": 0.5}, 24),
        (48, {"ratio": 0.6}, 16),
        (48, {"ratio": 0.999}, 8),
        (48, {"budget": 31}, 24),
        (48, {"budget": 1000}, 48),
        (8, {"ratio": 0.9}, 8),
        (16, {"ratio": 0.5}, 8),
    ],
)
def test_budgets_are_whole_chunks_with_sinks_and_window_in_them(
    make: Callable[..., DropPolicy], length: int, changes: dict[str, Any], count: int
) -> None:
    policy = make(sinks=2, window=4, **changes)
    kept = policy.kept_indices(make_prefix(length), 8)
    assert kept.dtype == torch.int64
    assert len(kept) == count
    assert bool((kept.diff() > 0).all())
    assert {0, 1, *range(length - 4, length)} <= set(kept.tolist())


@pytest.mark.parametrize("make", POLICIES)
def test_a_prefix_shorter_than_the_window(make: Callable[..., DropPolicy]) -> None:
    prefix = make_prefix(16)
    with pytest.raises(InvalidRequestError, match="window of 32"):
        make(ratio=0.5, window=32).kept_indices(prefix, 8)
    assert make(ratio=0.1, window=32, sinks=4).kept_indices(prefix, 16).tolist() == list(range(16))


def test_of_equal_scores_the_later_tokens_are_kept() -> None:
    policy = Scored(
        ratio=0.5, sinks=0, window=0, function=lambda keys, queries, tokens: torch.zeros(len(tokens))
    )
    assert policy.kept_indices(make_prefix(), 8).tolist() == list(range(24, 48))


def test_infinite_scores_do_not_outdo_what_is_always_kept() -> None:
    def function(keys: Tensor, queries: Tensor | None, tokens: object) -> Tensor:
        return torch.full((16,), torch.inf)

    policy = Scored(ratio=0.5, sinks=2, window=1, function=function)
    assert policy.kept_indices(make_prefix(16), 4).tolist() == [0, 1, *range(10, 16)]


def test_a_function_of_the_caller_s() -> None:
    def evens(keys: Tensor, queries: Tensor | None, tokens: Any) -> Tensor:
        assert keys.shape == (LAYERS, LENGTH, HEADS, SIZE)
        assert queries is not None
        assert queries.shape == (LAYERS, 16, QUERY_HEADS, SIZE)
        return torch.tensor([1 - token % 2 for token in tokens])

    policy = Scored(ratio=0.5, sinks=0, window=0, function=evens)
    assert policy.kept_indices(make_prefix(), 8).tolist() == list(range(0, 48, 2))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0] * LENGTH, "list"),
        (torch.zeros(LENGTH, dtype=torch.bool), "bool"),
        (torch.zeros(LENGTH - 1), "47"),
        (torch.zeros(HEADS, LENGTH), "a head or a layer"),
        (torch.full((LENGTH,), torch.nan), "NaN"),
    ],
)
def test_scores_that_are_none(returned: Any, message: str) -> None:
    policy = Scored(ratio=0.5, sinks=0, window=0, function=lambda *_: returned)
    with pytest.raises(InvalidRequestError, match=message):
        policy.kept_indices(make_prefix(), 8)


def test_a_nan_among_the_tokens_that_are_kept_anyway_is_seen() -> None:
    def scores(*_: object) -> Tensor:
        found = torch.zeros(LENGTH)
        found[0] = torch.nan
        return found

    with pytest.raises(InvalidRequestError, match="NaN"):
        Scored(ratio=0.5, sinks=2, window=2, function=scores).kept_indices(make_prefix(), 8)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (KNorm, {}, "ratio="),
        (KNorm, {"ratio": 0.5, "budget": 3}, "ratio="),
        (KNorm, {"ratio": 1}, "ratio=1"),
        (KNorm, {"ratio": -0.1}, "ratio=-0.1"),
        (KNorm, {"ratio": True}, "ratio=True"),
        (KNorm, {"ratio": math.nan}, "ratio=nan"),
        (KNorm, {"budget": 0}, "budget=0"),
        (KNorm, {"budget": 1.5}, "budget=1.5"),
        (KNorm, {"ratio": 0.5, "sinks": -1}, "sinks=-1"),
        (KNorm, {"ratio": 0.5, "window": 1.5}, "window=1.5"),
        (SnapKV, {"ratio": 0.5, "window": 0}, "window=0"),
        (SnapKV, {"ratio": 0.5, "kernel_size": 4}, "kernel_size=4"),
        (SnapKV, {"ratio": 0.5, "reduce": "median"}, "reduce='median'"),
        (RKV, {"ratio": 0.5, "window": 0}, "window=0"),
        (RKV, {"ratio": 0.5, "lam": 2}, "lam=2"),
        (RKV, {"ratio": 0.5, "recent": -1}, "recent=-1"),
        (RKV, {"ratio": 0.5, "kernel_size": 0}, "kernel_size=0"),
        (Scored, {"ratio": 0.5, "function": None}, "function=None"),
    ],
)
def test_parameters_that_do_not_fit(
    make: Callable[..., DropPolicy], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        make(**changes)


def test_a_budget_under_one_chunk_says_so() -> None:
    with pytest.raises(InvalidRequestError, match="less than one chunk of 8"):
        KNorm(budget=7, sinks=0, window=0).kept_indices(make_prefix(), 8)


@pytest.mark.parametrize("make", [TOVA, SnapKV, RKV])
def test_without_queries_the_error_names_what_needs_none(make: Callable[..., DropPolicy]) -> None:
    prefix = make_prefix()
    bare = dataclasses.replace(prefix, queries=None)
    with pytest.raises(InvalidRequestError, match="KeyDiff"):
        make(ratio=0.5, window=4).kept_indices(bare, 8)


@pytest.mark.parametrize(
    "shape",
    [
        (LAYERS, LENGTH + 1, QUERY_HEADS * SIZE),
        (LAYERS + 1, 4, QUERY_HEADS * SIZE),
        (LAYERS, 4, 3 * SIZE),
        (LAYERS, 0, QUERY_HEADS * SIZE),
        (2, LAYERS, 4, QUERY_HEADS * SIZE),
    ],
)
def test_queries_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    kv = torch.randn(2, LAYERS, LENGTH, HEADS * SIZE)
    with pytest.raises(InvalidRequestError, match="queries of shape"):
        CachedPrefix.of(kv, list(range(LENGTH)), num_kv_heads=HEADS, queries=torch.zeros(shape))


@pytest.mark.parametrize(
    "change",
    [
        lambda queries: queries.to(torch.complex64),
        lambda queries: queries > 0,
        lambda queries: queries.to(torch.float8_e4m3fn),
        lambda queries: queries.to("meta"),
        lambda queries: queries.to_sparse(),
    ],
    ids=["complex", "bool", "float8", "meta", "sparse"],
)
def test_queries_of_another_kind_are_refused(change: Callable[[Tensor], Tensor]) -> None:
    queries = torch.randn(LAYERS, 4, QUERY_HEADS * SIZE)
    kv = torch.randn(2, LAYERS, 16, HEADS * SIZE)
    with pytest.raises(InvalidRequestError, match="give a dense tensor of bfloat16"):
        CachedPrefix.of(kv, range(16), num_kv_heads=HEADS, queries=change(queries))


def test_queries_without_heads_are_refused() -> None:
    kv = torch.randn(2, LAYERS, 16, HEADS * SIZE)
    with pytest.raises(InvalidRequestError, match=r"shape \[2, 4, 0\]"):
        CachedPrefix.of(kv, range(16), num_kv_heads=HEADS, queries=torch.empty(LAYERS, 4, 0))


def test_queries_that_are_not_finite_are_refused() -> None:
    kv = torch.randn(2, LAYERS, LENGTH, HEADS * SIZE)
    queries = torch.zeros(LAYERS, 4, QUERY_HEADS * SIZE)
    queries[0, 0, 0] = torch.inf
    with pytest.raises(InvalidRequestError, match="infinities"):
        CachedPrefix.of(kv, list(range(LENGTH)), num_kv_heads=HEADS, queries=queries)


def test_always_keep() -> None:
    policy = AlwaysKeep(StreamingLLM(ratio=0.5, sinks=0), [(4, 8), (10, 11)])
    kept = policy.kept_indices(make_prefix(), 8).tolist()
    assert kept == [4, 5, 6, 7, 10, *range(29, 48)]
    with pytest.raises(InvalidRequestError, match="what else is always kept are 30 tokens"):
        AlwaysKeep(StreamingLLM(ratio=0.5, sinks=0), [(0, 30)]).kept_indices(make_prefix(), 8)
    with pytest.raises(InvalidRequestError, match=r"\(5, 5\)"):
        AlwaysKeep(StreamingLLM(ratio=0.5), [(5, 5)])


def test_whole_chunks_are_kept_or_dropped_together() -> None:
    kept = WholeChunks(KNorm(ratio=0.5, sinks=2, window=3), 4).kept_indices(make_prefix(), 8)
    runs = kept.view(-1, 4)
    assert len(kept) == 24
    assert bool((runs[:, 0] % 4 == 0).all())
    assert torch.equal(runs - runs[:, :1], torch.arange(4).expand(6, 4))
    assert {0, 47} <= set(kept.tolist())
    with pytest.raises(InvalidRequestError, match="does not divide"):
        WholeChunks(KNorm(ratio=0.5), 3).kept_indices(make_prefix(), 8)


def test_a_chain_chooses_from_what_was_kept() -> None:
    first = StreamingLLM(ratio=0.5, sinks=0)
    second = KNorm(ratio=0.5, sinks=0, window=0)
    prefix = make_prefix(64)
    kept = Chain([first, second]).kept_indices(prefix, 8)
    norms = KNorm(ratio=0.5).score(prefix)[32:]
    wanted = (norms.topk(16).indices + 32).sort().values
    assert torch.equal(kept, wanted)
    for num_behind in (0, 8, 20):
        followed = make_prefix(64, num_behind=num_behind)
        snap = Chain([StreamingLLM(ratio=0.5, sinks=0), SnapKV(ratio=0.5, sinks=0, window=8)])
        kept = snap.kept_indices(followed, 8)
        rest = followed.select(torch.arange(32, 64))
        chosen = SnapKV(ratio=0.5, sinks=0, window=8).kept_indices(rest, 8)
        assert torch.equal(kept, chosen + 32)
    gap = torch.tensor([*range(40), *range(41, 64)])
    assert make_prefix(64, num_behind=8).select(gap).queries is not None
    assert make_prefix(64, num_behind=8).select(gap[gap != 56]).queries is None
    assert make_prefix(64).select(gap[gap != 50]).queries is None
    assert snap.needs_queries
    assert len(snap.kept_indices(prefix, 8)) == 16
    with pytest.raises(InvalidRequestError, match="no policy"):
        Chain([])


def test_wrappers_of_wrappers_are_refused_when_they_are_made() -> None:
    inner = WholeChunks(KeyDiff(ratio=0.5), 4)
    for wrap in (lambda: AlwaysKeep(inner, [(0, 2)]), lambda: WholeChunks(Chain([KeyDiff(ratio=0.5)]))):  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="wrappers do not nest"):
            wrap()
