"""``Scored``: a score of the caller's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InvalidRequestError
from .policy import DropPolicy
from .prefix import CachedPrefix

__all__ = ["Scored"]

ScoreFunction = Callable[[Tensor, Tensor | None, Sequence[int]], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored(DropPolicy):
    """Keep the tokens that ``function(keys, queries, tokens)`` scores highest.

    Attributes:
        function: takes keys ``[L, T, H, d]``, queries ``[L, W, Hq, d]`` or None, and T token ids, none of
            which it may change; returns ``[T]``.
    """

    function: ScoreFunction

    def __post_init__(self) -> None:
        # By its class, because a dataclass with slots is made anew and `super()` knows the old one.
        DropPolicy.__post_init__(self)
        if not callable(self.function):
            raise InvalidRequestError(f"Scored: function={self.function!r} cannot be called")

    def score(self, prefix: CachedPrefix) -> Tensor:
        """Return what the function does."""
        scores = self.function(prefix.keys.stack(), prefix.queries, prefix.tokens)
        if not isinstance(scores, Tensor):
            raise InvalidRequestError(f"Scored: the function returned a {type(scores).__name__}, no tensor")
        if scores.dtype == torch.bool or scores.is_complex():
            raise InvalidRequestError(f"Scored: the function returned {scores.dtype}: scores are numbers")
        if scores.is_meta or scores.layout != torch.strided:
            raise InvalidRequestError(
                f"Scored: the function returned a {scores.layout} tensor on {scores.device}: give a dense one"
            )
        return scores.detach().cpu()
