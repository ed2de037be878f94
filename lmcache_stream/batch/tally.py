"""What a report adds up, outcome by outcome, so that none of them has to be kept; pure."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from ..metrics import StreamPerfMetrics
from .outcome import PhaseOutcome, StreamOutcome
from .spread import Cover, Spread

__all__ = ["PASSES", "Mode", "Tally"]

Mode = Literal["prefill", "modify", "decode", "run"]

_PHASES: dict[Mode, tuple[str, ...]] = {
    "prefill": ("prefill",),
    "modify": ("edit",),
    "decode": ("decode",),
    "run": ("prefill", "edit", "decode"),
}
PASSES = {mode: tuple(name for name in names if name != "edit") for mode, names in _PHASES.items()}
"""The passes that belong to a mode; the last one is the one whose latencies are shown."""

_LATENCIES = ("ttft", "itl", "tpot", "e2e_latency", "prefill_ttft", "edit_time", "job_time", "queue_time")


class Tally:
    """Takes outcomes and gives the figures of a ``BatchReport``.

    Args:
        mode: which figures.
        limit: how many values of each figure are kept one by one; see ``Spread``. None keeps all.
    """

    def __init__(self, mode: Mode, *, limit: int | None = None) -> None:
        self._mode = mode
        self._spreads = {name: Spread(limit) for name in _LATENCIES}
        self._active, self._editing = Cover(limit), Cover(limit)
        self._failures: Counter[str] = Counter()
        self._counts = dict.fromkeys(
            ("completed", "retries", "input_tokens", "output_tokens", "kv_bytes_before", "kv_bytes_after"), 0
        )
        self._cached: int | None = None

    def add(self, outcome: StreamOutcome) -> None:
        """Take an outcome."""
        self._counts["retries"] += outcome.retries
        if not outcome.is_ok:
            self._failures[type(outcome.error).__name__] += 1
            return
        self._counts["completed"] += 1
        passes = [phase.metrics for phase in self._phases(outcome) if phase.metrics is not None]
        for each in passes:
            self._counts["input_tokens"] += each.input_tokens
            self._counts["output_tokens"] += each.output_tokens
            if each.cached_tokens is not None:
                self._cached = (self._cached or 0) + each.cached_tokens
        if passes:
            self._add_latencies(passes[-1])
        for phase in outcome.phases:
            if phase.name in _PHASES[self._mode]:
                self._active.add(*_last_attempt(phase))
        if self._mode in ("modify", "run"):
            self._add_edit(outcome)
        if self._mode == "run":
            self._add("prefill_ttft", outcome.prefill.ttft if outcome.prefill else None)
            self._add("job_time", outcome.seconds)
        self._add("queue_time", outcome.queue_time)

    def _phases(self, outcome: StreamOutcome) -> list[PhaseOutcome]:
        found = [outcome.phase(name) for name in PASSES[self._mode]]
        return [phase for phase in found if phase is not None]

    def _add_latencies(self, shown: StreamPerfMetrics) -> None:
        for name in ("ttft", "tpot", "e2e_latency"):
            self._add(name, getattr(shown, name))
        for gap in shown.itl:
            self._add("itl", gap)

    def _add_edit(self, outcome: StreamOutcome) -> None:
        phase, edit = outcome.phase("edit"), outcome.edit
        if phase is None or edit is None:
            return
        self._counts["kv_bytes_before"] += edit.bytes_before
        self._counts["kv_bytes_after"] += edit.bytes_after
        self._add("edit_time", edit.seconds)
        self._editing.add(*_last_attempt(phase))

    def _add(self, name: str, value: float | None) -> None:
        if value is not None:
            self._spreads[name].add(value)

    def figures(self, duration: float | None) -> dict[str, Any]:
        """Return the fields of a ``BatchReport``, but for ``configuration`` and ``outcomes``.

        Args:
            duration: seconds; by default those in which some stream was in a phase of the mode, without
                attempts that failed.
        """
        failed, counts = self._failures.total(), self._counts
        seconds = self._active.seconds if duration is None else duration
        editing = self._editing.seconds
        return {
            "mode": self._mode,
            "duration": seconds,
            "streams": counts["completed"] + failed,
            "failed": failed,
            "failures": dict(self._failures.most_common()),
            "cached_tokens": self._cached,
            "input_tput": counts["input_tokens"] / seconds if seconds > 0 else 0.0,
            "output_tput": counts["output_tokens"] / seconds if seconds > 0 else 0.0,
            "edit_gb_per_s": counts["kv_bytes_before"] / editing / 1e9 if editing > 0 else None,
            **counts,
            **{name: spread.distribution() for name, spread in self._spreads.items()},
        }


def _last_attempt(phase: PhaseOutcome) -> tuple[float, float]:
    """Return beginning and end of a phase's last attempt, the one that came to its end."""
    seconds = phase.metrics.duration if phase.metrics else phase.edit.seconds if phase.edit else 0.0
    end = phase.began + phase.seconds
    return end - seconds, end
