"""The engine's HTTP face: vLLM's paths over one ``EngineCore``."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

from aiohttp import web

from .chunks import DONE, AnswerWriter, event, failure
from .core import EngineCore
from .params import CompletionParams, CompletionRequest
from .problems import BadRequestError, RequestError, error_object

__all__ = ["application"]

logger = logging.getLogger(__name__)

_LARGEST_BODY = 64 << 20


def application(core: EngineCore) -> web.Application:
    """Return the web application of an engine; its runner must cancel handlers whose client has left."""
    app = web.Application(client_max_size=_LARGEST_BODY, middlewares=[_errors_as_vllm])
    handlers = _Handlers(core)
    app.router.add_get("/health", handlers.health)
    app.router.add_get("/ping", handlers.health)
    app.router.add_get("/metrics", handlers.metrics)
    app.router.add_get("/v1/models", handlers.models)
    app.router.add_post("/v1/completions", handlers.completions)
    app.router.add_post("/tokenize", handlers.tokenize)
    app.router.add_post("/detokenize", handlers.detokenize)
    return app


@web.middleware
async def _errors_as_vllm(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except RequestError as error:
        status, body = failure(error)
    except web.RequestPayloadError as error:
        status, body = failure(BadRequestError(f"The body cannot be read: {error}"))
    except web.HTTPException as error:
        status, body = error.status, error_object(error.reason, error.reason, error.status)
    except Exception as error:
        logger.exception("%s %s failed", request.method, request.path)
        status, body = failure(error)
    return web.json_response(body, status=status)


class _Handlers:
    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._created = int(time.time())

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def models(self, _: web.Request) -> web.Response:
        core = self._core
        card = {
            "id": core.served_name,
            "object": "model",
            "created": self._created,
            "owned_by": "lmcache-stream",
            "root": core.model.name,
            "parent": None,
            "max_model_len": core.model.max_model_len,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def metrics(self, _: web.Request) -> web.Response:
        core = self._core
        label = f'{{model_name="{core.served_name}"}}'
        lines = []
        for name, value in (("running", core.running), ("waiting", core.waiting)):
            lines += [
                f"# TYPE vllm:num_requests_{name} gauge",
                f"vllm:num_requests_{name}{label} {value:.1f}",
            ]
        return web.Response(text="\n".join(lines) + "\n")

    async def tokenize(self, http: web.Request) -> web.Response:
        ids = await self._core.tokenize(await http.read())
        limit = self._core.model.max_model_len
        return web.json_response({"count": len(ids), "max_model_len": limit, "tokens": ids})

    async def detokenize(self, http: web.Request) -> web.Response:
        return web.json_response({"prompt": await self._core.detokenize(await http.read())})

    async def completions(self, http: web.Request) -> web.StreamResponse:
        request, params = await self._core.read(await http.read())
        if request.stream:
            return await self._stream(http, request, params)
        if params.unknown_token is not None:
            raise BadRequestError(_unknown(params), "prompt")
        writer = AnswerWriter(request, params, self._core.served_name)
        async with self._core.answering(params) as answer, contextlib.aclosing(answer.tokens()) as tokens:
            decoded = [one async for one in tokens]
        return web.json_response(writer.whole(answer, decoded))

    async def _stream(
        self, http: web.Request, request: CompletionRequest, params: CompletionParams
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        response.headers["Cache-Control"] = "no-cache"
        await response.prepare(http)
        # From here on the status is sent: what goes wrong is an event.
        # A client that has left needs no answer.
        with contextlib.suppress(ConnectionError):
            try:
                await self._events(response, request, params)
            except ConnectionError:
                raise
            except Exception as error:
                if not isinstance(error, RequestError):
                    logger.exception("a streamed completion failed")
                await response.write(event(failure(error)[1]))
            await response.write(DONE)
        return response

    async def _events(
        self, response: web.StreamResponse, request: CompletionRequest, params: CompletionParams
    ) -> None:
        if params.unknown_token is not None:
            # As vLLM, whose engine finds this out when the answer has begun.
            raise BadRequestError(_unknown(params), "prompt")
        writer = AnswerWriter(request, params, self._core.served_name)
        count = 0
        async with self._core.answering(params) as answer, contextlib.aclosing(answer.tokens()) as tokens:
            async for one in tokens:
                count += 1
                await response.write(writer.delta(one))
        if request.stream_options is not None and request.stream_options.include_usage:
            await response.write(writer.usage(answer, count))


def _unknown(params: CompletionParams) -> str:
    return f"Token id {params.unknown_token} is out of vocabulary"
