"""``transformers``' own rotary embedding, as a reference that shares no code with the library."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

__all__ = ["Reference", "as_transformers_5", "config_object", "random_model"]


def config_object(config: Mapping[str, Any]) -> Any:
    """Return ``transformers``' own object of a config."""
    kind: Any = CONFIG_MAPPING[config["model_type"]]
    # The object keeps what it is given, and writes theta into rope_scaling.
    return kind(**copy.deepcopy(dict(config)))


def random_model(config: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model of that config object with random weights, without a head."""
    kind: Any = AutoModel
    torch.manual_seed(0)
    # Not model.to(dtype): that would round the frequencies as well.
    return kind.from_config(config, dtype=dtype).eval()


def as_transformers_5(config: dict[str, Any]) -> dict[str, Any]:
    """Return what the installed ``transformers``, 5 or later, writes for the same model."""
    written: dict[str, Any] = config_object(config).to_dict()
    assert "rope_parameters" in written
    assert "rope_scaling" not in written
    return written


class Reference:
    """The rotary embedding module of a model type, applied to keys ``[T, heads, head_size]``.

    Args:
        config: of the model, in either form.
        positions: with whose largest the module chooses LongRoPE's factors.
    """

    def __init__(self, config: dict[str, Any], positions: Tensor) -> None:
        name = config["model_type"]
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        rotary = next(k for k in vars(module) if k.endswith("RotaryEmbedding"))
        self._module = getattr(module, rotary)(config_object(config))
        self._apply: Callable[..., tuple[Tensor, Tensor]] = module.apply_rotary_pos_emb
        self._module(torch.zeros(1), positions[None])
        self.inv_freq: Tensor = self._module.inv_freq
        # Cohere repeats each frequency where it computes them, the others where they apply them.
        self._is_repeated = name.startswith("cohere")

    def rotated(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Return float32 keys rotated as the model does it."""
        cos, sin = self._module(torch.zeros(1), positions[None])
        return self._rotated(keys, cos[0], sin[0])

    def rotated_exactly(self, keys: Tensor, positions: Tensor) -> Tensor:
        """Return float64 keys rotated by the model's float32 frequencies, all else in float64."""
        angles = positions.double()[:, None] * self.inv_freq.double()
        angles = angles.repeat_interleave(2, -1) if self._is_repeated else angles.repeat(1, 2)
        scale = self._module.attention_scaling
        return self._rotated(keys, angles.cos() * scale, angles.sin() * scale)

    def _rotated(self, keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        assert keys.dtype == cos.dtype
        heads_first = keys.transpose(0, 1)[None]
        turned, passed = heads_first.tensor_split([cos.shape[-1]], dim=-1)
        turned = self._apply(turned, turned, cos[None], sin[None])[0]
        return torch.cat((turned, passed), dim=-1)[0].transpose(0, 1)
