"""``SnapKV``: what a window of the last queries attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

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
    head keeps tokens of its own; here one list serves all.

    Attributes:
        window: the observation window: its queries vote, and its tokens are kept.
        kernel_size: odd width of the average over neighbouring tokens.
        reduce: how the scores of all heads and layers become one. With ``mean`` a token is kept for the many
            heads that look at it a little, with ``max`` for the one that looks at it most: a fact that few
            heads retrieve then outlasts what all of them glance at, and so does any head's noise.
    """

    kernel_size: int = 5
    reduce: Literal["mean", "max"] = "mean"
    needs_queries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        # By its class, because a dataclass with slots is made anew and `super()` knows the old one.
        DropPolicy.__post_init__(self)
        if self.window < 1:
            raise InvalidRequestError("SnapKV: window=0 leaves no queries to observe")
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise InvalidRequestError(f"SnapKV: kernel_size={self.kernel_size} must be odd and positive")
        if self.reduce not in ("mean", "max"):
            raise InvalidRequestError(f"SnapKV: reduce={self.reduce!r} is neither 'mean' nor 'max'")

    def score(self, prefix: CachedPrefix) -> Tensor:
        """Return the window's mean weights a head, smoothed, and reduced over heads and layers."""
        layers = len(prefix.keys)
        # The window looks at itself most: what it votes on is what lies before it.
        before = max(0, prefix.num_tokens - self.window)
        scores = torch.zeros(before)
        for layer in range(layers):
            weights = window_attention(prefix, layer, self.window).mean(dim=1)[:, :before]
            smooth = functional.avg_pool1d(
                weights,
                self.kernel_size,
                stride=1,
                padding=self.kernel_size // 2,
                count_include_pad=False,
            )
            if self.reduce == "mean":
                scores += smooth.mean(dim=0) / layers
            else:
                scores = torch.maximum(scores, smooth.amax(dim=0))
        return functional.pad(scores, (0, prefix.num_tokens - before))
