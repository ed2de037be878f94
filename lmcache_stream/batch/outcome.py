"""What one stream of a batch came to; pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from .._state import EditReport
from ..metrics import StreamPerfMetrics

__all__ = ["PhaseOutcome", "StreamOutcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseOutcome:
    """One phase of one stream; times in seconds.

    Attributes:
        name: ``prefill``, ``edit`` or ``decode``.
        began: when it began, counted from the beginning of the batch's call.
        seconds: how long it took, with all that it waited for.
        attempts: how often it was tried.
        waited: of ``seconds``, waiting for memory (``max_edit_bytes``).
        paused: of ``seconds``, pauses before further attempts.
        metrics: of a pass that came to its end: figures of the attempt that did.
        edit: of an edit that came to its end.
    """

    name: str
    began: float
    seconds: float
    attempts: int
    waited: float = 0.0
    paused: float = 0.0
    metrics: StreamPerfMetrics | None = None
    edit: EditReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOutcome:
    """What one stream of a batch came to: what it generated, or the error that ended it.

    Attributes:
        stream_id: the stream's id.
        token_ids: what this call generated, over all of its phases; of a failed stream, what came before.
        text: their text.
        error: what ended the stream; None where every phase came to its end. It has lost its traceback,
            whose frames would keep the KV of an edit in memory.
        traceback: that traceback as text; "" without an error.
        phases: those that were begun, in order; the last one is where the error came.
        queue_time: seconds that the stream waited in this client: for its turn and for memory.
        seconds: from its turn to its end.
        is_outage: the error says that the engine or the cache is down; it stops the batch.
    """

    stream_id: str
    token_ids: tuple[int, ...]
    text: str
    error: BaseException | None
    traceback: str = field(default="", repr=False)
    phases: tuple[PhaseOutcome, ...]
    queue_time: float
    seconds: float
    is_outage: bool = False

    @property
    def is_ok(self) -> bool:
        """Whether every phase came to its end."""
        return self.error is None

    @property
    def failed_phase(self) -> str | None:
        """The phase in which the error came; None without one."""
        return self.phases[-1].name if self.error is not None and self.phases else None

    @property
    def attempts(self) -> int:
        """Attempts of all phases together."""
        return sum(phase.attempts for phase in self.phases)

    @property
    def retries(self) -> int:
        """Attempts beyond the first of each phase."""
        return self.attempts - len(self.phases)

    @property
    def prefill(self) -> StreamPerfMetrics | None:
        """Figures of the prefill, where there was one."""
        phase = self.phase("prefill")
        return phase.metrics if phase else None

    @property
    def edit(self) -> EditReport | None:
        """Report of the edit, where there was one."""
        phase = self.phase("edit")
        return phase.edit if phase else None

    @property
    def decode(self) -> StreamPerfMetrics | None:
        """Figures of the decoding pass, where there was one."""
        phase = self.phase("decode")
        return phase.metrics if phase else None

    def phase(self, name: str) -> PhaseOutcome | None:
        """Return the phase ``name``; None where it was not begun."""
        return next((phase for phase in self.phases if phase.name == name), None)
