"""An OpenAI-compatible engine over any Hugging Face causal language model, for one machine's CPU."""

from __future__ import annotations

from .engine import EmbeddedEngine
from .model import CausalModel

__all__ = ["CausalModel", "EmbeddedEngine"]
