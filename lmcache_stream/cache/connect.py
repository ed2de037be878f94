"""``connect``: from URLs and a model name to a context."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType
from typing import Any

from .._background import to_the_end
from .._checks import checked_url
from ..errors import (
    CacheConnectError,
    CacheTimeoutError,
    GeometryError,
    InvalidRequestError,
    LMCacheStreamError,
)
from ..rope import RopeConfig
from . import layouts
from .context import AsyncLMCacheContext
from .discovery import AUTO, Discovery, discover
from .geometry import KVGeometry
from .http import CacheHTTP
from .messages import GET_CHUNK_SIZE
from .model_config import ModelConfig, load_model_config
from .peer import Peer
from .requests import RequestClient
from .server_queries import QUERY_MARK, ServerQueries, discover_queries
from .timeouts import Timeouts

__all__ = ["connect"]


class connect:  # noqa: N801 - read as a function: `await connect(...)`, `async with connect(...)`
    """Connect to a running LMCache multiprocess server; await it, or use it with ``async with``.

    Args:
        url: the ``--port`` of ``lmcache server``, as ``tcp://HOST:PORT``.
        http_url: its ``--http-port``, as ``http://HOST:PORT``.
        model_name: the model as LMCache knows it: vLLM's model path, not its served name.
        geometry: the KV's shape, for models whose engine and configuration do not tell it.
        model_config: a Hugging Face configuration (object, dict, folder or config.json). Without it,
            ``config.json`` in a folder ``model_name``, else the local Hub cache.
        max_model_len: the engine's longest sequence, which longrope models need.
        queries: also open the cache in which an engine that is patched for it keeps its queries, for
            policies that need them. No stock vLLM does that.
        rope: the model's rotary embedding, for models whose configuration this library does not
            read; by default it is read from the configuration.
        layout: the chunks' layout, where it is not what status and configuration say (see ``KVGeometry``);
            ``auto`` for the one that the first retrieved prefix fits.
        check_layout: whether to hold the first retrieved keys of layer 0 against the layout and RoPE.
            Without that, an edit may be silently wrong.
        timeouts: deadlines in seconds.

    Raises:
        InvalidRequestError: a URL without scheme or host, no model name, or ``layout="auto"`` unchecked.
        GeometryError: an unknown model (the registered ones are named), an unknown layout, or a KV shape
            that is unknown, contradictory or not supported.
        CacheConnectError, CacheTimeoutError: nothing there, something else there, or silence.
    """

    def __init__(
        self,
        url: str,
        http_url: str,
        model_name: str,
        *,
        geometry: KVGeometry | None = None,
        model_config: Any = None,
        max_model_len: int | None = None,
        queries: bool = False,
        rope: RopeConfig | None = None,
        layout: str | None = None,
        check_layout: bool = True,
        timeouts: Timeouts = Timeouts(),  # noqa: B008 - frozen
    ) -> None:
        self._url = checked_url(url, ("tcp",), "url")
        self._http_url = checked_url(http_url, ("http", "https"), "http_url")
        if not isinstance(model_name, str) or not model_name:
            raise InvalidRequestError("model_name must name the model as LMCache knows it")
        self._model_name = model_name
        self._geometry = geometry
        self._model_config = model_config
        self._max_model_len = max_model_len
        self._queries = queries
        self._rope = rope
        if layout is not None and layout != AUTO:
            layouts.get(layout)
        if layout == AUTO and not check_layout:
            raise InvalidRequestError("layout='auto' is found by the layout check: check_layout must be on")
        self._layout = layout
        self._check_layout = check_layout
        self._timeouts = timeouts
        self._context: AsyncLMCacheContext | None = None

    def __await__(self) -> Generator[Any, None, AsyncLMCacheContext]:
        return self._open().__await__()

    async def __aenter__(self) -> AsyncLMCacheContext:
        self._context = await self._open()
        return self._context

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._context is not None:
            await self._context.aclose()

    async def _open(self) -> AsyncLMCacheContext:
        config = load_model_config(self._model_config, self._model_name)
        context = await self._open_one(config, self._model_name, None)
        if self._queries:
            try:
                found = discover_queries(self._model_name, context.geometry, config)
                opened = await self._open_one(config, self._model_name + QUERY_MARK, found)
                context.queries = ServerQueries(opened)
            except BaseException:
                await to_the_end(context.aclose())
                raise
        return context

    async def _open_one(
        self, config: ModelConfig | None, model_name: str, found: Discovery | None
    ) -> AsyncLMCacheContext:
        timeouts = self._timeouts
        requests = RequestClient(self._url, connect_timeout=timeouts.connect)
        http = CacheHTTP(self._http_url, deadline=timeouts.connect)
        peer: Peer | None = None
        try:
            await requests.start()
            if found is None:
                found = discover(await http.status(), model_name, config, self._geometry, self._layout)
                _check_heads(found.geometry, config, self._rope)
            chunk_size = await requests.call(GET_CHUNK_SIZE, deadline=timeouts.connect)
            layouts.get(found.geometry.layout).check(found.geometry, chunk_size)
            peer = Peer(
                requests,
                http,
                model_name=model_name,
                chunk_size=chunk_size,
                timeouts=timeouts,
                alone=found.alone,
            )
            await peer.background.start()
            await _register(peer, found.geometry)
        except BaseException as error:
            await to_the_end(_close(peer, requests, http))
            if isinstance(error, LMCacheStreamError):
                error.add_note(f"while connecting to {self._url} and {self._http_url}")
            raise
        return AsyncLMCacheContext(
            peer,
            found,
            config,
            max_model_len=self._max_model_len,
            rope=self._rope,
            check_layout=self._check_layout,
        )


def _check_heads(geometry: KVGeometry, config: ModelConfig | None, rope: RopeConfig | None) -> None:
    """Raise where the rotation is of other heads than the KV's: edits would turn pairs that are none."""
    if not layouts.get(geometry.layout).has_planes:
        return
    source = rope or config
    if source is not None and source.head_size != geometry.head_size:
        raise GeometryError(
            f"{'model_config=' if rope is None else 'rope='} has heads of {source.head_size} elements, but "
            f"the KV's heads have {geometry.head_size}"
        )


async def _register(peer: Peer, geometry: KVGeometry) -> None:
    try:
        await peer.register(geometry)
    except CacheTimeoutError as error:
        mode = (await peer.http.config()).get("supported_transfer_mode")
        raise CacheConnectError(
            f"LMCache at {peer.requests.url} does not take this client (it said nothing to its "
            f"registration; its transfer mode is {mode!r}): start it with "
            "`lmcache server --supported-transfer-mode auto`"
        ) from error
    registered = (await peer.http.status()).get("registered_non_cuda_instance_ids")
    if isinstance(registered, list) and peer.instance_id not in registered:
        raise CacheConnectError(
            f"{peer.requests.url} and {peer.http.url} belong to different LMCache servers: what was "
            "registered at one is not in the status of the other"
        )


async def _close(peer: Peer | None, requests: RequestClient, http: CacheHTTP) -> None:
    if peer is not None:
        await peer.aclose(grace=0)
    await requests.aclose()
    await http.aclose()
