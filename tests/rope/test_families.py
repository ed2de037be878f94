"""The table of model types, against ``transformers``' whole models.

Attention with rotary positions sees differences of positions only. So a model run at positions
shifted by a constant has the same hidden states, and the cached keys of *every* layer differ by the
rotation alone: a wrong pairing, a layer without RoPE or one with frequencies of its own would show.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from lmcache_stream.errors import GeometryError
from lmcache_stream.rope import Pairing, RopeConfig, rotate_keys
from lmcache_stream.rope.families import FAMILIES

from .reference import config_object, random_model

TOKENS = 24
SHIFT = 57
SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Where the model type has them.
OPTIONAL = {
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
}
SPECIAL: dict[str, dict[str, Any]] = {"minimax_m2": {"rotary_dim": 8}, "mistral": {"sliding_window": None}}


def tiny(model_type: str, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """Return a random model of that type and its config as a dict."""
    known = config_object({"model_type": model_type}).to_dict()
    optional = {key: value for key, value in OPTIONAL.items() if key in known}
    special = SPECIAL.get(model_type, {})
    config = config_object({"model_type": model_type, **SMALL, **optional, **special, **changes})
    model = random_model(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model, config.to_dict()


def cached_keys(model: Any, shift: int) -> Tensor:
    """Return ``[L, T, D]`` of the same tokens at positions from ``shift`` on."""
    ids = torch.randint(3, 64, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        positions = torch.arange(TOKENS)[None] + shift
        cache = model(input_ids=ids, position_ids=positions, use_cache=True).past_key_values
    return torch.stack([layer.keys[0].transpose(0, 1).flatten(1) for layer in cache.layers])


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_layer_rotates_as_the_table_says(model_type: str) -> None:
    model, config = tiny(model_type)
    rope = RopeConfig.from_model_config(config)
    here, there = cached_keys(model, 0), cached_keys(model, SHIFT)
    assert (rope.rotary_dim < rope.head_size) == (FAMILIES[model_type].partial == "required")

    def errors(rope: RopeConfig) -> Tensor:
        moved = rotate_keys(here, range(TOKENS), range(SHIFT, SHIFT + TOKENS), rope)
        apart: Tensor = (moved - there).flatten(1).norm(dim=1) / there.flatten(1).norm(dim=1)
        return apart

    assert errors(rope).max() < 2e-4
    # The test can fail: the other pairing is wrong in every layer.
    other: Pairing = "interleaved" if rope.pairing == "half" else "half"
    assert errors(dataclasses.replace(rope, pairing=other)).min() > 0.1


def test_parameters_by_layer_type_where_all_layers_are_of_full_attention() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    nested = {
        "full_attention": {"rope_theta": 1e5, **yarn},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    layers = {"layer_types": ["full_attention"] * 5, "sliding_window": 4096}
    model, config = tiny("olmo3", rope_parameters=nested, **layers)
    assert set(config["rope_parameters"]) == set(nested)
    rope = RopeConfig.from_model_config(config, pairing="half")
    here, there = cached_keys(model, 0), cached_keys(model, SHIFT)
    moved = rotate_keys(here, range(TOKENS), range(SHIFT, SHIFT + TOKENS), rope)
    assert (moved - there).flatten(1).norm(dim=1).max() < 2e-4 * there.flatten(1).norm(dim=1).min()


@pytest.mark.parametrize("model_type", ["smollm3", "cohere2", "exaone4", "nanochat", "gpt2"])
def test_refused_types_do_not_move_by_one_rotation(model_type: str) -> None:
    model, config = tiny(model_type)
    with pytest.raises(GeometryError):
        RopeConfig.from_model_config(config)
    here, there = cached_keys(model, 0), cached_keys(model, SHIFT)
    plain = {**SMALL, "head_dim": here.shape[2] // 2, "model_type": "any", "rope_theta": 1e4}
    pairings: tuple[Pairing, ...] = ("half", "interleaved")
    for pairing in pairings:
        rope = RopeConfig.from_model_config(plain, pairing=pairing)
        moved = rotate_keys(here, range(TOKENS), range(SHIFT, SHIFT + TOKENS), rope)
        assert (moved - there).norm() / there.norm() > 0.1
