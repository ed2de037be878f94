"""What the service counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

import lmcache_stream as lms

__all__ = ["METRICS_TYPE", "OUTCOMES", "ServiceMetrics"]

METRICS_TYPE = CONTENT_TYPE_LATEST
OUTCOMES = ("answered", "left", "refused", "busy", "failed", "stopped")

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class ServiceMetrics:
    """The figures of one service, in a registry of its own: two services in a process do not mix."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "document_requests",
            "Requests by what became of them; left: the client went away.",
            ["outcome"],
            registry=registry,
        )
        # From the beginning, so that rates can be computed of the first of a kind.
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        streams = Gauge("document_streams", "Requests in being.", ["state"], registry=registry)
        self.waiting = streams.labels("waiting")
        self.running = streams.labels("running")
        self.ttft = Histogram(
            "document_ttft_seconds",
            "From the request to the first token, with the time in the queue.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._itl = Histogram(
            "document_itl_seconds", "Between tokens of one pass.", buckets=_GAPS, registry=registry
        )
        self._edit = Histogram(
            "document_edit_seconds", "Edits of KV.", ["policy"], buckets=_SECONDS, registry=registry
        )
        tokens = Counter(
            "document_tokens", "Tokens of documents, by what edits did.", ["fate"], registry=registry
        )
        self._kept, self._dropped = tokens.labels("kept"), tokens.labels("dropped")
        size = Counter(
            "document_kv_bytes", "Bytes of KV before and after edits.", ["when"], registry=registry
        )
        self._before, self._after = size.labels("before"), size.labels("after")

    def count(self, outcome: str) -> None:
        """Count a request by its outcome."""
        self._requests.labels(outcome).inc()

    def observe_pass(self, metrics: lms.StreamPerfMetrics) -> None:
        """Take the figures of a pass in."""
        for gap in metrics.itl:
            self._itl.observe(gap)

    def observe_edit(self, policy: str, edit: lms.EditReport) -> None:
        """Take the figures of an edit in."""
        self._edit.labels(policy).observe(edit.seconds)
        self._kept.inc(edit.tokens_after)
        self._dropped.inc(edit.tokens_before - edit.tokens_after)
        self._before.inc(edit.bytes_before)
        self._after.inc(edit.bytes_after)

    def exposition(self) -> bytes:
        """Return all in Prometheus' text format."""
        return generate_latest(self._registry)
