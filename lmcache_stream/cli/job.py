"""A job from its settings to its exit code."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._background import to_the_end
from .._files import replace_file
from .._workers import Workers
from ..batch.limits import descriptor_limit
from ..dropping import HFQueries, Policy
from ..errors import InvalidRequestError
from ..jobs import Job, Output, Plan, Servers, Source
from ..jobs.records import described
from ..jobs.source import STDIN
from ..jobs.summary import as_json, as_lines
from ..progress import Bars
from .servers import Addresses, open_embedded, open_servers
from .streams import say

__all__ = ["SOME_FAILED", "Settings", "run_job"]

SOME_FAILED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What ``run`` was told; see its help. ``addresses`` is None for the embedded stack."""

    prompts: str
    output: Path
    policy: Policy | None
    sampling_params: Mapping[str, Any]
    addresses: Addresses | None
    resume: bool = False
    retry_failed: bool = False
    report: Path | None = None
    progress: bool = False
    queries_model: str | None = None
    baseline: bool = False
    max_concurrency: int = 64
    model: str | None = None
    tokenizer: str | None = None


async def run_job(settings: Settings) -> int:
    """Run a job and return its exit code.

    Raises:
        BatchStoppedError: the engine or the cache went down.
        LMCacheStreamError, OSError: it could not begin, or the output cannot be written.
    """
    _check_paths(settings)
    output = Output(settings.output, resume=settings.resume)
    files = Workers("lmcache-stream job output", 1)
    try:
        await files.run(output.open)
        opened = (
            open_embedded(settings.model, settings.tokenizer)
            if settings.addresses is None
            else open_servers(settings.addresses)
        )
        async with opened as (servers, path):
            return await _run(settings, servers, path, output, files)
    finally:
        # Behind what opens it, where that was left before it was through.
        await to_the_end(files.run(output.close))
        files.close()


def _check_paths(settings: Settings) -> None:
    # Now: when they are written would be late.
    for option, file in (("--output", settings.output), ("--report", settings.report)):
        if file is None:
            continue
        if str(file) == STDIN:
            raise InvalidRequestError(
                f"{option} -: it is written to a file, not to standard output: name one"
            )
        if not file.parent.is_dir():
            raise InvalidRequestError(f"{option} {file}: there is no folder {file.parent}")
        if file.is_dir():
            raise InvalidRequestError(f"{option} {file}: it is a folder")
    if settings.prompts != STDIN:
        # Before servers are started, which takes a while. Not opened: a pipe would be broken by that.
        try:
            Path(settings.prompts).stat()
        except OSError as error:
            raise InvalidRequestError(f"--prompts {settings.prompts}: {error.strerror}") from error
    given = {"--prompts": settings.prompts, "--report": settings.report, "--output": settings.output}
    places = {option: os.path.realpath(path) for option, path in given.items() if path not in (None, STDIN)}
    for (one, path), (other, another) in itertools.combinations(places.items(), 2):
        if path == another:
            raise InvalidRequestError(f"{one} and {other} are one file: {path}")


async def _run(settings: Settings, servers: Servers, path: str, output: Output, files: Workers) -> int:
    policy, state = settings.policy, output.state
    output.check(policy=described(policy), model=servers.model)
    if settings.retry_failed:
        await files.run(output.take_failed_out)
    queries = None
    if policy is not None and policy.needs_queries:
        queries = HFQueries(settings.queries_model or path, window=policy.query_window)
    limit = min(settings.max_concurrency, descriptor_limit())
    if limit < settings.max_concurrency:
        say(f"{limit} rows run at once, in half of the free file descriptors; `ulimit -n` allows more")
    plan = Plan(
        policy=policy,
        sampling_params=settings.sampling_params,
        queries=queries,
        baseline=settings.baseline,
        limit=limit,
    )
    job = Job(servers, plan, Source(settings.prompts, output.done_ids), output)
    try:
        with _telling(settings.progress, job) as (tell, moved):
            if state.cut:
                tell(f"{output.path}: a row of which {state.cut} bytes had been written was taken away")
            if state.retried:
                tell(f"{state.retried} rows that had failed are run again")
            await job.run(say=tell, moved=moved)
    finally:
        _conclude(settings, job)
    return SOME_FAILED if job.counts.failed or job.counts.bad else 0


def _conclude(settings: Settings, job: Job) -> None:
    report = job.report()
    if not job.has_begun:
        return
    if not job.is_through:
        say("the job was ended early; the same command with --resume goes on with it")
    for line in as_lines(job.counts, report):
        say(line)
    if settings.report is not None:
        try:
            replace_file(settings.report, as_json(job.counts, report).encode())
        except OSError as error:
            if job.is_through:
                raise
            # What ended the job is told, and must not be hidden by this.
            say(f"--report {settings.report}: {error.strerror}")


@contextmanager
def _telling(progress: bool, job: Job) -> Iterator[tuple[Callable[[str], object], Callable[[], object]]]:
    """Give what tells a line on stderr, and what moves the bar there, where there is one."""
    if not progress or importlib.util.find_spec("rich") is None:
        yield say, lambda: None
        return
    with Bars(stays=True) as bars:

        def move() -> None:
            through, size = job.position
            counts = {name: getattr(job.counts, name) for name in ("failed", "bad")}
            further = "".join(f", {count} {name}" for name, count in counts.items() if count)
            bars.show("rows", "rows", through, size, f"{job.counts.done} done{further}")

        move()
        yield bars.say, move
