"""What every policy has: how much to drop, what is always kept, and a score for the rest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..errors import InvalidRequestError
from .prefix import CachedPrefix
from .selection import budget_of, highest

__all__ = ["DropPolicy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DropPolicy(ABC):
    """Keeps the tokens with the highest scores, one list of tokens for all layers and heads.

    LMCache keeps whole tokens (``[2, L, T, D]``), so that budgets a head or a layer cannot be had: scores
    are averaged over heads, then over layers, where a policy does not say otherwise.

    Attributes:
        ratio: the share of the prefix to drop, 0 to below 1; this or ``budget``.
        budget: the number of tokens to keep. Both are rounded to whole chunks of the cache, and what
            ``sinks`` and ``window`` keep is part of them.
        sinks: tokens at the beginning that are always kept.
        window: tokens at the end that are always kept.
        needs_queries: whether the score needs queries.
    """

    ratio: float | None = None
    budget: int | None = None
    sinks: int = 4
    window: int = 32
    needs_queries: ClassVar[bool] = False

    def __post_init__(self) -> None:
        name = type(self).__name__
        if (self.ratio is None) == (self.budget is None):
            raise InvalidRequestError(f"{name}: give ratio= (share dropped) or budget= (tokens kept)")
        if self.ratio is not None and (
            isinstance(self.ratio, bool) or not isinstance(self.ratio, int | float) or not 0 <= self.ratio < 1
        ):
            raise InvalidRequestError(f"{name}: ratio={self.ratio!r} must be a share from 0 to below 1")
        for field, lowest in (("budget", 1), ("sinks", 0), ("window", 0)):
            value = getattr(self, field)
            if value is None and field == "budget":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise InvalidRequestError(f"{name}: {field}={value!r} must be an int of at least {lowest}")

    @property
    def query_window(self) -> int:
        """How many of the last queries it looks at, where it needs queries."""
        return max(1, self.window)

    @abstractmethod
    def score(self, prefix: CachedPrefix) -> Tensor:
        """Return a score a token, ``[T]``, any floating dtype: the higher, the sooner it is kept.

        It runs in a worker thread while the prefix is locked in the cache, whose locks last five minutes:
        what takes longer is an error.
        """

    def kept_indices(
        self,
        prefix: CachedPrefix,
        chunk_size: int,
        *,
        always: Tensor | None = None,
        run: int = 1,
    ) -> Tensor:
        """Return the indices to keep, int64 ``[n]``, increasing; n is a multiple of ``chunk_size``.

        Args:
            prefix: whole chunks.
            chunk_size: tokens of a chunk of the cache.
            always: bool ``[T]``, tokens to keep besides sinks and window.
            run: tokens that are kept or dropped together; divides ``chunk_size``.

        Raises:
            InvalidRequestError: the budget is too small, queries are missing, or a score is NaN.
        """
        length = prefix.num_tokens
        count = budget_of(length, chunk_size, ratio=self.ratio, budget=self.budget)
        if count == length:
            return torch.arange(length)
        forced = torch.zeros(length, dtype=torch.bool) if always is None else always.clone()
        forced[: self.sinks] = True
        forced[max(0, length - self.window) :] = True
        forced = forced.view(-1, run).any(dim=1)
        if int(forced.sum()) * run > count:
            raise InvalidRequestError(
                f"{type(self).__name__}: {self.sinks} sinks, a window of {self.window} and what else is "
                f"always kept are {int(forced.sum()) * run} tokens, but {count} of {length} are to be kept: "
                "drop less, or set sinks= and window="
            )
        self._check_queries(prefix)
        scores = self.score(prefix)
        if tuple(scores.shape) != (length,):
            raise InvalidRequestError(
                f"{type(self).__name__}: scores of shape {list(scores.shape)} for {length} tokens: one a "
                "token is needed; budgets a head or a layer cannot be kept in [2, L, T, D]"
            )
        runs = scores.double().view(-1, run).mean(dim=1)
        # Above every other score, infinite ones too; what is no number stays so, and is refused.
        runs = runs.clamp(max=torch.finfo(runs.dtype).max)
        chosen = highest(runs.masked_fill(forced & ~runs.isnan(), torch.inf), count // run)
        return (chosen[:, None] * run + torch.arange(run)).flatten()

    def _check_queries(self, prefix: CachedPrefix) -> None:
        if self.needs_queries and prefix.queries is None:
            raise InvalidRequestError(
                f"{type(self).__name__} needs queries: pass queries=HFQueries(model) to modify_kv(), or a "
                "tensor or function of your own, or queries=True to connect() where the engine offloads "
                "them; KeyDiff, ValueDiff, KNorm, StreamingLLM and RandomDrop need none"
            )
