"""Which model types are known to rotate how.

Read from the modelling code of ``transformers`` 5.24, and tested against it: the keys of a tiny
model of each type, in every layer, move as this table says (``tests/rope/test_families.py``). A config does
not tell the pairing, so a type that is not here is refused rather than taken for the usual one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..errors import GeometryError

__all__ = ["FAMILIES", "Family", "Pairing", "family_of"]

Pairing = Literal["half", "interleaved"]
# Whether a head is rotated in part: never, if the config says so, or always, so that it must.
Partial = Literal["never", "optional", "required"]


@dataclass(frozen=True, slots=True)
class Family:
    """How the models of one type rotate: pairing, and whether only a part of each head."""

    pairing: Pairing
    partial: Partial


FAMILIES: Mapping[str, Family] = {
    "apertus": Family("half", "never"),
    "arcee": Family("half", "never"),
    "cohere": Family("interleaved", "never"),
    "ernie4_5": Family("interleaved", "never"),
    "ernie4_5_moe": Family("interleaved", "never"),
    "gemma": Family("half", "never"),
    "glm": Family("interleaved", "required"),
    "glm4": Family("interleaved", "required"),
    "glm4_moe": Family("half", "required"),
    "gpt_neox": Family("half", "required"),
    "granite": Family("half", "never"),
    "granitemoe": Family("half", "never"),
    "granitemoeshared": Family("half", "never"),
    "helium": Family("interleaved", "never"),
    "llama": Family("half", "never"),
    "minimax_m2": Family("half", "required"),
    "ministral3": Family("half", "never"),
    "mistral": Family("half", "never"),
    "mixtral": Family("half", "never"),
    "nemotron": Family("half", "required"),
    "olmo": Family("half", "never"),
    "olmo2": Family("half", "never"),
    "olmoe": Family("half", "never"),
    "persimmon": Family("half", "required"),
    "phi": Family("half", "required"),
    "phi3": Family("half", "optional"),
    "qwen2": Family("half", "never"),
    "qwen2_moe": Family("half", "never"),
    "qwen3": Family("half", "never"),
    "qwen3_moe": Family("half", "never"),
    "seed_oss": Family("half", "never"),
    "stablelm": Family("half", "required"),
    "starcoder2": Family("half", "never"),
}

_LEARNED = "its positions are learned embeddings, which no rotation of the keys can change"
_ALIBI = "its positions are ALiBi biases, not rotations of the keys"
_NOPE = "some of its layers have no position embedding, so one rotation does not fit all layers"
_TWO_THETAS = "its layers of sliding attention rotate by a theta of their own"
_REFUSED: Mapping[str, str] = {
    "bloom": _ALIBI,
    "cohere2": _NOPE,
    "exaone4": _NOPE,
    "gemma3_text": _TWO_THETAS,
    "gemma3n_text": _TWO_THETAS,
    "gpt2": _LEARNED,
    "gpt_bigcode": _LEARNED,
    "gpt_neo": _LEARNED,
    "granitemoehybrid": _NOPE,
    "jamba": _NOPE,
    "llama4": _NOPE,
    "llama4_text": _NOPE,
    "mpt": _ALIBI,
    "nanochat": "it rotates the other way round, with the sign of sin reversed",
    "nemotron_h": _NOPE,
    "opt": _LEARNED,
    "smollm3": _NOPE,
}


def family_of(model_type: str, pairing: Pairing | None) -> Family:
    """Return how ``model_type`` rotates.

    Args:
        model_type: of the config.
        pairing: the caller's word on it. It wins over the table, because a checkpoint's weights may
            have been reordered (some engines run GGUF files of Llama interleaved).

    Raises:
        GeometryError: the type cannot be edited, or is not known and ``pairing`` is not given.
    """
    if model_type in _REFUSED:
        raise GeometryError(f"RoPE: {model_type} cannot be edited: {_REFUSED[model_type]}")
    known = FAMILIES.get(model_type)
    if pairing is not None:
        return Family(pairing, known.partial if known else "optional")
    if known is None:
        raise GeometryError(
            f"RoPE: the pairing of model type {model_type!r} is not verified: give it by hand, "
            "RopeConfig.from_model_config(config, pairing='half' or 'interleaved'), or a whole "
            "RopeConfig(head_size=..., inv_freq=..., pairing=...)"
        )
    return known
