"""The layer-0 self-check: right combinations pass, every wrong one is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from lmcache_stream.cache import layouts, selfcheck
from lmcache_stream.cache.geometry import KVGeometry
from lmcache_stream.cache.selfcheck import MAX_SPREAD, check_layer0, measure_spread
from lmcache_stream.errors import InvalidRequestError, LayoutError
from lmcache_stream.rope import Pairing, RopeConfig, rotate_keys
from tests.rope.reference import config_object, random_model

HEADS, HEAD_SIZE, COUNT = 2, 64, 640
TOKENS: list[int] = torch.randint(1, 150, (COUNT,), generator=torch.Generator().manual_seed(3)).tolist()
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}},
    "qwen2": {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    "qwen3": {"rope_parameters": {"rope_theta": 1e6, **YARN}},
    "glm4": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "cohere": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
}


def config_of(model_type: str, **changes: Any) -> dict[str, Any]:
    sizes = {"vocab_size": 160, "hidden_size": 256, "intermediate_size": 64, "pad_token_id": 0}
    heads = {"num_attention_heads": 4, "num_key_value_heads": HEADS, "head_dim": HEAD_SIZE}
    fields = {"model_type": model_type, "num_hidden_layers": 1, **sizes, **heads}
    found: dict[str, Any] = config_object({**fields, **MODELS[model_type], **changes}).to_dict()
    return found


def rope_of(model_type: str, **changes: Any) -> RopeConfig:
    return RopeConfig.from_model_config(config_of(model_type, **changes))


def layer0_of(model_type: str) -> Tensor:
    """Return bfloat16 K and V ``[2, T, D]`` of a random model, as ``transformers`` caches them."""
    model = random_model(config_object(config_of(model_type)), torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias"):
            torch.nn.init.normal_(parameter)
    with torch.no_grad():
        layer = model(input_ids=torch.tensor([TOKENS])).past_key_values.layers[0]
    return torch.stack([x[0].transpose(0, 1).flatten(1) for x in (layer.keys, layer.values)])


@pytest.fixture(scope="module")
def layer0() -> dict[str, Tensor]:
    return {model_type: layer0_of(model_type) for model_type in MODELS}


@pytest.mark.parametrize("model_type", MODELS)
def test_the_right_rotation_passes_with_margin(model_type: str, layer0: dict[str, Tensor]) -> None:
    spread = measure_spread(layer0[model_type][0], TOKENS, rope_of(model_type))
    assert spread is not None
    assert 0 < spread < MAX_SPREAD / 2


def with_theta(model_type: str, factor: float) -> RopeConfig:
    parameters = MODELS[model_type]["rope_parameters"]
    changed = {**parameters, "rope_theta": parameters["rope_theta"] * factor}
    return rope_of(model_type, rope_parameters=changed)


def wrong_ropes(model_type: str) -> dict[str, RopeConfig]:
    right = rope_of(model_type)
    other: Pairing = "interleaved" if right.pairing == "half" else "half"
    return {
        "theta * 10": with_theta(model_type, 10),
        "theta / 10": with_theta(model_type, 0.1),
        "theta * 1.1": with_theta(model_type, 1.1),
        "pairing": dataclasses.replace(right, pairing=other),
        "no rotation": dataclasses.replace(right, inv_freq=(0.0,) * len(right.inv_freq)),
        "other way round": dataclasses.replace(right, inv_freq=tuple(-f for f in right.inv_freq)),
        "linear": dataclasses.replace(right, inv_freq=tuple(f / 2 for f in right.inv_freq)),
        "half the rotary part": dataclasses.replace(right, inv_freq=right.inv_freq[::2]),
        "half the head size": RopeConfig(
            head_size=HEAD_SIZE // 2, inv_freq=right.inv_freq[: HEAD_SIZE // 4], pairing="half"
        ),
        "twice the head size": RopeConfig(head_size=2 * HEAD_SIZE, inv_freq=right.inv_freq, pairing="half"),
    }


@pytest.mark.parametrize("wrong", wrong_ropes("llama"))
@pytest.mark.parametrize("model_type", MODELS)
def test_a_wrong_rotation_is_refused(model_type: str, wrong: str, layer0: dict[str, Tensor]) -> None:
    spread = measure_spread(layer0[model_type][0], TOKENS, wrong_ropes(model_type)[wrong])
    assert spread is not None
    assert spread > (3 if wrong == "theta * 1.1" else 10) * MAX_SPREAD


def test_scaling_left_out_is_refused(layer0: dict[str, Tensor]) -> None:
    plain = {"rope_theta": 1e6, "rope_type": "default"}
    rope = rope_of("qwen3", rope_parameters=plain)
    spread = measure_spread(layer0["qwen3"][0], TOKENS, rope)
    assert spread is not None
    assert spread > 10 * MAX_SPREAD


SINGLE_PLANE = ["fused", "cpu-vec", "cpu-amx"]


def decoded(layer: Tensor, stored: str, read: str, *, block_size: int = 32) -> Tensor:
    """Return layer 0's keys, written to chunks by one layout and read by another."""
    g = KVGeometry(
        num_layers=1,
        num_kv_heads=HEADS,
        head_size=HEAD_SIZE,
        dtype=torch.bfloat16,
        layout=stored,
        block_size=block_size,
    )
    chunk = torch.empty(layouts.get(stored).chunk_shape(g, COUNT), dtype=g.dtype)
    layouts.get(stored).encode(layer[:, None], chunk, g)
    kv = torch.empty(g.kv_shape(COUNT), dtype=g.dtype)
    layouts.get(read).decode(chunk, kv, g)
    return kv[0, 0]


