"""Keys that were moved, against keys that ``transformers``' rotary embedding made at the new positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lmcache_stream.rope import RopeConfig, rotate_keys

from .configs import CONFIGS
from .reference import Reference, as_transformers_5

HEADS, COUNT = 3, 200
LAST = 131072
# The longest for which Phi's short factors hold.
SHORT = 4095


def positions_of(last: int, *, seed: int) -> Tensor:
    """Return positions all over the range, its ends included, in no order."""
    generator = torch.Generator().manual_seed(seed)
    inner = torch.randint(0, last + 1, (COUNT - 2,), generator=generator)
    return torch.cat((inner, torch.tensor([0, last])))[torch.randperm(COUNT, generator=generator)]


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def worst(found: Tensor, wanted: Tensor) -> float:
    """Return the relative error of the key that is farthest off."""
    apart = (found.double() - wanted.double()).flatten(1).norm(dim=1)
    return float((apart / wanted.double().flatten(1).norm(dim=1)).max())


def compare(config: dict[str, Any], rope: RopeConfig, last: int) -> None:
    old, new = positions_of(last, seed=1), positions_of(last, seed=2)
    reference = Reference(config, torch.cat((old, new)))
    torch.manual_seed(0)
    keys = torch.randn(COUNT, HEADS, rope.head_size, dtype=torch.float64)
    before, after = reference.rotated_exactly(keys, old), reference.rotated_exactly(keys, new)

    def moved(made: Tensor, to: Tensor = new) -> Tensor:
        return rotate_keys(made.flatten(1), old, to, rope).view(made.shape)

    # From keys that were rounded to the dtype once: what is left is the rotation's own error.
    for dtype, limit in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        assert worst(moved(before.to(dtype)), after) < limit
    for dtype, limit in ((torch.bfloat16, 4e-3), (torch.float16, 5e-4)):
        assert worst(moved(before.to(dtype)), after) < limit
    made = reference.rotated(keys.float(), old)
    assert worst(moved(made), reference.rotated(keys.float(), new)) < 2e-3
    # The limits tell right from wrong: a key that was not moved, or by one token too few, is far off.
    assert error(before, after) > 0.1
    assert error(moved(before, new - 1), after) > 0.02


@pytest.mark.parametrize("form", ["transformers 4", "transformers 5"])
@pytest.mark.parametrize(
    ("name", "last"), [*((name, LAST) for name in CONFIGS), ("Phi-3-mini-128k", SHORT), ("Phi-4-mini", SHORT)]
)
def test_the_keys_of_real_models(name: str, last: int, form: str) -> None:
    config = CONFIGS[name]
    given = config if form == "transformers 4" else as_transformers_5(config)
    compare(config, RopeConfig.from_model_config(given, max_model_len=last + 1), last)


SHAPES: dict[str, dict[str, Any]] = {
    "half, whole": {"model_type": "llama"},
    "half, part": {"model_type": "stablelm", "partial_rotary_factor": 0.75},
    "interleaved, whole": {"model_type": "cohere"},
    "interleaved, part": {"model_type": "glm4", "partial_rotary_factor": 0.5},
}
_LONGROPE = {"rope_type": "longrope", "factor": 32.0}
TYPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": CONFIGS["Llama-3.1-8B"]["rope_scaling"],
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "longrope, short": {**_LONGROPE, "original_max_position_embeddings": LAST + 1},
    "longrope, long": {**_LONGROPE, "original_max_position_embeddings": LAST},
}


def config_of(shape: str, rope_type: str) -> dict[str, Any]:
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": HEADS, "head_dim": 128}
    parameters = {"rope_theta": 5e5, **TYPES[rope_type]}
    share = SHAPES[shape].get("partial_rotary_factor")
    if share is not None:
        parameters["partial_rotary_factor"] = share
    if rope_type.startswith("longrope"):
        pairs = int(64 * (share or 1))
        parameters["short_factor"] = [1 + 0.01 * pair for pair in range(pairs)]
        parameters["long_factor"] = [1 + 0.5 * pair for pair in range(pairs)]
    return {**SHAPES[shape], **sizes, "max_position_embeddings": LAST + 1, "rope_parameters": parameters}


@pytest.mark.parametrize("rope_type", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_type_with_every_pairing_whole_and_in_part(shape: str, rope_type: str) -> None:
    config = config_of(shape, rope_type)
    rope = RopeConfig.from_model_config(config, max_model_len=LAST + 1)
    pairing, _, share = shape.partition(", ")
    assert (rope.pairing, rope.rotary_dim < 128) == (pairing, share == "part")
    assert rope.rope_type == rope_type.split(",")[0]
    compare(config, rope, LAST)


def test_the_factors_of_longrope_and_the_types_are_told_apart() -> None:
    """Else the table above would compare one rotation with itself."""
    found = {
        rope_type: RopeConfig.from_model_config(config_of("half, whole", rope_type), max_model_len=LAST + 1)
        for rope_type in TYPES
    }
    assert len({rope.inv_freq for rope in found.values()}) == len(TYPES)
