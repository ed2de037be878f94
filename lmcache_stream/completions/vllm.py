"""The client for vLLM's ``/v1/completions``."""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import aiohttp
import msgspec

from .._background import Background
from .._checks import checked_salt, checked_token_ids
from ..errors import ClosedError, EngineTimeoutError, InvalidRequestError
from .choices import ChoiceDecoder
from .detokenizer import Detokenizer
from .endpoint import Endpoint
from .events import FinishEvent, TokenEvent
from .exchange import Exchange, Request, new_session
from .foreign import FOREIGN
from .params import checked_sampling_params, request_body, request_headers, stop_strings
from .repetition import RepeatedPrompt
from .timeouts import CompletionTimeouts
from .watch import Watch

__all__ = ["VLLMCompletions"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Engine:
    """What an open client has."""

    loop: asyncio.AbstractEventLoop
    session: aiohttp.ClientSession
    background: Background
    request: Request
    detokenize: Detokenizer


class VLLMCompletions:
    """Posts passes to a vLLM server and yields their tokens as they come: a ``PostCompletion``.

    ``async with`` opens and closes it; else the first pass opens it, and ``aclose`` must be awaited.
    It belongs to the event loop that it was opened on. Any number of passes may run at once.

    A caller that leaves a pass, by a cancellation or by closing its generator, leaves at once. Where
    the engine has not begun to answer, the connection is held in the background until it has, and
    closed then: closing it earlier can end the engine for everybody (LMCache#4938).

    Args:
        base_url: the server's address, with or without ``/v1``.
        model: the name under which the model is served.
        api_key: sent as ``Authorization: Bearer``.
        headers: further headers of every request.
        timeouts: a deadline for each phase of a pass.

    Raises:
        InvalidRequestError: an argument cannot be right.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeouts: CompletionTimeouts | None = None,
    ) -> None:
        if not isinstance(model, str) or not model:
            raise InvalidRequestError(f"model={model!r} is not the name of a served model")
        self._endpoint = Endpoint.of(base_url)
        self._model = model
        self._headers = request_headers(api_key, headers)
        if not isinstance(timeouts, CompletionTimeouts | None):
            raise InvalidRequestError(f"timeouts={timeouts!r} is no CompletionTimeouts")
        self._timeouts = timeouts or CompletionTimeouts()
        self._lock = asyncio.Lock()
        self._engine: _Engine | None = None
        self._exchanges: set[Exchange] = set()
        self._closed = False

    @property
    def base_url(self) -> str:
        """The server's address, without ``/v1``."""
        return self._endpoint.root

    def __repr__(self) -> str:
        return f"<VLLMCompletions {self._endpoint.root} model={self._model!r}>"

    def __call__(
        self,
        prompt_token_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        cache_salt: str = "",
        /,
    ) -> AsyncGenerator[TokenEvent | FinishEvent, None]:
        """Return one pass, which is sent when it is first iterated.

        Raises:
            InvalidRequestError: the engine could not take it, or would take it as something else.
        """
        prompt = checked_token_ids(prompt_token_ids)
        if not prompt:
            raise InvalidRequestError("prompt_token_ids is empty: a pass needs a token to go on from")
        params = checked_sampling_params(sampling_params)
        body = request_body(self._model, prompt, params, checked_salt(cache_salt))
        return self._pass(body, prompt, stop_strings(params))

    async def _pass(
        self, body: bytes, prompt: Sequence[int], stop: Sequence[str]
    ) -> AsyncGenerator[TokenEvent | FinishEvent, None]:
        engine = await self._open()
        exchange = Exchange(engine.session, engine.request.with_body(body))
        repeated = RepeatedPrompt(prompt, stop, engine.detokenize)
        choices = ChoiceDecoder(f"POST {self._endpoint.completions}")
        watch = Watch(exchange.close)
        clock = engine.loop.time
        started = clock()
        failure: BaseException | None = None
        self._exchanges.add(exchange)
        try:
            await self._answered(engine, exchange)
            watch.restart(self._until_first_token(clock() - started))
            begun = False
            read, decode = exchange.reader(), exchange.sse.feed
            events, arrived = exchange.events, exchange.arrived
            while True:
                for event in events:
                    for token in choices.feed(event.data, arrived):
                        if repeated.watching and token.text:
                            text = await repeated.mend(token.text, choices)
                            yield TokenEvent(token.token_id, text, token.arrived)
                        else:
                            yield token
                if failure is not None or choices.ended:
                    break
                if not begun and choices.token_ids:
                    begun = True
                    watch.restart(self._timeouts.idle)
                if watch.since is None:
                    watch.since = clock()
                try:
                    chunk = await read()
                except FOREIGN as error:
                    failure = error
                    chunk = exchange.rest()
                arrived = time.perf_counter()
                if not chunk and failure is None:
                    break
                events = decode(chunk)
                if events:
                    watch.since = None
            # With the finish reason the answer is complete, whatever became of the connection.
            if failure is not None and choices.finish_reason is None:
                raise self._broken(exchange, watch, choices, failure) from failure
            if failure is None:
                await exchange.finish()
            end = choices.finish()
            if repeated.watching and (end.text or isinstance(choices.stop_reason, str)):
                end = msgspec.structs.replace(end, text=await repeated.mend(end.text, choices))
            yield end
        finally:
            watch.stop()
            exchange.leave()
            self._exchanges.discard(exchange)

    async def _answered(self, engine: _Engine, exchange: Exchange) -> None:
        limit = self._timeouts.first_token
        outcome = engine.background.spawn(exchange.open())
        done, _ = await asyncio.wait({outcome}, timeout=limit)
        if self._closed:
            raise ClosedError(f"{self!r} was closed before the engine answered")
        if not done:
            raise self._no_token()
        outcome.result()

    def _until_first_token(self, passed: float) -> float | None:
        limit = self._timeouts.first_token
        return self._timeouts.idle if limit is None else max(0.0, limit - passed)

    def _broken(
        self, exchange: Exchange, watch: Watch, choices: ChoiceDecoder, failure: BaseException
    ) -> Exception:
        ids = choices.token_ids
        if self._closed:
            return ClosedError(f"{self!r} was closed in the middle of a pass, after {len(ids)} tokens")
        if not watch.expired:
            return exchange.error(failure, ids)
        if not ids and self._timeouts.first_token is not None:
            return self._no_token()
        return EngineTimeoutError(
            f"POST {self._endpoint.completions}: no event for {self._timeouts.idle} s after "
            f"{len(ids)} tokens: the engine hangs or is overloaded; timeouts= sets the deadline",
            token_ids=ids,
        )

    def _no_token(self) -> EngineTimeoutError:
        return EngineTimeoutError(
            f"POST {self._endpoint.completions}: no token within {self._timeouts.first_token} s: the "
            "engine is overloaded or hangs; timeouts= sets the deadline"
        )

    async def _open(self) -> _Engine:
        loop = asyncio.get_running_loop()
        async with self._lock:
            if self._closed:
                raise ClosedError(f"{self!r} is closed")
            if self._engine is None:
                self._engine = await self._connect(loop)
            if self._engine.loop is not loop:
                raise ClosedError(f"{self!r} was opened on another event loop")
            return self._engine

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> _Engine:
        endpoint = self._endpoint
        request = Request(endpoint.completions, self._headers, self._timeouts.connect, endpoint.proxy())
        background = Background(f"lmcache-stream engine {endpoint.root}")
        try:
            await background.start()
        except asyncio.CancelledError:
            await background.aclose()
            raise
        session = new_session()
        detokenize = Detokenizer(session, replace(request, url=endpoint.detokenize), self._model)
        return _Engine(loop, session, background, request, detokenize)

    async def aclose(self) -> None:
        """Close every connection; those of engines that have not begun to answer once they have.

        Waits at most ``timeouts.drain`` seconds for that. Passes under way raise ``ClosedError``.
        """
        if self._closed:
            return
        self._closed = True
        engine = self._engine
        if engine is None:
            return
        for exchange in self._exchanges:
            exchange.leave()
        try:
            left = await engine.background.aclose(grace=self._timeouts.drain)
            if left:
                # Not a ResourceWarning, which nobody sees: this may have ended the engine.
                logger.warning(
                    "%s: closed %d connections before the engine began to answer, which can end it "
                    "(LMCache#4938); it did not within %s s",
                    self._endpoint.root,
                    left,
                    self._timeouts.drain,
                )
        except asyncio.CancelledError:
            await engine.background.aclose()
            raise
        finally:
            await engine.session.close()

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if getattr(self, "_engine", None) is not None and not self._closed:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=2, source=self)
