"""The self-check over tables of layouts, thetas, pairings and head splits: one is right, all others are not.

Keys and values are those that ``transformers`` caches for random models of several shapes.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from lmcache_stream.cache.geometry import KVGeometry
from lmcache_stream.cache.layout_check import find_layout, verify_layout
from lmcache_stream.cache.selfcheck import MAX_SPREAD, check_layer0, measure_spread
from lmcache_stream.errors import LayoutError
from lmcache_stream.rope import RopeConfig
from tests.rope.reference import config_object, random_model

from .combinations import applicable, chunk_of, combinations, shaped

COUNT, BLOCK = 512, 32
TOKENS: list[int] = torch.randint(1, 120, (COUNT,), generator=torch.Generator().manual_seed(5)).tolist()
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 256,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
# KV heads, head size, and what else is special.
MODELS: dict[str, tuple[str, int, int, dict[str, Any]]] = {
    "llama, 1 head of 128": ("llama", 1, 128, {"rope_theta": 5e5}),
    "llama, 3 heads of 64": ("llama", 3, 64, {"rope_theta": 1e5}),
    "llama, 4 heads of 32": ("llama", 4, 32, {"rope_theta": 1e4, **LLAMA3}),
    "qwen2, 2 heads of 64 with biases": ("qwen2", 2, 64, {"rope_theta": 1e6}),
    "qwen3, 2 heads of 128 with norms": ("qwen3", 2, 128, {"rope_theta": 1e6, **YARN}),
    "stablelm, 2 heads of 64 in part": (
        "stablelm",
        2,
        64,
        {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
    ),
    "glm4, 2 heads of 128 in part": ("glm4", 2, 128, {"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    "cohere, 4 heads of 64": ("cohere", 4, 64, {"rope_theta": 8e6}),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LAYOUTS = {
    "float32": ("two-plane", "fused", "cpu-vec"),
    "bfloat16": ("two-plane", "fused", "cpu-vec", "cpu-amx"),
}
CASES = [(dtype, layout) for dtype, found in LAYOUTS.items() for layout in found]


def config_of(model: str) -> dict[str, Any]:
    model_type, heads, size, rope = MODELS[model]
    sizes = {"vocab_size": 128, "intermediate_size": 64, "hidden_size": 2 * heads * size, "pad_token_id": 0}
    attention = {"num_attention_heads": 2 * heads, "num_key_value_heads": heads, "head_dim": size}
    parameters = {"rope_type": "default", **rope}
    fields = {
        "model_type": model_type,
        "num_hidden_layers": 1,
        **sizes,
        **attention,
        "rope_parameters": parameters,
    }
    written: dict[str, Any] = config_object(fields).to_dict()
    return {**written, **attention}


@functools.cache
def layer0_of(model: str, dtype: str) -> Tensor:
    """Return K and V ``[2, T, D]`` of a random model, as ``transformers`` caches them."""
    network = random_model(config_object(config_of(model)), DTYPES[dtype])
    for name, parameter in network.named_parameters():
        if name.endswith("k_proj.bias"):
            torch.nn.init.normal_(parameter)
    with torch.no_grad():
        layer = network(input_ids=torch.tensor([TOKENS])).past_key_values.layers[0]
    return torch.stack([plane[0].transpose(0, 1).flatten(1) for plane in (layer.keys, layer.values)])


def geometry_of(model: str, dtype: str, layout: str) -> KVGeometry:
    _, heads, size, _ = MODELS[model]
    kind = DTYPES[dtype]
    return KVGeometry(
        num_layers=1, num_kv_heads=heads, head_size=size, dtype=kind, layout=layout, block_size=BLOCK
    )


@pytest.mark.parametrize(("dtype", "layout"), CASES)
@pytest.mark.parametrize("model", MODELS)
def test_of_all_combinations_the_right_one_alone_is_accepted(model: str, dtype: str, layout: str) -> None:
    written = geometry_of(model, dtype, layout)
    assert applicable(written, COUNT) == list(LAYOUTS[dtype])
    chunk = chunk_of(layer0_of(model, dtype), written)
    accepted, spreads = [], []
    for found in combinations(chunk, written, config_of(model), COUNT):
        spread = measure_spread(found.keys, TOKENS, found.rope)
        assert spread is not None
        try:
            check_layer0(found.keys, TOKENS, found.rope, layout=found.geometry.layout)
        except LayoutError:
            spreads.append((spread, found.name))
        else:
            accepted.append((found.is_right, spread, found.name))
    assert [right for right, *_ in accepted] == [True], accepted
    assert accepted[0][1] < MAX_SPREAD / 3, accepted
    assert min(spreads) > (10 * MAX_SPREAD, ""), min(spreads)
    # Two layouts at the least, two splits, four thetas and two pairings.
    assert len(spreads) > 2 * 2 * 4 * 2


@pytest.mark.parametrize(("dtype", "layout"), CASES)
@pytest.mark.parametrize("model", MODELS)
def test_the_error_names_the_layout_that_fits(model: str, dtype: str, layout: str) -> None:
    """As the context calls it: on chunks, of which one layout is believed."""
    written = geometry_of(model, dtype, layout)
    chunk = chunk_of(layer0_of(model, dtype), written)
    rope = RopeConfig.from_model_config(config_of(model))
    for name in LAYOUTS[dtype]:
        read = geometry_of(model, dtype, name)
        chunks = shaped(chunk, read, COUNT)
        if name == layout:
            assert verify_layout(chunks, TOKENS, read, rope) is not None
            continue
        # Chunks of two planes have another shape than all others, so that nobody can take one for another.
        fits = "nothing else fits" if "two-plane" in (name, layout) else rf"{layout} fits, with 0\.00"
        with pytest.raises(LayoutError, match=rf"decoded as {name}, .*; {fits}"):
            verify_layout(chunks, TOKENS, read, rope)


@pytest.mark.parametrize(("dtype", "layout"), CASES)
@pytest.mark.parametrize("model", MODELS)
def test_the_layout_is_found_among_all_that_have_its_shape(model: str, dtype: str, layout: str) -> None:
    written = geometry_of(model, dtype, layout)
    chunks = shaped(chunk_of(layer0_of(model, dtype), written), written, COUNT)
    config = config_of(model)
    rope = RopeConfig.from_model_config(config)
    for believed in LAYOUTS[dtype]:
        found, spread = find_layout(chunks, TOKENS, geometry_of(model, dtype, believed), rope)
        assert found == layout
        assert spread < MAX_SPREAD / 3
    parameters = {**config["rope_parameters"], "rope_theta": 10 * config["rope_parameters"]["rope_theta"]}
    wrong = RopeConfig.from_model_config({**config, "rope_parameters": parameters})
    with pytest.raises(LayoutError, match=rf"layout='auto': no layout fits; .*{layout} 0\.[2-9]"):
        find_layout(chunks, TOKENS, written, wrong)
    with pytest.raises(LayoutError, match="layout='auto': too few tokens of this prompt repeat"):
        find_layout(chunks, list(range(COUNT)), written, rope)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pair", [0, 20, 31])
def test_a_huge_bias_hides_nothing(pair: int, dtype: str) -> None:
    """The norm of Qwen2.5-7B's bias on layer 0's keys is 605: here it is all in one pair of each head."""
    model = "qwen2, 2 heads of 64 with biases"
    network = random_model(config_object(config_of(model)), DTYPES[dtype])
    attention = network.layers[0].self_attn
    torch.nn.init.normal_(attention.k_proj.weight, std=1 / 16)
    with torch.no_grad():
        attention.k_proj.bias.normal_()
        attention.k_proj.bias.view(2, 64)[:, [pair, pair + 32]] = 300.0
        layer = network(input_ids=torch.tensor([TOKENS])).past_key_values.layers[0]
    layer0 = torch.stack([plane[0].transpose(0, 1).flatten(1) for plane in (layer.keys, layer.values)])
    written = geometry_of(model, dtype, "fused")
    for found in combinations(chunk_of(layer0, written), written, config_of(model), COUNT):
        spread = measure_spread(found.keys, TOKENS, found.rope)
        assert spread is not None
        is_near = spread < 10 * MAX_SPREAD
        assert is_near == found.is_right, f"{found.name}: {spread:.4f}"
        assert spread < MAX_SPREAD / 3 or not found.is_right
