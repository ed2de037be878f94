"""One call of a batch: its streams side by side, no more than may run at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from typing import Any

from .._background import Background, to_the_end
from ..progress import counting
from ..stream import AsyncLMCacheStream
from .limits import ByteLimiter
from .outcome import StreamOutcome
from .phases import Phase
from .report import BatchReport, Mode
from .retries import RetryPolicy
from .side_by_side import as_they_come, party_of, side_by_side
from .stopped import BatchStoppedError
from .work import carry_out

__all__ = ["Run"]


class Run:
    """Takes every stream through the same phases, each at its own pace.

    Args:
        mode: ``prefill``, ``modify``, ``decode`` or ``run``.
        streams: by their ids, in the order of adding.
        phases: in order.
        limit: streams that run at once.
        memory: what edits pass.
        retries: which failures are tried again.
        progress: whether to draw a bar.
    """

    def __init__(
        self,
        mode: Mode,
        streams: Mapping[str, AsyncLMCacheStream],
        phases: Sequence[Phase],
        *,
        limit: int,
        memory: ByteLimiter,
        retries: RetryPolicy,
        progress: bool = False,
    ) -> None:
        self._progress = progress
        self._mode = mode
        self._phases = tuple(phases)
        self._limit = limit
        self._streams = dict(streams)
        self._memory = memory
        self._retries = retries
        self._by_id: dict[str, StreamOutcome] = {}
        self._began = self._ended = 0.0

    @property
    def outcomes(self) -> list[StreamOutcome]:
        """Those that there are, in the order of adding."""
        return [self._by_id[each] for each in self._streams if each in self._by_id]

    @property
    def _duration(self) -> float:
        return (self._ended or time.perf_counter()) - self._began if self._began else 0.0

    def report(self, mode: Mode, stream_ids: Collection[str] | None = None) -> BatchReport:
        """Return the figures so far, as those of ``mode``; of all streams or of these."""
        outcomes = self.outcomes
        if stream_ids is not None:
            outcomes = [outcome for outcome in outcomes if outcome.stream_id in stream_ids]
        told: dict[str, Any] = {
            "streams": len(self._streams),
            "max_concurrency": self._limit,
            "max_edit_bytes": self._memory.limit,
            "max_attempts": self._retries.max_attempts,
        }
        return BatchReport.of(
            outcomes,
            mode=mode,
            duration=self._duration if mode == self._mode else None,
            configuration=told | dict(phase.described() for phase in self._phases),
        )

    async def run(
        self, tell: Callable[[StreamOutcome], object] = lambda outcome: None
    ) -> list[StreamOutcome]:
        """Return the outcomes in the order of adding; ``tell`` is called with each as it comes.

        Raises:
            BatchStoppedError: the engine or the cache is down.
        """
        self._began = time.perf_counter()
        with counting(self._mode, len(self._streams), is_wanted=self._progress) as count:

            async def work(stream: AsyncLMCacheStream) -> StreamOutcome:
                outcome = await carry_out(stream, self._phases, self._memory, self._retries, self._began)
                self._by_id[outcome.stream_id] = outcome
                count(outcome.is_ok)
                tell(outcome)
                return outcome

            streams = as_they_come(self._streams.values())
            try:
                outage = await side_by_side(streams, work, limit=min(self._limit, len(self._streams)))
            finally:
                self._ended = time.perf_counter()
        if outage is not None:
            raise self._stopped(outage.error)
        return self.outcomes

    def _stopped(self, cause: BaseException | None) -> BatchStoppedError:
        outcomes, party = self.outcomes, party_of(cause)
        unfinished = [each for each in self._streams if each not in self._by_id]
        stopped = BatchStoppedError(
            f"the batch was stopped, because the {party} is down: {cause} (after "
            f"{self._retries.max_attempts} attempts). {len(outcomes)} of {len(self._streams)} streams have "
            "an outcome; `unfinished` names the others",
            party=party,
            outcomes=outcomes,
            unfinished=unfinished,
        )
        stopped.__cause__ = cause
        return stopped

    async def as_completed(self) -> AsyncGenerator[StreamOutcome, None]:
        """Yield outcomes as they come; when it is closed early, the rest is cancelled and waited for."""
        home = Background("lmcache-stream batch")
        ready: asyncio.Queue[StreamOutcome | None] = asyncio.Queue()
        try:
            await home.start()
            over = home.spawn(self.run(ready.put_nowait))
            over.add_done_callback(lambda _: ready.put_nowait(None))
            while (outcome := await ready.get()) is not None:
                yield outcome
            over.result()
        finally:
            await to_the_end(home.aclose())
