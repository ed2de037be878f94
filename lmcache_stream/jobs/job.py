"""A job: rows of a source, some at a time, each through its passes into the output."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from .._background import to_the_end
from .._workers import Workers
from ..batch.limits import ByteLimiter, memory_limit
from ..batch.outcome import StreamOutcome
from ..batch.phases import Edit, Phase, decode, prefill
from ..batch.report import BatchReport
from ..batch.side_by_side import party_of, side_by_side
from ..batch.stopped import BatchStoppedError
from ..batch.tally import Tally
from ..batch.work import carry_out
from ..errors import InvalidRequestError
from ..stream import AsyncLMCacheStream
from .output import Output
from .plan import Counts, Plan, Servers
from .prompts import BadRowError, PromptRow, check_tokens
from .records import described, encode_row, row_of
from .source import BadRow, Source
from .tokens import TextModel

__all__ = ["Job"]

# Values of each figure of the report that are kept one by one.
_EXACT = 20_000


class Job:
    """Runs the rows of a source; none of what they came to is kept but numbers.

    The prompt of a row is prefilled by a stream of its own, so that the answer, its first token too, is
    decoded from the edited KV.

    Args:
        servers: what it runs on.
        plan: what is done with every row.
        source: where the rows come from; it is opened and closed here, in a thread of its own.
        output: where they go; open.

    Attributes:
        counts: rows so far.
        has_begun: the source was opened.
        is_through: the job came to the end of the source.
    """

    def __init__(
        self,
        servers: Servers,
        plan: Plan,
        source: Source,
        output: Output,
    ) -> None:
        self._servers, self._plan, self._output = servers, plan, output
        self._source = source
        self.counts = Counts()
        self.has_begun = self.is_through = False
        self._say: Callable[[str], object] = lambda line: None
        self._moved: Callable[[], object] = lambda: None
        self._through = 0
        self._tally = Tally("decode" if plan.policy is None else "run", limit=_EXACT)
        self._policy = described(plan.policy)
        self._memory = ByteLimiter(memory_limit())
        self._text_model: TextModel | InvalidRequestError | None = None
        # Each of these waits for something else: a download, input that does not come, a disk. What is
        # ended waits for the disk alone.
        self._loading = Workers("lmcache-stream job tokenizer", 1)
        self._reading = Workers("lmcache-stream job reading", 1)
        self._writing = Workers("lmcache-stream job writing", 1)
        self._began = self._ended = 0.0
        first = prefill(plan.sampling_params)
        last = decode(plan.sampling_params)
        self._first: tuple[Phase, ...] = ()
        self._answer: tuple[Phase, ...] = (last,)
        if plan.policy is not None:
            self._first = (first,)
            self._answer = (Edit(plan.policy, queries=plan.queries), last)
        self._whole: tuple[Phase, ...] = (last,)

    async def run(
        self,
        *,
        say: Callable[[str], object] = lambda line: None,
        moved: Callable[[], object] = lambda: None,
    ) -> None:
        """Run every row.

        Args:
            say: is called with a line about each bad row.
            moved: is called when a row is through.

        Raises:
            BatchStoppedError: the engine or the cache is down; the rows that were under way are not in the
                output.
            InvalidRequestError: the source cannot be read, or text comes and there is no tokenizer.
            OSError: the output or the temporary file of ids cannot be written, or the input breaks off.
        """
        self._say, self._moved = say, moved
        self._began = time.perf_counter()
        try:
            await self._reading.run(self._source.open)
            self.has_begun = True
            self._text_model = await self._loading.run(self._load)
            async with aclosing(self._rows()) as rows:
                outage = await side_by_side(rows, self._work, limit=self._plan.limit)
            self.is_through = outage is None
        finally:
            self._ended = time.perf_counter()
            self.counts.skipped = self._source.passed_over
            self._loading.close()
            self._reading.submit(self._source.close)
            self._reading.close()
            self._writing.close()
            # The output is closed next: what is being written must be in it, or nothing of it.
            await to_the_end(self._writing.settle())
        if outage is not None:
            raise self._stopped(outage)

    @property
    def position(self) -> tuple[int, int | None]:
        """Bytes of the lines that the job is through with, and of all, where that is known."""
        return self._through + self._source.passed_bytes, self._source.size

    def report(self) -> BatchReport:
        """Return the figures so far, without outcomes."""
        plan = self._plan
        told = dict(phase.described() for phase in (*self._first, *self._answer))
        return BatchReport.of_tally(
            self._tally,
            duration=(self._ended or time.perf_counter()) - self._began if self._began else 0.0,
            configuration={
                "model": self._servers.model,
                "policy": self._policy,
                "max_concurrency": plan.limit,
                "max_attempts": plan.retries.max_attempts,
            }
            | told,
        )

    async def _rows(self) -> AsyncGenerator[tuple[PromptRow, Sequence[int]], None]:
        while (read := await self._reading.run(self._source.read)) is not None:
            for row in read:
                if isinstance(row, BadRow):
                    self._bad(row.line, row.reason)
                    continue
                try:
                    ids = row.token_ids
                    if ids is None:
                        ids = await self._writing.run(self._encode, row)
                    check_tokens(
                        ids,
                        vocab_size=self._servers.vocab_size,
                        max_model_len=self._servers.max_model_len,
                    )
                except BadRowError as error:
                    self._through += row.size
                    self._bad(row.line, str(error))
                else:
                    yield row, ids

    def _encode(self, row: PromptRow) -> tuple[int, ...]:
        if isinstance(self._text_model, InvalidRequestError):
            raise self._text_model
        assert self._text_model is not None
        return tuple(self._text_model.encode(row))

    def _load(self) -> TextModel | InvalidRequestError:
        try:
            return TextModel(self._servers.load_tokenizer())
        except InvalidRequestError as error:
            # An error for rows of text alone.
            return error

    def _bad(self, line: int, reason: str) -> None:
        self.counts.bad += 1
        self._say(f"line {line}: {reason}")
        self._moved()

    async def _work(self, item: tuple[PromptRow, Sequence[int]]) -> StreamOutcome:
        row, ids = item
        outcome = await self._answered(ids)
        baseline = None
        if outcome.is_ok and self._plan.baseline:
            baseline = await self._carry_out(self._open(ids), self._whole)
            if baseline.is_outage:
                return baseline
        if outcome.is_outage:
            return outcome
        await self._writing.run(partial(self._write, row, ids, outcome, baseline))
        # Here, because bad rows add to it on the event loop too.
        self._through += row.size
        self._moved()
        return outcome

    async def _answered(self, ids: Sequence[int]) -> StreamOutcome:
        """Prefill, edit and decode; return what came of the three, with the answer alone as text."""
        began = time.perf_counter()
        first: StreamOutcome | None = None
        if self._first:
            first = await self._carry_out(self._open(ids), self._first)
            if not first.is_ok:
                return replace(first, token_ids=(), text="", queue_time=0.0)
        answer = await self._carry_out(self._open(ids), self._answer)
        return replace(
            answer,
            phases=(*(first.phases if first is not None else ()), *answer.phases),
            # A row is read when there is room for it, so that it waits for memory alone.
            queue_time=sum(phase.waited for phase in answer.phases),
            seconds=time.perf_counter() - began,
        )

    def _open(self, ids: Sequence[int]) -> AsyncLMCacheStream:
        return AsyncLMCacheStream(self._servers.context, self._servers.engine, ids)

    async def _carry_out(self, stream: AsyncLMCacheStream, phases: Sequence[Phase]) -> StreamOutcome:
        return await carry_out(stream, phases, self._memory, self._plan.retries, self._began)

    def _write(
        self,
        row: PromptRow,
        ids: Sequence[int],
        outcome: StreamOutcome,
        baseline: StreamOutcome | None,
    ) -> None:
        model = self._text_model
        answer = row_of(
            row,
            ids,
            outcome,
            baseline,
            policy=self._policy,
            model=self._servers.model,
            text_model=model if isinstance(model, TextModel) else None,
        )
        self._output.append(encode_row(answer))
        # Here, because a row counts that was written for a caller who had been cancelled.
        if baseline is not None and not baseline.is_ok:
            outcome = replace(outcome, error=baseline.error)
        self.counts.done += outcome.is_ok
        self.counts.failed += not outcome.is_ok
        if outcome.error is not None and self.counts.first_failure is None:
            self.counts.first_failure = f"line {row.line}: {' '.join(str(outcome.error).split())}"
        self._tally.add(outcome)

    def _stopped(self, outage: StreamOutcome) -> BatchStoppedError:
        party = party_of(outage.error)
        rows = self._output.state.rows + self.counts.done + self.counts.failed
        stopped = BatchStoppedError(
            f"the job was stopped, because the {party} is down: {outage.error} (after "
            f"{self._plan.retries.max_attempts} attempts). {rows} rows are in {self._output.path}; when the "
            f"{party} is up again, the same command with --resume runs the others",
            party=party,
            outcomes=(),
            unfinished=(),
        )
        stopped.__cause__ = outage.error
        return stopped
