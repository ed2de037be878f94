"""``SnapKV``: what a window of the last queries attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import InvalidRequestError
from .attention import window_attention
from .policy import DropPolicy
from .prefix import CachedPrefix

__all__ = ["SnapKV"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapKV(DropPolicy):
    """Keep the tokens that the observation window attends to most, and their neighbours.

    Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", arXiv 2404.14469. There each
    head keeps tokens of its own; here one list serves all, by the mean over heads and layers.

    Attributes:
        window: the observation window: its queries vote, and its tokens are kept.
        kernel_size: odd width of the average over neighbouring tokens.
    """

    kernel_size: int = 5
    needs_queries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        # By its class, because a dataclass with slots is made anew and `super()` knows the old one.
        DropPolicy.__post_init__(self)
        if self.window < 1:
            raise InvalidRequestError("SnapKV: window=0 leaves no queries to observe")
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise InvalidRequestError(f"SnapKV: kernel_size={self.kernel_size} must be odd and positive")

    def score(self, prefix: CachedPrefix) -> Tensor:
        """Return the window's mean weights, smoothed, averaged over heads and layers."""
        layers = len(prefix.keys)
        scores = torch.zeros(prefix.num_tokens)
        for layer in range(layers):
            scores += window_attention(prefix, layer, self.window).mean(dim=(0, 1))
        # The window looks at itself most: what it votes on is what lies before it.
        before = (scores / layers)[: max(0, prefix.num_tokens - self.window)]
        smooth = functional.avg_pool1d(
            before[None, None],
            self.kernel_size,
            stride=1,
            padding=self.kernel_size // 2,
            count_include_pad=False,
        )[0, 0]
        return functional.pad(smooth, (0, prefix.num_tokens - len(smooth)))
