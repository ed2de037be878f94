"""One stream of a batch through its phases, with retries, to its outcome."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Sequence

import anyio

from .._state import EditReport
from ..metrics import StreamPerfMetrics
from ..stream import AsyncLMCacheStream
from .limits import ByteLimiter
from .outcome import PhaseOutcome, StreamOutcome
from .phases import Pass, Phase
from .retries import RetryPolicy, is_connection_error

__all__ = ["carry_out"]


async def carry_out(
    stream: AsyncLMCacheStream,
    phases: Sequence[Phase],
    memory: ByteLimiter,
    retries: RetryPolicy,
    submitted: float,
) -> StreamOutcome:
    """Take ``stream`` through ``phases`` and return what came of it; only a cancellation is raised.

    Args:
        stream: the stream.
        phases: in order; the first that fails is the last.
        memory: what edits pass.
        retries: which failures are tried again.
        submitted: ``time.perf_counter()`` at the beginning of the batch's call.
    """
    began = time.perf_counter()
    had_ids, had_text = stream.decoded_tokens(), len(stream.output_text())
    through: list[PhaseOutcome] = []
    error: BaseException | None = None
    is_outage = False
    for phase in phases:
        work = _Work(stream, phase, memory, retries)
        await work.run()
        through.append(work.outcome(submitted))
        error, is_outage = work.error, work.is_outage
        if error is not None:
            break
    return StreamOutcome(
        stream_id=stream.stream_id(),
        token_ids=tuple(stream.output_tokens()[had_ids:]),
        text=stream.output_text()[had_text:],
        error=error,
        traceback=_taken_traceback(error),
        phases=tuple(through),
        queue_time=began - submitted + sum(phase.waited for phase in through),
        seconds=time.perf_counter() - began,
        is_outage=is_outage,
    )


class _Work:
    """One phase of one stream, as often as it is tried."""

    def __init__(
        self, stream: AsyncLMCacheStream, phase: Phase, memory: ByteLimiter, retries: RetryPolicy
    ) -> None:
        self._stream = stream
        self._phase = phase
        self._memory = memory
        self._retries = retries
        self._began = self._ended = time.perf_counter()
        self._attempts = 0
        self._waited = self._paused = 0.0
        self._metrics: StreamPerfMetrics | None = None
        self._edit: EditReport | None = None
        self.error: BaseException | None = None
        self.is_outage = False

    async def run(self) -> None:
        while True:
            self._attempts += 1
            had = self._stream.decoded_tokens()
            self.error = await self._tried()
            # What came is the stream's: another attempt would go on from there instead of repeating.
            begun = self._stream.decoded_tokens() > had
            if self.error is None or begun:
                break
            pause = self._retries.pause(self.error, self._attempts)
            if pause is None:
                self.is_outage = is_connection_error(self.error)
                break
            self._paused += pause
            await anyio.sleep(pause)
        self._ended = time.perf_counter()

    async def _tried(self) -> BaseException | None:
        try:
            await self._try()
        except Exception as error:
            return error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Nobody cancelled this stream: a PostCompletion or an edit leaked a cancellation of its own,
            # which a task group would take for a quiet end.
            return error
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            # What a library of Rust panics with is no Exception.
            return error
        return None

    async def _try(self) -> None:
        stream, phase = self._stream, self._phase
        if isinstance(phase, Pass):
            self._metrics = await stream.generate(phase.params)
            return
        async with self._memory.reserve(stream.prefix_bytes) as waited:
            self._waited += waited
            await phase.apply(stream)
        self._edit = stream.edits[-1]

    def outcome(self, submitted: float) -> PhaseOutcome:
        return PhaseOutcome(
            name=self._phase.name,
            began=self._began - submitted,
            seconds=self._ended - self._began,
            attempts=self._attempts,
            waited=self._waited,
            paused=self._paused,
            metrics=self._metrics,
            edit=self._edit,
        )


def _taken_traceback(error: BaseException | None) -> str:
    """Return the traceback of ``error`` as text and take it, and those of its causes, away."""
    if error is None:
        return ""
    text = "".join(traceback.format_exception(error))
    left, seen = [error], set()
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = None
        left += [other for other in (one.__cause__, one.__context__) if other is not None]
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions
    return text
