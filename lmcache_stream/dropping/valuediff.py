"""``ValueDiff``: values unlike the others are kept."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .directions import unlikeness
from .policy import DropPolicy
from .prefix import CachedPrefix

__all__ = ["ValueDiff"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueDiff(DropPolicy):
    """Keep tokens whose values point away from the mean direction of all values; no queries are needed.

    An attention head's output o changes by a / (1 - a) * (o - v) when a token of weight a and value v is
    dropped: what is like the output is not missed. Goel et al., "CAOTE: KV Cache Selection for LLMs via
    Attention Output Error-Based Token Eviction", arXiv 2504.14051, score by that, and put the mean of the
    values in the place of o where it has to be fast. Without queries a is not known either. Here values are
    compared as Park et al. compare keys (arXiv 2504.15364, see ``KeyDiff``), by direction: the distance, in
    which their lengths count, keeps fewer facts.

    RoPE does not rotate values, so that it need not be known.
    """

    def score(self, prefix: CachedPrefix) -> Tensor:
        """Return the negative cosine to the mean of the unit values, averaged over heads and layers."""
        return unlikeness(prefix.values)
