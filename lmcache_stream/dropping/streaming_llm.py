"""``StreamingLLM``: the first tokens and the last ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .policy import DropPolicy
from .prefix import CachedPrefix

__all__ = ["StreamingLLM"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingLLM(DropPolicy):
    """Keep ``sinks`` tokens at the beginning and the most recent ones for the rest of the budget.

    The first tokens take the attention that a head has no other use for; without them the model breaks.
    Xiao et al., "Efficient Streaming Language Models with Attention Sinks", arXiv 2309.17453.
    """

    window: int = 0

    def score(self, prefix: CachedPrefix) -> Tensor:
        """Return the positions: the later, the higher."""
        return torch.arange(prefix.num_tokens, dtype=torch.float64)
