"""Reading RoPE from configs, against the frequencies of ``transformers``' modules."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lmcache_stream.errors import GeometryError
from lmcache_stream.rope import RopeConfig

from .configs import CONFIGS
from .reference import Reference, as_transformers_5

LLAMA = CONFIGS["SmolLM2-135M"]
PHI = CONFIGS["Phi-3-mini-128k"]
FORMS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "transformers 4": dict,
    "transformers 5": as_transformers_5,
}
LONG = 131072


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CONFIGS)
def test_frequencies_are_bit_for_bit_those_of_transformers(name: str, form: str) -> None:
    config = FORMS[form](CONFIGS[name])
    rope = RopeConfig.from_model_config(config, max_model_len=LONG)
    wanted = Reference(CONFIGS[name], torch.arange(LONG - 1, LONG)).inv_freq
    assert torch.equal(torch.tensor(rope.inv_freq, dtype=torch.float32), wanted)


@pytest.mark.parametrize(
    ("name", "head_size", "rotary_dim", "pairing", "rope_type"),
    [
        ("Llama-3.1-8B", 128, 128, "half", "llama3"),
        ("SmolLM2-135M", 64, 64, "half", "default"),
        ("vicuna-7b-v1.5-16k", 128, 128, "half", "linear"),
        ("Mistral-Nemo", 128, 128, "half", "default"),
        ("Qwen2.5-7B with YaRN", 128, 128, "half", "yarn"),
        ("Phi-3-mini-128k", 96, 96, "half", "longrope"),
        ("Phi-4-mini", 128, 96, "half", "longrope"),
        ("GLM-4-9B-0414", 128, 64, "interleaved", "default"),
        ("command-r-v01", 128, 128, "interleaved", "default"),
        ("pythia-1.4b", 128, 32, "half", "default"),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_the_rest_is_read_too(
    name: str, form: str, head_size: int, rotary_dim: int, pairing: str, rope_type: str
) -> None:
    rope = RopeConfig.from_model_config(FORMS[form](CONFIGS[name]), max_model_len=LONG)
    found = (rope.head_size, rope.rotary_dim, rope.pairing, rope.rope_type)
    assert found == (head_size, rotary_dim, pairing, rope_type)


@pytest.mark.parametrize("name", ["Phi-3-mini-128k", "Phi-4-mini"])
@pytest.mark.parametrize(("max_model_len", "last"), [(4096, 4095), (4097, 4096)])
def test_longrope_changes_its_factors_beyond_the_trained_length(
    name: str, max_model_len: int, last: int
) -> None:
    rope = RopeConfig.from_model_config(CONFIGS[name], max_model_len=max_model_len)
    wanted = Reference(CONFIGS[name], torch.tensor([last])).inv_freq
    assert torch.equal(torch.tensor(rope.inv_freq, dtype=torch.float32), wanted)


def test_a_window_that_is_switched_off() -> None:
    config = changed(model_type="qwen2", sliding_window=4096, use_sliding_window=False)
    RopeConfig.from_model_config(config)
    with pytest.raises(GeometryError, match="window of 4096"):
        RopeConfig.from_model_config({**config, "use_sliding_window": True})


def test_yarn_options_are_read() -> None:
    options = {"beta_fast": 16, "beta_slow": 2, "truncate": False, "attention_factor": 1.25}
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
    config = {**LLAMA, "rope_scaling": {**yarn, **options}}
    rope = RopeConfig.from_model_config(config)
    wanted = Reference(config, torch.tensor([0])).inv_freq
    assert torch.equal(torch.tensor(rope.inv_freq, dtype=torch.float32), wanted)
    plain = RopeConfig.from_model_config({**LLAMA, "rope_scaling": yarn})
    assert plain.inv_freq != rope.inv_freq


def test_legacy_names() -> None:
    new = RopeConfig.from_model_config(PHI, max_model_len=LONG)
    scaling = {**PHI["rope_scaling"], "type": "su"}
    old = RopeConfig.from_model_config({**PHI, "rope_scaling": scaling}, max_model_len=LONG)
    assert old.inv_freq == new.inv_freq
    minimax = {**LLAMA, "model_type": "minimax_m2", "rotary_dim": 32}
    assert RopeConfig.from_model_config(minimax).rotary_dim == 32


def test_the_text_part_of_a_multimodal_config_is_read() -> None:
    whole = {"model_type": "llava", "text_config": LLAMA, "vision_config": {"hidden_size": 1024}}
    assert RopeConfig.from_model_config(whole) == RopeConfig.from_model_config(LLAMA)


def test_a_pairing_given_by_hand() -> None:
    plain = RopeConfig.from_model_config(LLAMA)
    unknown = {**LLAMA, "model_type": "brand_new"}
    assert RopeConfig.from_model_config(unknown, pairing="half") == plain
    reordered = RopeConfig.from_model_config(LLAMA, pairing="interleaved")
    assert (reordered.pairing, reordered.inv_freq) == ("interleaved", plain.inv_freq)


def changed(**values: Any) -> dict[str, Any]:
    """Return the config of a Llama with these keys changed, and those that are ``...`` left out."""
    return {key: value for key, value in {**LLAMA, **values}.items() if value is not ...}


def scaled(**values: Any) -> dict[str, Any]:
    return changed(rope_scaling=values)


LAYERS = ["sliding_attention", "full_attention"]
GEMMA = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LLAMA3 = {**CONFIGS["Llama-3.1-8B"]["rope_scaling"]}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no theta": (changed(rope_theta=...), "no rope_theta, which is never guessed"),
    "no theta in 5": (
        changed(rope_theta=..., rope_parameters={"rope_type": "default"}),
        "no rope_theta",
    ),
    "theta null": (changed(rope_theta=None), "no rope_theta"),
    "theta zero": (changed(rope_theta=0), "rope_theta must be a positive number, not 0"),
    "theta text": (changed(rope_theta="1e4"), "rope_theta must be a positive number, not '1e4'"),
    "two thetas": (
        changed(rope_parameters={"rope_theta": 1e6, "rope_type": "default"}),
        "rope_theta is given as 1000000.0 and as 100000",
    ),
    "both forms": (
        changed(rope_parameters={"rope_theta": 1e5}, rope_scaling={"type": "linear"}),
        "contradict",
    ),
    "two types": (scaled(rope_type="yarn", type="linear"), "contradict"),
    "dynamic": (scaled(type="dynamic", factor=2.0), "dynamic NTK"),
    "unknown type": (scaled(rope_type="fope"), "unknown rope type 'fope'"),
    "unknown key": (scaled(rope_type="default", alpha=3.0), "unknown rope parameters alpha"),
    "linear without factor": (scaled(rope_type="linear"), "factor must be a positive number"),
    "linear by zero": (scaled(rope_type="linear", factor=0), "factor must be a positive number"),
    "yarn without factor": (scaled(**{**YARN, "factor": None}), "factor must be"),
    "yarn without length": (
        scaled(rope_type="yarn", factor=4.0),
        "original_max_position_embeddings must be a positive number, not None",
    ),
    "llama3 without a factor": (
        scaled(**{k: v for k, v in LLAMA3.items() if k != "low_freq_factor"}),
        "low_freq_factor must be",
    ),
    "llama3 upside down": (scaled(**{**LLAMA3, "low_freq_factor": 8.0}), "is not below"),
    "longrope without length": ({**PHI}, "pass max_model_len="),
    "mrope": (scaled(type="mrope", mrope_section=[16, 24, 24]), "M-RoPE"),
    "mrope in 5": (scaled(rope_type="default", mrope_section=[16, 24, 24]), "M-RoPE"),
    "Gemma 3": (
        changed(model_type="gemma3_text", rope_parameters=GEMMA, layer_types=LAYERS),
        "layers of other kinds than full attention (sliding_attention)",
    ),
    "Gemma 3 in 4": (
        changed(model_type="gemma3_text", sliding_window=1024, sliding_window_pattern=6),
        "sliding window of 1024",
    ),
    "RoPE by layer type": (
        changed(rope_scaling=None, rope_parameters=GEMMA),
        "layer types with RoPE parameters of their own: refused for now",
    ),
    "RoPE by layer type in 4": (changed(rope_local_base_freq=1e4), "of their own"),
    "sliding window": (changed(model_type="mistral", sliding_window=4096), "window of 4096"),
    "sliding window, no limit": (
        changed(sliding_window=4096, max_position_embeddings=...),
        "window of 4096",
    ),
    "linear attention": (changed(layer_types=["linear_attention"]), "linear_attention"),
    "recurrent": (changed(layers_block_type=["mamba", "attention"]), "recurrent or hybrid"),
    "NoPE layers": (changed(no_rope_layers=[1, 1, 1, 0]), "without a position embedding"),
    "SmolLM3": (changed(model_type="smollm3"), "no position embedding"),
    "DeepSeek": (changed(model_type="deepseek_v3", kv_lora_rank=512), "(MLA)"),
    "GPT-2": ({"model_type": "gpt2", "n_embd": 768, "n_head": 12}, "learned embeddings"),
    "BLOOM": ({"model_type": "bloom", "hidden_size": 64, "n_head": 8}, "ALiBi"),
    "Falcon with ALiBi": (changed(model_type="falcon", alibi=True), "ALiBi"),
    "nanochat": (changed(model_type="nanochat"), "the other way round"),
    "unknown model": (changed(model_type="brand_new"), "RopeConfig.from_model_config(config, pair"),
    "no model": (changed(model_type=...), "no model_type"),
    "no partial factor": (
        {k: v for k, v in CONFIGS["GLM-4-9B-0414"].items() if k != "partial_rotary_factor"},
        "no partial_rotary_factor, which is never guessed",
    ),
    "a part of Llama's heads": (changed(partial_rotary_factor=0.5), "32 of 64 contradicts it"),
    "an odd part": (
        {**CONFIGS["Phi-4-mini"], "rope_scaling": None, "partial_rotary_factor": 0.4},
        "51 of a head's 128 elements",
    ),
    "two parts": (
        changed(model_type="minimax_m2", rotary_dim=32, partial_rotary_factor=0.25),
        "rotary_dim 32 contradicts partial_rotary_factor 0.25",
    ),
    "no heads": (changed(num_attention_heads=...), "num_attention_heads must be a positive int"),
    "heads do not divide": (changed(num_attention_heads=10), "does not divide into 10 heads"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_reason_in_one_line(case: str) -> None:
    config, reason = REFUSED[case]
    with pytest.raises(GeometryError, match=re.escape(reason)) as caught:
        RopeConfig.from_model_config(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("factor", "value"), [("long_factor", [1.0] * 47), ("long_factor", None), ("long_factor", [0])]
)
def test_longrope_factors_must_be_whole(factor: str, value: object) -> None:
    config = {**PHI, "rope_scaling": {**PHI["rope_scaling"], factor: value}}
    with pytest.raises(GeometryError, match="long_factor must be a list of 48 positive numbers"):
        RopeConfig.from_model_config(config, max_model_len=LONG)


@pytest.mark.parametrize(
    ("window", "max_model_len", "accepted"),
    [
        (None, None, True),
        (0, None, True),
        (8192, None, True),
        (4096, 4096, True),
        (4096, None, False),
        (4096, 4097, False),
    ],
)
def test_a_window_matters_only_when_shorter_than_the_longest_sequence(
    window: int | None, max_model_len: int | None, accepted: bool
) -> None:
    config = changed(model_type="mistral", sliding_window=window)
    if accepted:
        RopeConfig.from_model_config(config, max_model_len=max_model_len)
    else:
        with pytest.raises(GeometryError, match="sliding window"):
            RopeConfig.from_model_config(config, max_model_len=max_model_len)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"pairing": "neox"}, "half or interleaved"),
        ({"inv_freq": ()}, "one finite number"),
        ({"inv_freq": (1.0, float("nan"))}, "one finite number"),
        ({"inv_freq": (1.0,) * 5}, "do not fit a head of 8"),
    ],
)
def test_a_config_by_hand_is_checked(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(GeometryError, match=reason):
        RopeConfig(**{"head_size": 8, "inv_freq": (1.0, 0.1), "pairing": "half", **fields})
