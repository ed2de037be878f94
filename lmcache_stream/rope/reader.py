"""Reading the RoPE of a Hugging Face config, and refusing models that one rotation does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import GeometryError
from .families import Family, Pairing, family_of
from .frequencies import ROPE_TYPES, RopeParameters

__all__ = ["FoundRope", "head_size_of", "read_rope", "text_config_of"]

_TEXT_PARTS = ("text_config", "llm_config", "language_config")
_THETA_NAMES = ("rope_theta", "rotary_emb_base")
_PARTIAL_NAMES = ("partial_rotary_factor", "rotary_pct")
# Names under which configs list recurrent layers, beside layer_types.
_HYBRID_NAMES = (
    *("layers_block_type", "hybrid_override_pattern", "block_types", "attn_layer_period"),
    *("full_attention_interval", "linear_attn_config", "ssm_cfg", "mamba_d_state"),
)
_KNOWN_PARAMETERS = frozenset(
    (
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor"),
        *("original_max_position_embeddings", "max_position_embeddings", "finetuned"),
        *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor"),
        *("beta_fast", "beta_slow", "truncate"),
        # These scale keys or queries, which moving a cached key leaves alone.
        *("attention_factor", "attn_factor", "mscale", "mscale_all_dim"),
        *("short_mscale", "long_mscale", "llama_4_scaling_beta"),
    )
)
_OF_THEIR_OWN = "RoPE: layer types with RoPE parameters of their own: refused for now"


@dataclass(frozen=True, slots=True)
class FoundRope:
    """What a config says of its RoPE; ``inv_freq`` is float32 ``[rotary_dim / 2]``."""

    head_size: int
    inv_freq: Tensor
    pairing: Pairing
    rope_type: str


def text_config_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a multimodal config that describes the language model, or all of it."""
    for name in _TEXT_PARTS:
        part = config.get(name)
        if isinstance(part, Mapping) and part:
            return part
    return config


def head_size_of(config: Mapping[str, Any]) -> int:
    """Return ``head_dim``, else ``hidden_size / num_attention_heads``.

    Raises:
        GeometryError: neither is there, or the division leaves a rest.
    """
    given = config.get("head_dim")
    if given is not None:
        return _positive_int(given, "head_dim")
    hidden = _positive_int(_first(config, "hidden_size", "n_embd"), "hidden_size")
    heads = _positive_int(_first(config, "num_attention_heads", "n_head"), "num_attention_heads")
    if hidden % heads:
        raise GeometryError(f"config: hidden_size {hidden} does not divide into {heads} heads")
    return hidden // heads


def read_rope(config: Mapping[str, Any], *, max_model_len: int | None, pairing: Pairing | None) -> FoundRope:
    """Read head size, frequencies and pairing; see ``RopeConfig.from_model_config``."""
    config = text_config_of(config)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise GeometryError("RoPE: the config has no model_type")
    parameters = _parameters(config)
    if max_model_len is not None:
        _positive_int(max_model_len, "max_model_len")
    _refuse_other_layers(config, max_model_len)
    parameters = _of_full_attention(config, parameters)
    _refuse_other_positions(config, parameters)
    family = family_of(model_type, pairing)

    head_size = head_size_of(config)
    rotary_dim = _rotary_dim(config, parameters, head_size, model_type, family)
    rope_type = _rope_type(parameters)
    trained = _agreed("original_max_position_embeddings", config, parameters)
    if trained is not None:
        parameters = {**parameters, "original_max_position_embeddings": trained}
    theta = _agreed(_THETA_NAMES, config, parameters)
    if theta is None:
        raise GeometryError(
            f"RoPE: the config of {model_type} has no rope_theta, which is never guessed: add it"
        )
    read = RopeParameters(theta=theta, rotary_dim=rotary_dim, values=parameters, max_model_len=max_model_len)
    return FoundRope(head_size, ROPE_TYPES[rope_type](read), family.pairing, rope_type)


def _parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``rope_parameters`` (transformers 5), ``rope_scaling`` (4), or nothing."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if new and old and new != old:
        raise GeometryError("RoPE: rope_parameters and rope_scaling contradict each other")
    found = new or old or {}
    if not isinstance(found, Mapping):
        raise GeometryError(f"RoPE: the rope parameters must be a dict, not {found!r}")
    return found


