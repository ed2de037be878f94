"""What a rotation needs to know of a model's rotary position embedding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, get_args

from ..errors import GeometryError
from .families import Pairing
from .reader import read_rope

__all__ = ["RopeConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The rotary position embedding of every layer of a model.

    Element pair ``i`` of a head at position ``p`` is rotated by ``p * inv_freq[i]``; elements from
    ``rotary_dim`` on are not rotated. Scale factors on cos and sin (YaRN, LongRoPE) are not here:
    they are in the cached key already, and moving it is a pure rotation.

    Attributes:
        head_size: elements of one head of K.
        inv_freq: radians per token of each pair: the float32 numbers that the engine computes
            with, not more exact ones.
        pairing: which elements make pair ``i``. ``half``: ``i`` and ``i + rotary_dim / 2``
            (GPT-NeoX, Llama); ``interleaved``: ``2i`` and ``2i + 1`` (GPT-J, GLM, Cohere).
        rope_type: where the frequencies came from; informative only.
    """

    head_size: int
    inv_freq: tuple[float, ...]
    pairing: Pairing
    rope_type: str = "custom"

    def __post_init__(self) -> None:
        object.__setattr__(self, "inv_freq", tuple(float(value) for value in self.inv_freq))
        if self.pairing not in get_args(Pairing):
            raise GeometryError(f"RoPE: pairing must be half or interleaved, not {self.pairing!r}")
        if not self.inv_freq or not all(math.isfinite(value) for value in self.inv_freq):
            raise GeometryError("RoPE: inv_freq must hold one finite number for each pair")
        if self.rotary_dim > self.head_size:
            raise GeometryError(
                f"RoPE: {len(self.inv_freq)} pairs do not fit a head of {self.head_size} elements"
            )

    @property
    def rotary_dim(self) -> int:
        """Rotated elements of a head, from its first on."""
        return 2 * len(self.inv_freq)

    @classmethod
    def from_model_config(
        cls,
        config: Mapping[str, Any],
        *,
        max_model_len: int | None = None,
        pairing: Pairing | None = None,
    ) -> Self:
        """Read the RoPE of a Hugging Face ``config.json``, given as a dict.

        Both the form of ``transformers`` 4 (``rope_theta``, ``rope_scaling``) and that of 5
        (``rope_parameters``) are read, and the text part of multimodal configs.

        Args:
            config: the config.
            max_model_len: longest sequence of the engine in tokens; longrope cannot do without.
            pairing: of a model type that this library has not verified, or of reordered weights.

        Raises:
            GeometryError: a value is missing or contradictory, or the keys of the model could not
                be moved by one rotation; the message gives the reason.
        """
        found = read_rope(config, max_model_len=max_model_len, pairing=pairing)
        return cls(
            head_size=found.head_size,
            inv_freq=tuple(found.inv_freq.tolist()),
            pairing=found.pairing,
            rope_type=found.rope_type,
        )
