"""``KNorm``: small keys are attended to."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .policy import DropPolicy
from .prefix import CachedPrefix

__all__ = ["KNorm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KNorm(DropPolicy):
    """Keep tokens whose keys have a small L2 norm, and drop those with large keys.

    Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
    arXiv 2406.11430. A rotation does not change a norm.
    """

    def score(self, prefix: CachedPrefix) -> Tensor:
        """Return the negative norm, averaged over heads and layers."""
        scores = torch.zeros(prefix.num_tokens)
        for layer in prefix.keys:
            scores -= torch.linalg.vector_norm(layer.float(), dim=-1).mean(dim=-1)
        return scores / len(prefix.keys)
