"""``RKV``: importance without repetition."""

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

__all__ = ["RKV"]

# Rows of similarities that exist at a time: memory grows with T, not with its square.
_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RKV(DropPolicy):
    """Keep tokens that the window attends to, unless later tokens have keys like theirs.

    Cai et al., "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models", arXiv 2505.24133. There
    each head keeps tokens of its own; here one list serves all, by the mean over heads and layers.

    Attributes:
        window: the observation window: its queries vote, and its tokens are kept.
        lam: the paper's lambda: weight of importance against redundancy, 0 to 1.
        threshold: the cosine above which two keys count as similar.
        recent: the paper's beta: of the tokens similar to one, so many of the latest do not count against
            it, so that of a group of equals the last ones stay.
        kernel_size: odd width of the maximum over neighbouring tokens' importance.
    """

    lam: float = 0.1
    threshold: float = 0.5
    recent: int = 1
    kernel_size: int = 7
    needs_queries: ClassVar[bool] = True

    def __post_init__(self) -> None:
        # By its class, because a dataclass with slots is made anew and `super()` knows the old one.
        DropPolicy.__post_init__(self)
        if self.window < 1:
            raise InvalidRequestError("RKV: window=0 leaves no queries to observe")
        if not 0 <= self.lam <= 1:
            raise InvalidRequestError(f"RKV: lam={self.lam} must be from 0 to 1")
        if self.kernel_size < 1 or self.kernel_size % 2 == 0:
            raise InvalidRequestError(f"RKV: kernel_size={self.kernel_size} must be odd and positive")
        if self.recent < 0:
            raise InvalidRequestError(f"RKV: recent={self.recent} must not be negative")

    def score(self, prefix: CachedPrefix) -> Tensor:
        """Return ``lam * importance - (1 - lam) * redundancy``, averaged over heads and layers."""
        layers = len(prefix.keys)
        scores = torch.zeros(prefix.num_tokens)
        for layer in range(layers):
            importance = self._importance(prefix, layer)
            redundancy = self._redundancy(prefix.keys[layer])
            scores += (self.lam * importance - (1 - self.lam) * redundancy).mean(dim=0)
        return scores / layers

    def _importance(self, prefix: CachedPrefix, layer: int) -> Tensor:
        """Return ``[H, T]``: the window's mean weights over each KV head's queries, the highest nearby."""
        weights = window_attention(prefix, layer, self.window).mean(dim=1)
        by_head = weights.view(prefix.num_kv_heads, -1, prefix.num_tokens).mean(dim=1)
        return functional.max_pool1d(by_head, self.kernel_size, stride=1, padding=self.kernel_size // 2)

    def _redundancy(self, keys: Tensor) -> Tensor:
        """Return ``[H, T]``: the softmax over tokens of a key's mean cosine to the others (``[T, H, d]``)."""
        directions = functional.normalize(keys.float(), dim=-1).transpose(0, 1)
        length = directions.shape[1]
        parts = []
        for start in range(0, length, _ROWS):
            rows = directions[:, start : start + _ROWS]
            alike = rows @ directions.transpose(1, 2)
            own = torch.arange(rows.shape[1])
            alike[:, own, start + own] = 0
            if self.recent:
                # The latest similar ones: counted from the end, the first `recent` above the threshold.
                similar = alike > self.threshold
                from_end = similar.flip(-1).cumsum(-1).flip(-1)
                alike.masked_fill_(similar & (from_end <= self.recent), 0)
            parts.append(alike.mean(dim=-1))
        return torch.cat(parts, dim=1).softmax(dim=-1)
