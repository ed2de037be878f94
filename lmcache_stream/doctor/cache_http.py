"""LMCache's HTTP port: is it there, is it LMCache's, and how was the server started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .chart import Chart, known
from .places import CACHE_HTTP
from .results import Finding, failed, ok, warning
from .web import Answer, get, identify, is_status

__all__ = ["memory", "mode", "reachable", "status"]

# Those that take clients such as this one; without the option the server takes engines on GPUs alone.
_MODES = ("auto", "engine_driven")
# Above the watermark (0.8 by default) the server evicts; more than this means that it finds nothing to evict.
_FULL = 0.95


async def reachable(chart: Chart) -> Finding:
    """Something speaks HTTP there."""
    root, deadline = chart.targets.http_url, chart.deadlines.answer
    answer = await CACHE_HTTP.ask(root, "/status", deadline=deadline)
    if isinstance(answer, Finding):
        return answer
    chart.status_answer = answer
    return ok(f"{root} answers over HTTP")


async def status(chart: Chart) -> Finding:
    """What answers there is LMCache, and well."""
    root, deadline = chart.targets.http_url, chart.deadlines.answer
    answer = known(chart.status_answer)
    if not is_status(answer.object):
        if answer.status >= 500:
            return failed(f"GET {root}/status: {answer}", "LMCache is starting or has failed: see its log")
        return CACHE_HTTP.mistaken(root, await identify(root, deadline=deadline))
    chart.status = answer.object
    said = await get(f"{root}/lmc_version", deadline=deadline)
    version = said.json() if isinstance(said, Answer) and said.status == 200 else None
    name = f"LMCache {version}" if isinstance(version, str) else "LMCache, without a version"
    if not chart.status["is_healthy"]:
        return failed(f"{name} calls itself unhealthy", f"see {root}/status and LMCache's log")
    return ok(f"{name}, healthy")


async def mode(chart: Chart) -> Finding:
    """The server takes clients that move KV themselves."""
    root, deadline = chart.targets.http_url, chart.deadlines.answer
    answer = await get(f"{root}/config", deadline=deadline)
    if isinstance(answer, Answer) and answer.status == 404:
        # Of older servers.
        answer = await get(f"{root}/conf", deadline=deadline)
    section = answer.object.get("mp") if isinstance(answer, Answer) else None
    if not isinstance(section, dict):
        said = answer if isinstance(answer, Answer) else answer.reason
        return warning(f"{root}/config does not tell how LMCache was started: {said}", "see its log")
    chart.config = section
    found = section.get("supported_transfer_mode")
    if found not in _MODES:
        return failed(
            f"LMCache's transfer mode is {found!r}, in which it takes no clients such as this library",
            "start `lmcache server` with --supported-transfer-mode auto",
        )
    return ok(f"transfer mode {found!r}")


async def memory(chart: Chart) -> Finding:
    """There is room for KV."""
    l1 = _section(_section(chart.status, "storage_manager"), "l1_manager")
    used, total = l1.get("memory_used_bytes"), l1.get("memory_total_bytes")
    chunk = f"chunks of {chart.status.get('chunk_size', chart.config.get('chunk_size', '?'))} tokens"
    name = chart.config.get("shm_name")
    pool = f"shared memory {name!r}" if name else "no shared memory"
    if not isinstance(used, int) or not isinstance(total, int) or total <= 0:
        return warning(f"the status does not tell the size of L1; {chunk}, {pool}", "see LMCache's log")
    free = f"{_size(max(0, total - used))} of {_size(total)} free in L1"
    if used > _FULL * total:
        locked = f"{l1.get('read_locked_count', '?')} chunks read-locked, {l1.get('write_locked_count', '?')}"
        return warning(
            f"L1 is full: {free}, {locked} write-locked; {chunk}, {pool}",
            "give `lmcache server` a larger --l1-size-gb, or find who holds the locks",
        )
    return ok(f"{free}; {chunk}, {pool}")


def _section(found: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = found.get(name)
    return section if isinstance(section, Mapping) else {}


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
