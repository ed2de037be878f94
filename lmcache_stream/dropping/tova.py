"""``TOVA``: what the last token attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .attention import window_attention
from .policy import DropPolicy
from .prefix import CachedPrefix

__all__ = ["TOVA"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TOVA(DropPolicy):
    """Keep the tokens with the highest attention of the last query.

    Token Omission Via Attention: Oren et al., "Transformers are Multi-State RNNs", arXiv 2401.06104. There
    each layer omits tokens of its own; here one list serves all layers, by the mean of their weights.
    """

    sinks: int = 0
    window: int = 1
    needs_queries: ClassVar[bool] = True

    def score(self, prefix: CachedPrefix) -> Tensor:
        """Return the last query's weights, averaged over heads and layers."""
        layers = len(prefix.keys)
        scores = torch.zeros(prefix.num_tokens)
        for layer in range(layers):
            scores += window_attention(prefix, layer, 1)[:, 0].mean(dim=0)
        return scores / layers
