"""Latency and throughput of one pass, as vLLM defines them, and how many of them spread; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import fsum

__all__ = ["Distribution", "StreamPerfMetrics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPerfMetrics:
    """Figures of one pass; times in seconds, throughputs in tokens per second.

    Attributes:
        duration: from just before the request to the end of the stream.
        ttft: time to first token: to the first event with a token; None if none came.
        tpot: time per output token: (last - first) / (tokens - 1); None for fewer than two tokens.
        e2e_latency: from just before the request to the last event with a token; None if none came.
        itl: inter-token latencies: the gaps between events that carried tokens, so that an event
            with several tokens counts once.
        input_tokens: tokens of the prompt that was sent.
        output_tokens: tokens that were decoded.
        cached_tokens: prompt tokens whose KV the engine took from a cache; None if it did not say.
        input_tput: ``input_tokens / duration``.
        output_tput: ``output_tokens / duration``.
        finish_reason: the engine's; None where it gave none.
    """

    duration: float
    ttft: float | None
    tpot: float | None
    e2e_latency: float | None
    itl: tuple[float, ...] = field(repr=False)
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    input_tput: float
    output_tput: float
    finish_reason: str | None

    @classmethod
    def from_arrivals(
        cls,
        *,
        started: float,
        ended: float,
        arrivals: Sequence[float],
        input_tokens: int,
        cached_tokens: int | None,
        finish_reason: str | None,
    ) -> StreamPerfMetrics:
        """Compute the figures from clock readings.

        Args:
            started: just before the request.
            ended: at the end of the stream.
            arrivals: one reading a token, in order; tokens of one event share theirs.
            input_tokens: as in the attributes.
            cached_tokens: as in the attributes.
            finish_reason: as in the attributes.
        """
        duration = ended - started
        count = len(arrivals)
        events = sorted(set(arrivals))
        return cls(
            duration=duration,
            ttft=arrivals[0] - started if count else None,
            tpot=(arrivals[-1] - arrivals[0]) / (count - 1) if count > 1 else None,
            e2e_latency=arrivals[-1] - started if count else None,
            itl=tuple(after - before for before, after in pairwise(events)),
            input_tokens=input_tokens,
            output_tokens=count,
            cached_tokens=cached_tokens,
            input_tput=input_tokens / duration if duration > 0 else 0.0,
            output_tput=count / duration if duration > 0 else 0.0,
            finish_reason=finish_reason,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """How values spread; percentiles by linear interpolation between the two nearest values, which is
    numpy's default and so vLLM's.

    Attributes:
        count: number of values.
        mean: their mean.
        p50: their median.
        p90: the value that 90 % of them do not exceed.
        p99: the value that 99 % of them do not exceed.
    """

    count: int
    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """Compute it; None where there is no value."""
        ranked = sorted(values)
        if not ranked:
            return None
        return cls(
            count=len(ranked),
            mean=fsum(ranked) / len(ranked),
            p50=_percentile(ranked, 0.50),
            p90=_percentile(ranked, 0.90),
            p99=_percentile(ranked, 0.99),
        )


def _percentile(ranked: Sequence[float], share: float) -> float:
    rank = (len(ranked) - 1) * share
    below = int(rank)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (rank - below)
