"""Rotary position embeddings: a model's frequencies, and moving cached keys to new positions."""

from .config import RopeConfig
from .families import Pairing
from .reader import head_size_of, text_config_of
from .rotation import KeyMove, rotate_keys

__all__ = ["KeyMove", "Pairing", "RopeConfig", "head_size_of", "rotate_keys", "text_config_of"]
