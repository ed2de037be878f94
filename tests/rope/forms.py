"""The forms in which a model's config reaches the library, by either ``transformers``, by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .reference import config_object

__all__ = ["FORMS", "Form"]

Form = Callable[[Mapping[str, Any], Path], Any]
# One layer of full attention in so many: what the classes of transformers 4.57 make of their configs.
_FULL_EVERY = {"gemma2": 2, "gemma3_text": 6, "qwen2": 1, "qwen3": 1}


class _ObjectOf4:
    """Stands in for a config object of ``transformers`` 4.57, which is not installed beside 5.

    Its ``to_dict`` gives what the file says, the dtype under its new name, and the layer types.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def to_dict(self) -> dict[str, Any]:
        return _completed(self._config)


def _completed(config: Mapping[str, Any]) -> dict[str, Any]:
    parts = {name: _completed(part) for name, part in config.items() if name.endswith("text_config")}
    written = {**config, **parts, "transformers_version": "4.57.6", "use_cache": True}
    if "torch_dtype" in written:
        written["dtype"] = written.pop("torch_dtype")
    every = _FULL_EVERY.get(config["model_type"])
    if every is not None:
        layers = range(1, config["num_hidden_layers"] + 1)
        written["layer_types"] = [
            "sliding_attention" if layer % every else "full_attention" for layer in layers
        ]
    return written


def _file_of_4(config: Mapping[str, Any], folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _file_of_5(config: Mapping[str, Any], folder: Path) -> Path:
    config_object(config).save_pretrained(folder)
    return folder


FORMS: Mapping[str, Form] = {
    "dict of 4": lambda config, _: dict(config),
    "object of 4": lambda config, _: _ObjectOf4(config),
    "folder of 4": _file_of_4,
    "dict of 5": lambda config, _: config_object(config).to_dict(),
    "object of 5": lambda config, _: config_object(config),
    "folder of 5": _file_of_5,
}
