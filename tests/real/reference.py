"""The model of the real stack, in transformers."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .install_stack import default_folder, model_of


@functools.cache
def model(dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model_of(default_folder()), dtype=dtype)
    return loaded.eval()