@pytest.mark.parametrize("read", SINGLE_PLANE)
@pytest.mark.parametrize("stored", SINGLE_PLANE)
@pytest.mark.parametrize("model_type", MODELS)
def test_layouts(model_type: str, stored: str, read: str, layer0: dict[str, Tensor]) -> None:
    rope = rope_of(model_type)
    keys = {name: decoded(layer0[model_type], stored, name) for name in SINGLE_PLANE}
    if stored == read:
        spread = check_layer0(keys[read], TOKENS, rope, layout=read, others=keys.items())
        assert spread == measure_spread(layer0[model_type][0], TOKENS, rope)
        return
    with pytest.raises(LayoutError, match=rf"decoded as {read}, .*; {stored} fits, with 0\.00"):
        check_layer0(keys[read], TOKENS, rope, layout=read, others=keys.items())
    spread = measure_spread(keys[read], TOKENS, rope)
    assert spread is not None
    assert spread > 30 * MAX_SPREAD


def test_when_nothing_fits_the_error_says_so(layer0: dict[str, Tensor]) -> None:
    keys = {name: decoded(layer0["llama"], "cpu-vec", name) for name in ("fused", "cpu-amx")}
    with pytest.raises(
        LayoutError,
        match=r"decoded as fused, keys of equal tokens differ by 0\.\d{4} .* nothing else fits "
        r"either, cpu-amx 0\.\d\d: the model config",
    ):
        check_layer0(
            keys["fused"],
            TOKENS,
            rope_of("llama"),
            layout="fused",
            others=[("cpu-amx", keys["cpu-amx"])],
        )


@pytest.mark.parametrize("broken", ["zero", "nan", "infinite"])
def test_keys_that_are_none_are_refused(broken: str, layer0: dict[str, Tensor]) -> None:
    keys = layer0["llama"][0].clone()
    if broken == "zero":
        keys.zero_()
    else:
        keys[:, 5] = float("nan") if broken == "nan" else float("inf")
    with pytest.raises(LayoutError, match="differ by inf"):
        check_layer0(keys, TOKENS, rope_of("llama"), layout="fused")


