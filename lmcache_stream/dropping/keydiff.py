"""``KeyDiff``: keys unlike the others are kept."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .directions import unlikeness
from .policy import DropPolicy
from .prefix import CachedPrefix

__all__ = ["KeyDiff"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDiff(DropPolicy):
    """Keep tokens whose keys point away from the mean direction of all keys; no queries are needed.

    Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
    Resource-Constrained Environments", arXiv 2504.15364.

    Attributes:
        rotated: whether to compare the keys as the cache holds them. RoPE turns equal keys apart by their
            distance, so that the mean is left with what turns slowly; without it the keys' contents are
            compared, which keeps more facts (``benchmarks/recall.py``).
    """

    rotated: bool = False

    def score(self, prefix: CachedPrefix) -> Tensor:
        """Return the negative cosine to the mean of the unit keys, averaged over heads and layers."""
        return unlikeness(prefix.keys if self.rotated else prefix.unrotated_keys())
