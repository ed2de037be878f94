"""``AsyncLMCacheBatchedStream``: many streams, run and edited side by side."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Literal

from .._editing import KVEdit, Queries
from ..errors import InvalidRequestError
from ..progress import check_progress
from ..stream import AsyncLMCacheStream
from .limits import ByteLimiter, descriptor_limit, memory_limit
from .outcome import StreamOutcome
from .phases import Edit, Phase, decode, prefill
from .report import BatchReport, Mode
from .retries import RetryPolicy
from .running import Run

__all__ = ["AsyncLMCacheBatchedStream"]

logger = logging.getLogger(__name__)


class AsyncLMCacheBatchedStream:
    """Streams that are run, edited and reported together.

    Every call gives one outcome a stream, in the order of adding: a stream that fails takes nothing from
    the others. Only an engine or a cache that is down stops them all: ``BatchStoppedError``, which has
    the outcomes so far. A cancelled call ends its streams first, as each of them ends by itself.

    Before its first token, a pass that the engine answers with 429 or 503, or cannot be reached for, is
    tried again, after the engine's ``Retry-After`` and a random pause; so is an edit while the cache cannot
    be reached, for which a function of the caller's may be called again.

    Args:
        max_concurrency: streams that run at once; as many as half of the free file descriptors by default.
        max_edit_bytes: bytes of KV that are edited at once, counted before the edits; a quarter of the
            machine's memory by default. A larger prefix is edited alone.
        max_attempts: how often a phase of a stream is tried, the first time counted.
        progress: draw a bar on stderr during every call, where that is a terminal, or in a notebook; needs
            ``pip install 'lmcache-stream[jobs]'``.

    Raises:
        InvalidRequestError: a number that is not a positive int, or nothing is there to draw a bar with.
    """

    def __init__(
        self,
        max_concurrency: int | None = None,
        *,
        max_edit_bytes: int | None = None,
        max_attempts: int = 4,
        progress: bool = False,
    ) -> None:
        if progress:
            check_progress()
        self._progress = progress
        self._max_concurrency = (
            None if max_concurrency is None else _positive(max_concurrency, "max_concurrency")
        )
        limit = memory_limit() if max_edit_bytes is None else max_edit_bytes
        self._memory = ByteLimiter(_positive(limit, "max_edit_bytes"))
        self._retries = RetryPolicy(max_attempts=_positive(max_attempts, "max_attempts"))
        self._streams: dict[str, AsyncLMCacheStream] = {}
        self._runs: dict[str, Run] = {}

    def add(self, stream: AsyncLMCacheStream) -> None:
        """Add a stream.

        Raises:
            InvalidRequestError: it is in the batch already, or no stream.
        """
        if not isinstance(stream, AsyncLMCacheStream):
            raise InvalidRequestError(f"add() takes an AsyncLMCacheStream, not a {type(stream).__name__}")
        if stream.stream_id() in self._streams:
            raise InvalidRequestError(f"the stream {stream.stream_id()} is in the batch already")
        self._streams[stream.stream_id()] = stream

    def get_stream(self, stream_id: str) -> AsyncLMCacheStream:
        """Return the stream with this id.

        Raises:
            InvalidRequestError: there is none.
        """
        if stream_id not in self._streams:
            raise InvalidRequestError(f"no stream {stream_id!r} is in this batch of {len(self._streams)}")
        return self._streams[stream_id]

    def stream_ids(self) -> tuple[str, ...]:
        """Return the ids of the streams, in the order of adding."""
        return tuple(self._streams)

    def __len__(self) -> int:
        return len(self._streams)

    async def run_streams(
        self, sampling_params: Mapping[str, Any], stream_ids: Sequence[str] | None = None
    ) -> list[StreamOutcome]:
        """Run one pass of each stream to its end; see ``AsyncLMCacheStream.generate``.

        Args:
            sampling_params: under the engine's names, for every stream.
            stream_ids: which streams; all by default.

        Raises:
            InvalidRequestError: unknown or repeated ids, or parameters that are no mapping.
            BatchStoppedError: the engine or the cache is down.
        """
        run = self._run("decode", [decode(sampling_params)], stream_ids)
        return await run.run()

    async def modify_stream(
        self,
        edit: KVEdit,
        stream_ids: Sequence[str] | None = None,
        timeout: float = 30.0,
        poll_interval: float = 0.2,
        *,
        min_tokens: int | None = None,
        queries: Queries | None = None,
    ) -> list[StreamOutcome]:
        """Edit the KV of each stream; arguments as those of ``AsyncLMCacheStream.modify_kv``.

        Raises:
            InvalidRequestError: unknown or repeated ids, or an edit that can be right for no stream.
            BatchStoppedError: the cache is down.
        """
        phase = Edit(edit, timeout, poll_interval, min_tokens, queries)
        return await self._run("modify", [phase], stream_ids).run()

    async def prefill(
        self, sampling_params: Mapping[str, Any], stream_ids: Sequence[str] | None = None
    ) -> BatchReport:
        """Prefill each stream, ``max_tokens`` being 1 whatever ``sampling_params`` say; see ``run_streams``.

        The report has the ``outcomes``.
        """
        run = self._run("prefill", [prefill(sampling_params)], stream_ids)
        await run.run()
        return run.report("prefill")

    async def modify(
        self,
        edit: KVEdit,
        stream_ids: Sequence[str] | None = None,
        timeout: float = 30.0,
        poll_interval: float = 0.2,
        *,
        min_tokens: int | None = None,
        queries: Queries | None = None,
    ) -> BatchReport:
        """As ``modify_stream``, with a report, which has the ``outcomes``."""
        phase = Edit(edit, timeout, poll_interval, min_tokens, queries)
        run = self._run("modify", [phase], stream_ids)
        await run.run()
        return run.report("modify")

    async def decode(
        self, sampling_params: Mapping[str, Any], stream_ids: Sequence[str] | None = None
    ) -> BatchReport:
        """As ``run_streams``, with a report, which has the ``outcomes``."""
        run = self._run("decode", [decode(sampling_params)], stream_ids)
        await run.run()
        return run.report("decode")

    async def run(
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
        """Take each stream through prefill, edit and decoding at its own pace: none waits for another.

        Args:
            edit: as in ``modify_stream``, like all that follow.
            sampling_params: of the decoding; the prefill has the same with ``max_tokens`` 1.
            stream_ids: which streams; all by default.
            timeout: of the edit.
            poll_interval: of the edit.
            min_tokens: of the edit.
            queries: of the edit.

        Raises:
            InvalidRequestError: unknown or repeated ids, or arguments that can be right for no stream.
            BatchStoppedError: the engine or the cache is down.
        """
        phase = Edit(edit, timeout, poll_interval, min_tokens, queries)
        phases: list[Phase] = [prefill(sampling_params), phase, decode(sampling_params)]
        return await self._run("run", phases, stream_ids).run()

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
    ) -> AsyncGenerator[StreamOutcome, None]:
        """As ``run``, but yield each outcome as it comes: ``async for outcome in batch.as_completed(...)``.

        Leaving the loop cancels the streams that are not through; ``contextlib.aclosing`` around it also
        waits for that.
        """
        phase = Edit(edit, timeout, poll_interval, min_tokens, queries)
        phases: list[Phase] = [prefill(sampling_params), phase, decode(sampling_params)]
        return self._run("run", phases, stream_ids).as_completed()

    def get_perf_metrics(
        self,
        mode: Literal["prefill", "modify", "decode", "run"] = "decode",
        stream_ids: Sequence[str] | None = None,
    ) -> BatchReport:
        """Return the report of the last call of a kind, also of one that was stopped or cancelled.

        Args:
            mode: ``prefill``, ``modify`` (edits), ``decode``, or ``run`` for all three together. The first
                three are also parts of the last ``run``, if nothing of the kind came after it.
            stream_ids: the streams to count; by default all that the call had.

        Raises:
            InvalidRequestError: unknown ids or mode, or no such call yet.
        """
        if mode not in ("prefill", "modify", "decode", "run"):
            raise InvalidRequestError(f"mode={mode!r} is none of 'prefill', 'modify', 'decode' and 'run'")
        if mode not in self._runs:
            raise InvalidRequestError(f"there is nothing to report: no {mode} of this batch was begun")
        chosen = None if stream_ids is None else self._chosen(stream_ids)
        return self._runs[mode].report(mode, chosen)

    def _run(self, mode: Mode, phases: Sequence[Phase], stream_ids: Sequence[str] | None) -> Run:
        chosen = self._streams if stream_ids is None else self._chosen(stream_ids)
        limit = self._max_concurrency
        if limit is None:
            limit = min(descriptor_limit(), max(1, len(chosen)))
            if limit < len(chosen):
                logger.warning(
                    "%d of %d streams run at once, in half of the free file descriptors; `ulimit -n` allows "
                    "more",
                    limit,
                    len(chosen),
                )
        run = Run(
            mode,
            chosen,
            phases,
            limit=limit,
            memory=self._memory,
            retries=self._retries,
            progress=self._progress,
        )
        self._runs[mode] = run
        if mode == "run":
            self._runs |= dict.fromkeys(("prefill", "modify", "decode"), run)
        return run

    def _chosen(self, stream_ids: Sequence[str]) -> dict[str, AsyncLMCacheStream]:
        """Return the streams with these ids, in the order of adding."""
        if isinstance(stream_ids, str):
            raise InvalidRequestError("stream_ids must be a sequence of ids, not one id")
        try:
            ids = list(stream_ids)
            wanted = {each: self.get_stream(each) for each in ids}
        except TypeError as error:
            raise InvalidRequestError(f"stream_ids must be a sequence of ids: {error}") from error
        if len(wanted) < len(ids):
            raise InvalidRequestError("stream_ids names a stream twice: one operation at a time on each")
        return {each: stream for each, stream in self._streams.items() if each in wanted}

    def __repr__(self) -> str:
        return f"<AsyncLMCacheBatchedStream of {len(self._streams)}>"


def _positive(value: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidRequestError(f"{what} must be a positive int, not {value!r}")
    return value
