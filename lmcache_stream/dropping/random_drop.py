"""``RandomDrop``: the floor that every policy must be above."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .policy import DropPolicy
from .prefix import CachedPrefix

__all__ = ["RandomDrop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomDrop(DropPolicy):
    """Keep tokens at random.

    Attributes:
        seed: of the choice; the same one keeps the same tokens of equally long prefixes.
    """

    seed: int = 0

    def score(self, prefix: CachedPrefix) -> Tensor:
        """Return uniform random numbers."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(prefix.num_tokens, generator=generator)
