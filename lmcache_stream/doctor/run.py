"""Making the checks, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack

import anyio

from .._background import to_the_end
from ..errors import LMCacheStreamError
from .chart import Chart, Deadlines, Targets
from .checks import CHECKS, Check
from .results import Finding, Result, Status, failed

__all__ = ["examine"]


async def examine(
    targets: Targets,
    *,
    deadlines: Deadlines = Deadlines(),  # noqa: B008 - frozen
    report: Callable[[Result], None] = lambda _: None,
) -> list[Result]:
    """Check an engine and its cache and return what was found, in the order of ``CHECKS``.

    Nothing is held when it returns or is cancelled: locks are given back, registrations taken back, sockets
    closed. The KV of a made-up prompt stays in the cache, under salts that nobody uses, until it is evicted.

    Args:
        targets: what to examine.
        deadlines: how long that may take.
        report: is called with each result as it comes.
    """
    chart = Chart(targets, deadlines, AsyncExitStack())
    results: dict[str, Result] = {}
    end = anyio.current_time() + deadlines.total
    try:
        for check in CHECKS:
            finding = _hindrance(check, results) or await _made(check, chart, end)
            result = Result(check.group, check.name, finding.status, finding.seen, finding.advice)
            results[check.path] = result
            report(result)
    finally:
        await to_the_end(chart.possessions.aclose())
    return list(results.values())


def _hindrance(check: Check, results: dict[str, Result]) -> Finding | None:
    """Return why the check cannot be made, naming the failure at the root of it."""
    for need in check.needs:
        result = results[need]
        if result.status is Status.FAILED:
            return Finding(Status.NOT_CHECKED, f"because of {result.group}: {result.name}")
        if not result.is_good:
            return Finding(Status.NOT_CHECKED, result.seen)
    return None


async def _made(check: Check, chart: Chart, end: float) -> Finding:
    left = end - anyio.current_time()
    limit = min(check.seconds(chart.deadlines), left)
    if left <= 0:
        return Finding(Status.NOT_CHECKED, f"the {chart.deadlines.total:g} s for all checks are over")
    try:
        with anyio.fail_after(limit):
            return await check.run(chart)
    except LMCacheStreamError as error:
        return failed(str(error), "see the logs of vLLM and LMCache")
    except TimeoutError:
        if limit == left:
            reason = f"not through when the {chart.deadlines.total:g} s for all checks were over"
            return failed(reason, "a server is slow: see its log, or give a longer --timeout")
        return failed(f"not through after {limit:.0f} s", "the server hangs: see its log")
