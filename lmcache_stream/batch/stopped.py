"""The error of a batch, or a job, that could not go on."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import LMCacheStreamError
from .outcome import StreamOutcome

__all__ = ["BatchStoppedError"]


class BatchStoppedError(LMCacheStreamError):
    """A batch was stopped because its engine or its cache is down: no stream could have gone on.

    ``__cause__`` is the connection error that outlived its retries.

    Attributes:
        party: ``engine`` or ``cache``.
        outcomes: what the streams came to that had ended by then, in the order of adding; none of a job,
            whose rows are in its output.
        unfinished: ids of the others, which were cancelled or never begun, in the order of adding.
    """

    def __init__(
        self,
        message: str,
        *,
        party: str,
        outcomes: Sequence[StreamOutcome],
        unfinished: Sequence[str],
    ) -> None:
        super().__init__(message)
        self.party = party
        self.outcomes: tuple[StreamOutcome, ...] = tuple(outcomes)
        self.unfinished: tuple[str, ...] = tuple(unfinished)
