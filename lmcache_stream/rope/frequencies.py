"""The rotation frequencies of each RoPE type.

Computed in float32, step by step as ``transformers`` (``modeling_rope_utils.py``) and vLLM
(``layers/rotary_embedding/``) do: the cached keys were made with those rounded numbers, and at
position 131,071 the rounding of a frequency alone is worth 1e-3 of the key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import GeometryError

__all__ = ["ROPE_TYPES", "RopeParameters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """What a frequency formula reads.

    Attributes:
        theta: the base of the frequencies.
        rotary_dim: rotated elements of a head.
        values: the model's rope parameters under the names of ``transformers`` 5.
        max_model_len: longest sequence the engine was started for, in tokens; None when unknown.
    """

    theta: float
    rotary_dim: int
    values: Mapping[str, Any]
    max_model_len: int | None

    def number(self, name: str) -> float:
        """Return a positive number that this rope type cannot do without."""
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise GeometryError(f"RoPE: {name} must be a positive number, not {value!r}")
        return value

    def numbers(self, name: str) -> Tensor:
        """Return a list of ``rotary_dim / 2`` positive numbers as float32."""
        value = self.values.get(name)
        wanted = self.rotary_dim // 2
        if not isinstance(value, Sequence) or len(value) != wanted or not all(x > 0 for x in value):
            raise GeometryError(f"RoPE: {name} must be a list of {wanted} positive numbers")
        return torch.tensor(value, dtype=torch.float32)

    def wavelengths(self) -> Tensor:
        """Return ``theta ** (2i / rotary_dim)``: the unscaled wavelengths over 2 pi, in tokens."""
        exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim
        return torch.pow(self.theta, exponents)


def _default(rope: RopeParameters) -> Tensor:
    """Su et al. 2021, "RoFormer", section 3.2.2."""
    return 1.0 / rope.wavelengths()


def _linear(rope: RopeParameters) -> Tensor:
    """Position interpolation: Chen et al. 2023, "Extending Context Window"."""
    return _default(rope) / rope.number("factor")


def _llama3(rope: RopeParameters) -> Tensor:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between blended."""
    factor = rope.number("factor")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    trained = rope.number("original_max_position_embeddings")
    if not low < high:
        raise GeometryError(f"RoPE: low_freq_factor {low} is not below high_freq_factor {high}")
    plain = _default(rope)
    wavelength = 2 * math.pi / plain
    keep = (trained / wavelength - low) / (high - low)
    blended = (1 - keep) * plain / factor + keep * plain
    stretched = torch.where(wavelength > trained / low, plain / factor, blended)
    return torch.where(wavelength < trained / high, plain, stretched)


def _yarn(rope: RopeParameters) -> Tensor:
    """YaRN: Peng et al. 2023, section 3.2 ("NTK-by-parts"), with its betas of 32 and 1."""
    factor = rope.number("factor")
    trained = rope.number("original_max_position_embeddings")
    dim = rope.rotary_dim

    def index_of(name: str, usual: float) -> float:
        # transformers takes null (and 0) for "as in the paper", too.
        turns = rope.number(name) if rope.values.get(name) else usual
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = index_of("beta_fast", 32), index_of("beta_slow", 1)
    if rope.values.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)
    extrapolated = 1 - ramp.clamp(0, 1)
    wavelengths = rope.wavelengths()
    return 1.0 / (factor * wavelengths) * (1 - extrapolated) + 1.0 / wavelengths * extrapolated


def _longrope(rope: RopeParameters) -> Tensor:
    """LongRoPE: Ding et al. 2024. As in vLLM, the engine's longest sequence chooses the factors.

    (``transformers`` chooses by the length of each forward pass, so that its cache of a sequence
    that began short mixes both.)
    """
    trained = rope.number("original_max_position_embeddings")
    if rope.max_model_len is None:
        raise GeometryError(
            "RoPE: longrope takes its short or its long factors by the engine's max_model_len: "
            "pass max_model_len= (vLLM reports it under GET /v1/models)"
        )
    name = "long_factor" if rope.max_model_len > trained else "short_factor"
    return 1.0 / (rope.numbers(name) * rope.wavelengths())


ROPE_TYPES: Mapping[str, Callable[[RopeParameters], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    # The name that Microsoft's first Phi-3 configs had for it.
    "su": _longrope,
}