def _refuse_other_layers(config: Mapping[str, Any], max_model_len: int | None) -> None:
    """Raise unless every layer is one of full attention with K and V of its own."""
    if config.get("kv_lora_rank") is not None:
        raise GeometryError(
            "RoPE: multi-head latent attention (MLA) caches one latent, not K and V: not supported"
        )
    others = {kind for kind in config.get("layer_types") or () if kind != "full_attention"}
    if others:
        kinds = ", ".join(sorted(map(str, others)))
        raise GeometryError(f"RoPE: layers of other kinds than full attention ({kinds}): refused")
    hybrid = [name for name in _HYBRID_NAMES if config.get(name)]
    if hybrid:
        raise GeometryError(
            f"RoPE: recurrent or hybrid layers ({hybrid[0]}) cannot forget dropped tokens: refused"
        )
    if not all(config.get("no_rope_layers") or (True,)):
        raise GeometryError("RoPE: layers without a position embedding (no_rope_layers): refused")
    window = config.get("sliding_window")
    longest = max_model_len or config.get("max_position_embeddings")
    # A window that is as long as the longest sequence never hides a token (Phi-4-mini).
    if window and config.get("use_sliding_window") is not False and window < (longest or 2**62):
        raise GeometryError(
            f"RoPE: a sliding window of {window} tokens, into which dropping moves others: refused"
        )


def _of_full_attention(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters of full attention where each layer type has its own (transformers 5).

    Only where it is sure that no layer has others: the config lists its layers, which are of full
    attention by now, or names parameters for full attention alone.
    """
    nested = {name: value for name, value in parameters.items() if isinstance(value, Mapping)}
    if not nested:
        return parameters
    beside = [name for name, value in parameters.items() if name not in nested and value is not None]
    own = nested.get("full_attention")
    if beside or own is None or set(config.get("layer_types") or parameters) != {"full_attention"}:
        raise GeometryError(_OF_THEIR_OWN)
    return own


def _refuse_other_positions(config: Mapping[str, Any], parameters: Mapping[str, Any]) -> None:
    """Raise unless all layers rotate alike, by the index of the token in the sequence."""
    if config.get("alibi"):
        raise GeometryError("RoPE: positions are ALiBi biases, not rotations of the keys: refused")
    if config.get("rope_local_base_freq") is not None:
        raise GeometryError(_OF_THEIR_OWN)
    if "mrope_section" in parameters or _rope_type_name(parameters) == "mrope":
        raise GeometryError("RoPE: with M-RoPE a token's position is not its index in the sequence: refused")
    unknown = sorted(set(parameters) - _KNOWN_PARAMETERS)
    if unknown:
        raise GeometryError(f"RoPE: unknown rope parameters {', '.join(unknown)}: refused")


def _rope_type_name(parameters: Mapping[str, Any]) -> str:
    new, old = parameters.get("rope_type"), parameters.get("type")
    if new and old and new != old and {new, old} != {"longrope", "su"}:
        raise GeometryError(f"RoPE: rope_type {new!r} and type {old!r} contradict each other")
    return str(new or old or "default")


def _rope_type(parameters: Mapping[str, Any]) -> str:
    name = _rope_type_name(parameters)
    if name == "dynamic":
        raise GeometryError(
            "RoPE: dynamic NTK changes all frequencies with the length of the sequence: refused"
        )
    if name not in ROPE_TYPES:
        known = ", ".join(sorted(ROPE_TYPES))
        raise GeometryError(f"RoPE: unknown rope type {name!r}; known: {known}")
    return name


def _rotary_dim(
    config: Mapping[str, Any],
    parameters: Mapping[str, Any],
    head_size: int,
    model_type: str,
    family: Family,
) -> int:
    """Return the rotated elements of a head: all, or the share that the config names."""
    share = _agreed(_PARTIAL_NAMES, config, parameters)
    rotary_dim = head_size if share is None else int(head_size * share)
    given = config.get("rotary_dim")
    if given is not None:
        if share is not None and given != rotary_dim:
            raise GeometryError(f"RoPE: rotary_dim {given} contradicts partial_rotary_factor {share}")
        rotary_dim = _positive_int(given, "rotary_dim")
    if family.partial == "required" and share is None and given is None:
        raise GeometryError(
            f"RoPE: {model_type} rotates a part of each head, but the config has no "
            "partial_rotary_factor, which is never guessed: add it"
        )
    if family.partial == "never" and rotary_dim != head_size:
        raise GeometryError(
            f"RoPE: {model_type} rotates whole heads; {rotary_dim} of {head_size} contradicts it"
        )
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_size:
        raise GeometryError(f"RoPE: {rotary_dim} of a head's {head_size} elements cannot be paired")
    return rotary_dim


def _agreed(
    names: str | tuple[str, ...], config: Mapping[str, Any], parameters: Mapping[str, Any]
) -> float | None:
    """Return the number that ``names`` have at either level; None where none has one."""
    names = (names,) if isinstance(names, str) else names
    found = (level.get(name) for level in (parameters, config) for name in names)
    values = [value for value in found if value is not None]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise GeometryError(f"RoPE: {names[0]} must be a positive number, not {value!r}")
    if len(set(values)) > 1:
        raise GeometryError(f"RoPE: {names[0]} is given as {values[0]} and as {values[1]}")
    return values[0] if values else None


def _first(config: Mapping[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _positive_int(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise GeometryError(f"config: {name} must be a positive int, not {value!r}")
    return value
