"""Finding a model's Hugging Face config, and what the cache needs of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import GeometryError
from ..rope import head_size_of, text_config_of

__all__ = ["ModelConfig", "load_model_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What a config says of the shape of a model's KV.

    Its RoPE is not here: ``RopeConfig.from_model_config(config.raw)`` reads it when an edit needs
    it, so that models whose RoPE is refused can be retrieved and stored all the same.

    Attributes:
        model_type: e.g. ``llama``; of the text part in a multimodal model.
        num_layers: decoder layers.
        num_kv_heads: KV heads of a layer; 1 with MLA.
        head_size: elements of one head of K or V; with MLA those of the latent.
        dtype: of the weights; None when the config does not say.
        is_mla: whether the model caches a latent instead of K and V.
        vocab_size: token ids are below it; None when the config does not say.
        raw: the text part of the config.
    """

    model_type: str
    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype | None
    is_mla: bool
    vocab_size: int | None
    raw: Mapping[str, Any]

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the dict of a ``config.json``, of ``transformers`` 4 or 5.

        Raises:
            GeometryError: a size is missing, or the KV heads cannot be told.
        """
        text = text_config_of(config)
        rank = text.get("kv_lora_rank")
        if rank is not None:
            num_kv_heads, head_size = 1, rank + _int(text, "qk_rope_head_dim")
        else:
            num_kv_heads, head_size = _num_kv_heads(text), head_size_of(text)
        vocab_size = text.get("vocab_size", config.get("vocab_size"))
        return cls(
            model_type=str(text.get("model_type") or config.get("model_type") or "unknown"),
            num_layers=_int(text, "num_hidden_layers", "n_layer", "num_layers"),
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            dtype=_dtype(text) or _dtype(config),
            is_mla=rank is not None,
            vocab_size=vocab_size if isinstance(vocab_size, int) else None,
            raw=text,
        )


def load_model_config(model_config: object, model_name: str) -> ModelConfig | None:
    """Find and read a model's config, without the network.

    Args:
        model_config: a Hugging Face config object (anything with ``to_dict()``), a dict, a folder,
            a ``config.json``, or the id of a repository in the local Hub cache. With None,
            ``model_name`` is tried as a folder and as an id.
        model_name: the name under which the engine registered: often the path of the model.

    Returns:
        The config; None where ``model_config`` is None and nothing was found.

    Raises:
        GeometryError: what was given cannot be found or read, or lacks a size.
    """
    if isinstance(model_config, Mapping):
        return ModelConfig.from_dict(model_config)
    to_dict = getattr(model_config, "to_dict", None)
    if callable(to_dict):
        return ModelConfig.from_dict(to_dict())
    if model_config is not None and not isinstance(model_config, str | os.PathLike):
        raise GeometryError(
            "model_config must be a config object, a dict, a path or a repository id, not "
            f"{type(model_config).__name__}"
        )
    given = model_name if model_config is None else os.fspath(model_config)
    tried = _places(given)
    found = next((path for path in tried if path.is_file()), None)
    if found is not None:
        return ModelConfig.from_dict(_read(found))
    if model_config is None:
        return None
    raise GeometryError(f"model_config={given!r}: no config found; tried {', '.join(map(str, tried))}")


def _places(name: str) -> list[Path]:
    """Return where the config of ``name`` may be, in the order to look."""
    path = Path(name).expanduser()
    places = [path if path.suffix == ".json" else path / "config.json"]
    parts = name.split("/")
    if len(parts) <= 2 and all(part and part not in (".", "..") for part in parts):
        repository = _hub_cache() / f"models--{'--'.join(parts)}"
        places.append(_snapshot(repository) / "config.json")
    return places


def _hub_cache() -> Path:
    """Return the folder of huggingface_hub's cache, by the environment variables that move it."""
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if cache:
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    user_cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(user_cache).expanduser() / "huggingface" / "hub"


def _snapshot(repository: Path) -> Path:
    """Return the folder that ``refs/main`` names, without which the id has not been downloaded."""
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except OSError:
        revision = "main"
    return repository / "snapshots" / revision


def _read(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise GeometryError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise GeometryError(f"{path} holds a {type(config).__name__}, not a config")
    return config


def _int(config: Mapping[str, Any], *names: str) -> int:
    value = next((config[name] for name in names if config.get(name) is not None), None)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise GeometryError(f"config: {names[0]} must be a positive int, not {value!r}")
    return value


def _num_kv_heads(config: Mapping[str, Any]) -> int:
    """Return the KV heads: those named, else as many as attention has, as the field has it."""
    if config.get("num_key_value_heads") is not None:
        return _int(config, "num_key_value_heads")
    for name in ("multi_query", "multi_query_group_num", "num_kv_heads", "n_head_kv"):
        if config.get(name):
            raise GeometryError(
                f"config: no num_key_value_heads, and {name} has no common meaning: pass geometry="
            )
    return _int(config, "num_attention_heads", "n_head")


def _dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """Return ``dtype`` (transformers 5) or ``torch_dtype`` (4), as a name or as itself."""
    for name in ("dtype", "torch_dtype"):
        value = config.get(name)
        if isinstance(value, str):
            value = getattr(torch, value.removeprefix("torch."), None)
        if isinstance(value, torch.dtype):
            return value
    return None
