"""Policies made of policies: some tokens always kept, chunks kept whole, one policy after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ..errors import InvalidRequestError
from .policy import DropPolicy
from .prefix import CachedPrefix

__all__ = ["AlwaysKeep", "Chain", "Policy", "WholeChunks"]


@dataclass(frozen=True, slots=True)
class AlwaysKeep:
    """As ``policy``, but these tokens are kept whatever their score; they count towards its budget.

    Attributes:
        policy: what chooses the others.
        ranges: ``(start, stop)`` pairs of token indices, e.g. a system prompt's; ends beyond the prefix
            mean its end.
    """

    policy: DropPolicy
    ranges: Sequence[tuple[int, int]]

    def __post_init__(self) -> None:
        _check_plain(self, self.policy)
        for start, stop in self.ranges:
            if not 0 <= start < stop:
                raise InvalidRequestError(f"AlwaysKeep: ({start}, {stop}) is no range of tokens")

    @property
    def needs_queries(self) -> bool:
        """As the policy's."""
        return self.policy.needs_queries

    @property
    def query_window(self) -> int:
        """As the policy's."""
        return self.policy.query_window

    def kept_indices(self, prefix: CachedPrefix, chunk_size: int) -> Tensor:
        """Return the indices to keep; see ``DropPolicy.kept_indices``."""
        always = torch.zeros(prefix.num_tokens, dtype=torch.bool)
        for start, stop in self.ranges:
            always[start:stop] = True
        return self.policy.kept_indices(prefix, chunk_size, always=always)


@dataclass(frozen=True, slots=True)
class WholeChunks:
    """As ``policy``, but runs of ``size`` tokens are kept or dropped together, by their mean score.

    What is kept then reads as text, and a fact is not cut through.
    """

    policy: DropPolicy
    size: int = 16

    def __post_init__(self) -> None:
        _check_plain(self, self.policy)
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size < 1:
            raise InvalidRequestError(f"WholeChunks: size={self.size!r} must be a positive int")

    @property
    def needs_queries(self) -> bool:
        """As the policy's."""
        return self.policy.needs_queries

    @property
    def query_window(self) -> int:
        """As the policy's."""
        return self.policy.query_window

    def kept_indices(self, prefix: CachedPrefix, chunk_size: int) -> Tensor:
        """Return the indices to keep; see ``DropPolicy.kept_indices``."""
        if chunk_size % self.size:
            raise InvalidRequestError(
                f"WholeChunks: size={self.size} does not divide the cache's chunk of {chunk_size} tokens"
            )
        return self.policy.kept_indices(prefix, chunk_size, run=self.size)


@dataclass(frozen=True, slots=True)
class Chain:
    """Each policy chooses from what the one before it kept; their shares multiply."""

    policies: Sequence[DropPolicy | AlwaysKeep | WholeChunks]

    def __post_init__(self) -> None:
        if not self.policies:
            raise InvalidRequestError("Chain: no policy is given")

    @property
    def needs_queries(self) -> bool:
        """Whether one of the policies does."""
        return any(policy.needs_queries for policy in self.policies)

    @property
    def query_window(self) -> int:
        """The longest of the policies'."""
        return max(policy.query_window for policy in self.policies)

    def kept_indices(self, prefix: CachedPrefix, chunk_size: int) -> Tensor:
        """Return the indices to keep; see ``DropPolicy.kept_indices``."""
        kept = torch.arange(prefix.num_tokens)
        for policy in self.policies:
            kept = kept[policy.kept_indices(prefix.select(kept), chunk_size)]
        return kept


def _check_plain(wrapper: object, policy: object) -> None:
    if not isinstance(policy, DropPolicy):
        raise InvalidRequestError(
            f"{type(wrapper).__name__}: policy={policy!r} is no plain policy such as KeyDiff(ratio=0.5); "
            "wrappers do not nest, but Chain takes several"
        )


Policy: TypeAlias = DropPolicy | AlwaysKeep | WholeChunks | Chain
