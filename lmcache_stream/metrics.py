"""Latency and throughput of one pass, as vLLM defines them; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

__all__ = ["StreamPerfMetrics"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPerfMetrics:
    """Figures of one pass; times in seconds, throughputs in tokens per second.

    Attributes:
        duration: from just before the request to the end of the stream.
        ttft: time to first token: to the first event with a token; None if none came.
        tpot: time per output token: (last - first) / (tokens - 1); None for fewer than two tokens.
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
    itl: tuple[float, ...]
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
            itl=tuple(after - before for before, after in pairwise(events)),
            input_tokens=input_tokens,
            output_tokens=count,
            cached_tokens=cached_tokens,
            input_tput=input_tokens / duration if duration > 0 else 0.0,
            output_tput=count / duration if duration > 0 else 0.0,
            finish_reason=finish_reason,
        )