@pytest.mark.parametrize(
    ("tokens", "can_tell"),
    [
        ([], False),
        (range(COUNT), False),
        ([0] * 15, False),
        ([0] * 16, True),
        ([*range(100), *range(7)], False),
        ([*range(100), *range(8)], True),
    ],
)
def test_too_few_repeats_tell_nothing(tokens: list[int], can_tell: bool, layer0: dict[str, Tensor]) -> None:
    keys, rope = layer0["llama"][0][: len(tokens)], rope_of("llama")
    assert (measure_spread(keys, tokens, rope) is not None) == can_tell
    if not can_tell:
        assert check_layer0(keys, tokens, rope, layout="fused") is None


def test_tokens_may_be_a_tensor(layer0: dict[str, Tensor]) -> None:
    keys, rope, tokens = layer0["llama"][0], rope_of("llama"), torch.tensor(TOKENS)
    assert measure_spread(keys, tokens, rope) == measure_spread(keys, TOKENS, rope)  # type: ignore[arg-type]


def test_the_measure_itself() -> None:
    """Eight pairs of orthogonal unit vectors: half of their length is off the mean."""
    rope = RopeConfig(head_size=2, inv_freq=(0.0,), pairing="half")
    keys = torch.tensor([[1.0, 0.0]] * 8 + [[0.0, 1.0]] * 8)
    assert measure_spread(keys, [*range(8), *range(8)], rope) == pytest.approx(0.5**0.5)
    # A token that occurs once has no say.
    more = torch.cat((keys, torch.tensor([[100.0, 0.0]])))
    assert measure_spread(more, [*range(8), *range(8), 99], rope) == pytest.approx(0.5**0.5)


@pytest.mark.parametrize("size", [0.0, 1e-7, 1e-6, 1e-5])
def test_a_pair_that_the_model_does_not_use_has_no_say(size: float) -> None:
    """In float16 numbers this small have few bits, or none, so that right keys differ there."""
    rope = RopeConfig(head_size=8, inv_freq=(1.0, 0.3, 0.1, 0.03), pairing="half")
    of_token = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))
    of_token[:, [2, 6]] *= size
    tokens = list(range(20)) * 4
    keys = rotate_keys(of_token[tokens], [0] * 80, range(80), rope).half()
    spread = measure_spread(keys, tokens, rope)
    assert spread is not None
    assert 0 < spread < MAX_SPREAD / 10
    wrong = measure_spread(keys, tokens, dataclasses.replace(rope, pairing="interleaved"))
    assert wrong is not None
    assert wrong > 10 * MAX_SPREAD


def test_positions_may_be_others(layer0: dict[str, Tensor]) -> None:
    rows = torch.arange(100, 500, 2)
    keys, tokens = layer0["llama"][0][rows], [TOKENS[row] for row in rows]
    rope = rope_of("llama")
    right = measure_spread(keys, tokens, rope, positions=rows.tolist())
    wrong = measure_spread(keys, tokens, rope)
    assert right is not None
    assert wrong is not None
    assert right < MAX_SPREAD < wrong


def test_of_a_long_prefix_1024_keys_are_read_the_farthest_repeats_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[list[int]] = []

    def record(keys: Tensor, old: Tensor, *arguments: Any) -> Tensor:
        seen.append(old.tolist())
        return keys

    monkeypatch.setattr(selfcheck, "rotate_keys", record)
    rope = RopeConfig(head_size=2, inv_freq=(0.0,), pairing="half")
    measure_spread(torch.ones(5000, 2), [*range(2500), *reversed(range(2500))], rope)
    measure_spread(torch.ones(5000, 2), [0] * 5000, rope)
    assert sorted(seen[0]) == [*range(512), *range(4488, 5000)]
    assert len(seen[1]) == 1024
    assert {0, 4999} <= set(seen[1])


def test_misfits_are_refused(layer0: dict[str, Tensor]) -> None:
    for keys in (layer0["llama"][0][:-1], layer0["llama"]):
        with pytest.raises(InvalidRequestError, match=r"keys of layer 0 must be \[640, D\]"):
            measure_spread(keys, TOKENS, rope_of("llama"))
