"""The blocking face of a batch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

from .._editing import KVEdit, Queries
from ..batch import AsyncLMCacheBatchedStream, BatchReport, StreamOutcome
from ..errors import InvalidRequestError
from ._portal import Portal
from ._stream import LMCacheStream

T = TypeVar("T")


class LMCacheBatchedStream:
    """``AsyncLMCacheBatchedStream`` without ``await``: the same names, blocking. Nothing is to be closed.

    Ctrl-C cancels a call, which ends its streams first.

    Args:
        max_concurrency: as for ``AsyncLMCacheBatchedStream``, like the others.
        max_edit_bytes: bytes of KV that are edited at once.
        max_attempts: how often a phase of a stream is tried.
        progress: draw a bar on stderr during every call.
    """

    def __init__(
        self,
        max_concurrency: int | None = None,
        *,
        max_edit_bytes: int | None = None,
        max_attempts: int = 4,
        progress: bool = False,
    ) -> None:
        self._batch = AsyncLMCacheBatchedStream(
            max_concurrency, max_edit_bytes=max_edit_bytes, max_attempts=max_attempts, progress=progress
        )
        self._streams: dict[str, LMCacheStream] = {}

    def add(self, stream: LMCacheStream) -> None:
        """Add a stream; see ``AsyncLMCacheBatchedStream.add``."""
        if not isinstance(stream, LMCacheStream):
            raise InvalidRequestError(f"add() takes an LMCacheStream, not a {type(stream).__name__}")
        self._batch.add(stream._stream)
        self._streams[stream.stream_id()] = stream

    def get_stream(self, stream_id: str) -> LMCacheStream:
        """Return the stream with this id."""
        self._batch.get_stream(stream_id)
        return self._streams[stream_id]

    def stream_ids(self) -> tuple[str, ...]:
        """Return the ids of the streams, in the order of adding."""
        return self._batch.stream_ids()

    def __len__(self) -> int:
        return len(self._batch)

    def _call(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        portal = self._portal()
        if portal is not None:
            return portal.call(function, *arguments)
        portal = Portal("the batch")
        try:
            return portal.call(function, *arguments)
        finally:
            portal.release()

    def _portal(self) -> Portal | None:
        # The streams' own: what they use lives on the loop that theirs leads to.
        portals = [stream._portal for stream in self._streams.values()]
        return next((portal for portal in portals if portal.is_open), portals[0] if portals else None)

    def run_streams(
        self, sampling_params: Mapping[str, Any], stream_ids: Sequence[str] | None = None
    ) -> list[StreamOutcome]:
        """See ``AsyncLMCacheBatchedStream.run_streams``."""
        return self._call(self._batch.run_streams, sampling_params, stream_ids)

    def modify_stream(
        self,
        edit: KVEdit,
        stream_ids: Sequence[str] | None = None,
        timeout: float = 30.0,
        poll_interval: float = 0.2,
        *,
        min_tokens: int | None = None,
        queries: Queries | None = None,
    ) -> list[StreamOutcome]:
        """See ``AsyncLMCacheBatchedStream.modify_stream``."""

        async def modify() -> list[StreamOutcome]:
            return await self._batch.modify_stream(
                edit, stream_ids, timeout, poll_interval, min_tokens=min_tokens, queries=queries
            )

        return self._call(modify)

    def prefill(
        self, sampling_params: Mapping[str, Any], stream_ids: Sequence[str] | None = None
    ) -> BatchReport:
        """See ``AsyncLMCacheBatchedStream.prefill``."""
        return self._call(self._batch.prefill, sampling_params, stream_ids)

    def modify(
        self,
        edit: KVEdit,
        stream_ids: Sequence[str] | None = None,
        timeout: float = 30.0,
        poll_interval: float = 0.2,
        *,
        min_tokens: int | None = None,
        queries: Queries | None = None,
    ) -> BatchReport:
        """See ``AsyncLMCacheBatchedStream.modify``."""

        async def modify() -> BatchReport:
            return await self._batch.modify(
                edit, stream_ids, timeout, poll_interval, min_tokens=min_tokens, queries=queries
            )

        return self._call(modify)

    def decode(
        self, sampling_params: Mapping[str, Any], stream_ids: Sequence[str] | None = None
    ) -> BatchReport:
        """See ``AsyncLMCacheBatchedStream.decode``."""
        return self._call(self._batch.decode, sampling_params, stream_ids)

    def run(
        self,
        edit: KVEdit,
        sampling_params: Mapping[str, Any],
        stream_ids: Sequence[str] | None = None,
        timeout: float = 30.0,
        poll_interval: float = 0.2,
        *,
        min_tokens: int | None = None,
        queries: Queries | None = None,
    ) -> list[StreamOutcome]:
        """See ``AsyncLMCacheBatchedStream.run``."""

        async def run() -> list[StreamOutcome]:
            return await self._batch.run(
                edit,
                sampling_params,
                stream_ids,
                timeout,
                poll_interval,
                min_tokens=min_tokens,
                queries=queries,
            )

        return self._call(run)

    def as_completed(
        self,
        edit: KVEdit,
        sampling_params: Mapping[str, Any],
        stream_ids: Sequence[str] | None = None,
        timeout: float = 30.0,
        poll_interval: float = 0.2,
        *,
        min_tokens: int | None = None,
        queries: Queries | None = None,
    ) -> Iterator[StreamOutcome]:
        """See ``AsyncLMCacheBatchedStream.as_completed``; leaving the loop waits for what it cancels."""
        outcomes = self._batch.as_completed(
            edit,
            sampling_params,
            stream_ids,
            timeout,
            poll_interval,
            min_tokens=min_tokens,
            queries=queries,
        )

        portal = self._portal()
        if portal is None:
            return iter(())

        def iterate() -> Iterator[StreamOutcome]:
            try:
                while True:
                    try:
                        yield portal.call(outcomes.__anext__)
                    except StopAsyncIteration:
                        return
            finally:
                # With the context, everything of it was closed.
                if portal.is_open:
                    portal.call(outcomes.aclose)

        return iterate()

    def get_perf_metrics(
        self,
        mode: Literal["prefill", "modify", "decode", "run"] = "decode",
        stream_ids: Sequence[str] | None = None,
    ) -> BatchReport:
        """See ``AsyncLMCacheBatchedStream.get_perf_metrics``."""
        return self._batch.get_perf_metrics(mode, stream_ids)

    def __repr__(self) -> str:
        return repr(self._batch).replace("AsyncLMCacheBatchedStream", "LMCacheBatchedStream")
