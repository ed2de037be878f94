"""LMCache's operations: are they there, does the server take a client, and how does KV travel."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
from urllib.parse import urlsplit

from .._background import to_the_end
from .._checks import is_loopback
from .._listener import Spoken, listener_at
from ..cache.messages import GET_CHUNK_SIZE, REGISTER, UNREGISTER, Registration
from ..cache.peer import OWN_MARK
from ..cache.requests import RequestClient
from ..cache.shared_memory import SharedPool
from ..errors import CacheConnectError, CacheError, CacheTimeoutError
from .chart import Chart, known
from .places import CACHE
from .results import Finding, failed, ok, warning
from .web import Answer, get, identify

__all__ = ["data_plane", "reachable", "registration", "same_server"]

_SHARED = "--shm-name lmcache --no-l1-use-lazy"
_UNREGISTER_SECONDS = 2.0


async def reachable(chart: Chart) -> Finding:
    """An LMCache server answers there."""
    url, deadline = chart.targets.cache_url, chart.deadlines.answer
    found = await listener_at(url, deadline=deadline)
    if found.spoken is Spoken.HTTP:
        root = f"http://{urlsplit(url).netloc}"
        return CACHE.mistaken(url, await identify(root, deadline=deadline))
    if found.spoken is not Spoken.ZEROMQ:
        return CACHE.vacant(url, found)
    chart.requests = requests = RequestClient(url, connect_timeout=deadline)
    chart.possessions.push_async_callback(requests.aclose)
    await requests.start()
    try:
        chart.chunk_size = await requests.call(GET_CHUNK_SIZE, deadline=deadline)
    except CacheTimeoutError:
        return failed(
            f"a ZeroMQ socket at {url} does not answer get_chunk_size within {deadline:g} s",
            f"is it LMCache's? {CACHE.option} is {CACHE.port}; else it hangs: see its log",
        )
    return ok(f"{url} answers, chunks of {chart.chunk_size} tokens")


async def registration(chart: Chart) -> Finding:
    """The server takes a client; the registration is taken back at once."""
    requests, deadline = known(chart.requests), chart.deadlines.answer
    instance_id = secrets.randbits(63)
    # A name of its own and a shape of no model: nothing is stored under it.
    body = Registration(
        instance_id=instance_id,
        model_name=f"doctor{OWN_MARK}{instance_id:x}",
        world_size=1,
        block_size=chart.chunk_size,
        num_layers=1,
        hidden_dim_size=64,
        dtype_str="float32",
        use_mla=False,
        num_physical_slots=chart.chunk_size,
    )
    try:
        chart.reply = await requests.call(REGISTER, body, deadline=deadline)
        chart.instance_id = instance_id
        await _look(chart)
    except CacheTimeoutError:
        mode = chart.config.get("supported_transfer_mode", "unknown")
        return failed(
            f"LMCache says nothing to a registration within {deadline:g} s; its transfer mode is {mode!r}",
            "start `lmcache server` with --supported-transfer-mode auto; if it is, see its log",
        )
    finally:
        # Also of a server that was silent: it may take the registration later.
        await to_the_end(_unregister(requests, instance_id))
    return ok("LMCache takes this client")


async def _look(chart: Chart) -> None:
    """Write down who is registered while the doctor is."""
    answer = await get(f"{chart.targets.http_url}/status", deadline=chart.deadlines.answer)
    listed = answer.object.get("registered_non_cuda_instance_ids") if isinstance(answer, Answer) else None
    chart.registered = listed if isinstance(listed, list) else None


async def _unregister(requests: RequestClient, instance_id: int) -> None:
    # The server forgets silent clients by itself.
    with contextlib.suppress(CacheError):
        await requests.call(UNREGISTER, instance_id, deadline=_UNREGISTER_SECONDS)


async def same_server(chart: Chart) -> Finding:
    """Both addresses are of one server."""
    both = f"{chart.targets.cache_url} and {chart.targets.http_url}"
    if chart.registered is None:
        return warning(f"the status does not tell whether {both} are one server", "see LMCache's version")
    if chart.instance_id not in chart.registered:
        return failed(
            f"{both} are different LMCache servers: a registration at one is not in the other's status",
            f"give {CACHE.option} and --http-url the --port and --http-port of one `lmcache server`",
        )
    return ok(f"{both} are one server")


async def data_plane(chart: Chart) -> Finding:
    """KV can travel between the server and this process, through shared memory or as pickles."""
    reply = known(chart.reply)
    if not reply.shm_name or reply.pool_size <= 0:
        return _pickles(chart)
    try:
        pool = await asyncio.to_thread(SharedPool, reply.shm_name, reply.pool_size)
    except CacheConnectError as error:
        return _no_pool(reply.shm_name, error)
    pool.close()
    return ok(f"shared memory, {reply.pool_size / 2**30:.1f} GiB in /dev/shm/{reply.shm_name}")


def _pickles(chart: Chart) -> Finding:
    host = urlsplit(chart.targets.cache_url).hostname or ""
    if not is_loopback(host):
        return ok(f"pickles through the socket, as it must be where {host} is another machine")
    name = chart.config.get("shm_name")
    if name:
        return warning(
            f"pickles through the socket: LMCache was given --shm-name {name} but offers no pool",
            "start it with --no-l1-use-lazy too, and with room in /dev/shm: shared memory is faster",
        )
    return warning(
        "pickles through the socket: LMCache was started without a pool name",
        f"start it with {_SHARED}: shared memory is faster on one machine",
    )


def _no_pool(name: str, error: CacheConnectError) -> Finding:
    number = getattr(error.__cause__, "errno", None)
    path = f"/dev/shm/{name.removeprefix('/')}"
    if number == errno.ENOENT:
        return failed(
            f"LMCache keeps its KV in {path}, which is not there on this machine",
            "run on LMCache's machine, a container with its /dev/shm, or start it without --shm-name",
        )
    if number in (errno.EACCES, errno.EPERM):
        return failed(
            f"LMCache keeps its KV in {path}, which this user may not open",
            "run as LMCache's user, or start it without --shm-name",
        )
    return failed(str(error), f"start LMCache anew, with {_SHARED}")
