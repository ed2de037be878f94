"""What edits kept, counted in the sequence as it was before any of them; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._state import EditReport
from ..errors import InvalidRequestError

__all__ = ["Strip", "strips_of"]


@dataclass(frozen=True, slots=True)
class Strip:
    """One edit, counted in the sequence as it was before any edit.

    Attributes:
        label: its name in the picture.
        length: tokens that the edit and those before it had seen.
        present: of these, tokens that the edit found.
        kept: of these, tokens that it left.
    """

    label: str
    length: int
    present: tuple[int, ...]
    kept: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.label}: {len(self.kept)} of {self.length} tokens kept"


def strips_of(edits: Sequence[EditReport], label: str) -> list[Strip]:
    """Return a strip for each of ``stream.edits``; of several edits each gets its number.

    Raises:
        InvalidRequestError: a function made an edit: what it kept cannot be known.
    """
    strips: list[Strip] = []
    length = 0
    left: tuple[int, ...] = ()
    for number, report in enumerate(edits, 1):
        if report.kept_indices is None:
            raise InvalidRequestError(f"edit {number} was made by a function and not by a policy")
        # An edit finds what the last one left, and the tokens that the cache has got since.
        fresh = report.tokens_before - len(left)
        present = (*left, *range(length, length + fresh))
        length, left = length + fresh, report.kept_indices
        name = label if len(edits) == 1 else f"{label} {number}"
        strips.append(Strip(name, length, present, left))
    return strips
