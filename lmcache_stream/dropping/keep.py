"""Keeping tokens that the caller has chosen."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InvalidRequestError

__all__ = ["Keep", "keep"]


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the tokens at these indices of the prefix and drop all others.

    Attributes:
        indices: at least one, not negative, strictly increasing: the order of the tokens is their
            order in the edited sequence, so a shuffled or repeated index is a mistake, not a wish.

    Raises:
        InvalidRequestError: the indices are not so.
    """

    indices: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.indices:
            raise InvalidRequestError("keep: no index is given, so nothing would be left")
        if any(isinstance(index, bool) for index in self.indices):
            raise InvalidRequestError("keep: a mask? Give mask.nonzero().squeeze(1) instead")
        previous = -1
        for place, index in enumerate(self.indices):
            if index <= previous:
                raise InvalidRequestError(
                    f"keep: indices[{place}] is {index} after {previous}: indices must not be "
                    "negative and must increase strictly"
                    if place
                    else f"keep: indices[0] is {index}: indices must not be negative"
                )
            previous = index

    def kept_indices(self, num_tokens: int) -> Tensor:
        """Return the indices as int64 ``[n]`` for a prefix of ``num_tokens`` tokens.

        Raises:
            InvalidRequestError: the last index is not in the prefix.
        """
        if self.indices[-1] >= num_tokens:
            raise InvalidRequestError(
                f"keep: index {self.indices[-1]} is not in a prefix of {num_tokens} tokens"
            )
        return torch.tensor(self.indices, dtype=torch.int64)


def keep(indices: Sequence[int] | Tensor) -> Keep:
    """Return the edit that keeps exactly these tokens.

    Args:
        indices: see ``Keep``; a list, range, array or 1-d tensor of ints.

    Raises:
        InvalidRequestError: not a flat sequence of ints, or not as ``Keep`` wants them.
    """
    tolist = getattr(indices, "tolist", None)
    values = tolist() if tolist else indices
    if isinstance(values, str | bytes):
        raise InvalidRequestError("keep: indices must be ints, not text")
    try:
        whole = tuple(v if isinstance(v, bool) else operator.index(v) for v in values)
    except TypeError as error:
        raise InvalidRequestError(f"keep: indices must be flat ints: {error}") from error
    return Keep(whole)
