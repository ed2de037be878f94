"""The figures of a batch, over all of its streams; pure."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TextIO

from ..metrics import Distribution
from .outcome import StreamOutcome
from .tables import LATENCIES, Table, as_html, as_text, write_table
from .tally import PASSES, Mode, Tally

__all__ = ["BatchReport", "Mode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchReport:
    """Figures of one call of a batch: times in seconds, throughputs in tokens per second.

    Definitions are those of vLLM's benchmark. A stream that failed is counted in ``failures`` (and its
    retries in ``retries``), and is in no other figure. Percentiles interpolate linearly.

    Attributes:
        mode: ``prefill``, ``modify``, ``decode`` or ``run``.
        configuration: what the batch was told.
        duration: seconds of the call; of a part of a ``run``, those in which some stream was in that part,
            without attempts that failed.
        streams: streams that came to an end, in whatever way.
        completed: those without an error.
        failed: those with one.
        failures: how many by the class of the error, the most frequent first.
        retries: attempts beyond the first ones.
        input_tokens: tokens of the prompts that were sent, over all passes of the mode.
        output_tokens: tokens that were decoded, over all passes of the mode.
        cached_tokens: of the input, those whose KV the engine took from a cache; None where it never said.
        input_tput: ``input_tokens / duration``.
        output_tput: ``output_tokens / duration``.
        kv_bytes_before: bytes of the KV that was edited.
        kv_bytes_after: bytes of the KV that the edits stored.
        edit_gb_per_s: ``kv_bytes_before`` in units of 10^9, a second in which some edit was under way; None
            without an edit.
        ttft: time to first token of the pass; in ``run``, of the decoding pass, as the next three.
        itl: inter-token latency, a value for each gap between events, of all streams together.
        tpot: time per output token, a value for each stream with two tokens or more.
        e2e_latency: from just before the request to the last token.
        prefill_ttft: time to first token of the prefill; in ``run`` only.
        edit_time: time that an edit took, from its call to the cache's confirmation.
        job_time: from the stream's turn to its end, with retries; in ``run`` only.
        queue_time: time that a stream waited in this client, for its turn and for memory.
        outcomes: what all this was computed from, failed streams too, in the order of adding.
    """

    mode: Mode
    configuration: Mapping[str, Any]
    duration: float
    streams: int
    completed: int
    failed: int
    failures: Mapping[str, int]
    retries: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    input_tput: float
    output_tput: float
    kv_bytes_before: int
    kv_bytes_after: int
    edit_gb_per_s: float | None
    ttft: Distribution | None
    itl: Distribution | None
    tpot: Distribution | None
    e2e_latency: Distribution | None
    prefill_ttft: Distribution | None
    edit_time: Distribution | None
    job_time: Distribution | None
    queue_time: Distribution | None
    outcomes: tuple[StreamOutcome, ...] = field(repr=False)

    @classmethod
    def of(
        cls,
        outcomes: Sequence[StreamOutcome],
        *,
        mode: Mode,
        duration: float | None = None,
        configuration: Mapping[str, Any] | None = None,
    ) -> BatchReport:
        """Compute the report of ``outcomes``; without a ``duration``, that is the time in which some stream
        was in a phase of the mode, without attempts that failed."""
        tally = Tally(mode)
        for outcome in outcomes:
            tally.add(outcome)
        return cls.of_tally(tally, duration=duration, configuration=configuration, outcomes=outcomes)

    @classmethod
    def of_tally(
        cls,
        tally: Tally,
        *,
        duration: float | None = None,
        configuration: Mapping[str, Any] | None = None,
        outcomes: Sequence[StreamOutcome] = (),
    ) -> BatchReport:
        """Make a report of what was added up before; ``outcomes`` are those that were kept."""
        return cls(
            configuration=dict(configuration or {}), outcomes=tuple(outcomes), **tally.figures(duration)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain dicts, numbers and None; without the outcomes."""
        figures: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name == "outcomes":
                continue
            if isinstance(value, Distribution):
                value = asdict(value)
            figures[each.name] = dict(value) if isinstance(value, Mapping) else value
        return figures

    def to_json(self, indent: int | None = None) -> str:
        """Return ``to_dict`` as JSON."""
        return json.dumps(self.to_dict(), indent=indent, default=str)

    def to_csv(self) -> str:
        """Return the figures as CSV with the columns ``figure``, ``statistic`` and ``value``.

        ``statistic`` is ``count``, ``mean``, ``p50``, ``p90`` or ``p99`` of a distribution, the key of an
        entry of ``configuration`` and ``failures``, and else empty. None is an empty value.
        """
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(["figure", "statistic", "value"])
        for name, value in self.to_dict().items():
            entries = value.items() if isinstance(value, dict) else [("", value)]
            writer.writerows([name, statistic, entry] for statistic, entry in entries)
        return text.getvalue()

    def emit(self, file: TextIO | None = None) -> None:
        """Print the report as tables to ``file``, standard output by default: rich's on a terminal, where
        rich is installed, else plain text."""
        write_table(self._title(), self._tables(), file)

    def __str__(self) -> str:
        return as_text(self._title(), self._tables())

    def _repr_html_(self) -> str:
        return as_html(self._title(), self._tables())

    def _title(self) -> str:
        return f"Batch of {self.streams} streams: {self.mode}"

    def _tables(self) -> list[Table]:
        latencies = {shown: getattr(self, name) for name, shown in LATENCIES.items()}
        totals: dict[str, Any] = {
            "duration (s)": self.duration,
            "streams completed": self.completed,
            "streams failed": self.failed,
            "retries": self.retries,
        }
        if PASSES[self.mode]:
            totals |= {
                "input tokens": self.input_tokens,
                "output tokens": self.output_tokens,
                "cached tokens": self.cached_tokens,
                "input throughput (tokens/s)": self.input_tput,
                "output throughput (tokens/s)": self.output_tput,
            }
        if self.edit_gb_per_s is not None:
            totals |= {
                "KV before (bytes)": self.kv_bytes_before,
                "KV after (bytes)": self.kv_bytes_after,
                "edits (GB/s)": self.edit_gb_per_s,
            }
        tables = [
            Table.of_figures("Configuration", self.configuration),
            Table.of_figures("Totals", totals),
            Table.of_latencies("Latency (ms)", latencies),
            Table.of_figures("Failures", self.failures),
        ]
        return [table for table in tables if table.rows]
