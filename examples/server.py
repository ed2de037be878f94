"""Answers about long documents as server-sent events, from KV that tokens were dropped from; with aiohttp.

    python examples/server.py --port 8900

`POST /v1/answers` takes JSON: `document` and `question`, and optionally `policy` (snapkv, keydiff,
streaming-llm or none), `ratio` (the share to drop) and `max_tokens`. The answer is a stream of the events
`token`, `edit`, `done` and `error`. A client that leaves ends the work on its answer, wherever that is.
`/healthz` says whether engine and cache can be reached, `/metrics` is for Prometheus.

Everything runs in this process, with a small model; `--engine-url` and its like name real servers
instead (see the README). Needs `pip install 'lmcache-stream[embedded,examples]'`. The policy snapkv loads
the model a second time, in this process, at its first use.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from document_service import MAX_BODY, METRICS_TYPE, SSE_HEADERS, DocumentService, Problem
from document_service.command import command

__all__ = ["application", "listening"]

_SERVICE = web.AppKey("service", DocumentService)
# Of the server, after the service has ended its answers.
_SHUTDOWN_SECONDS = 2.0


def application(service: DocumentService) -> web.Application:
    """Return the routes over a service; its runner must cancel handlers whose client has left."""
    app = web.Application(client_max_size=MAX_BODY, middlewares=[_problems])
    app[_SERVICE] = service
    app.router.add_post("/v1/answers", _answers)
    app.router.add_get("/healthz", _healthz)
    app.router.add_get("/metrics", _metrics)
    return app


@asynccontextmanager
async def listening(service: DocumentService, host: str, port: int) -> AsyncIterator[str]:
    """Serve while the block runs; gives the URL."""
    # By default a handler would not learn that its client has left before it writes the next time.
    runner = web.AppRunner(
        application(service),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=_SHUTDOWN_SECONDS,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        found = runner.addresses[0]
        yield f"http://{f'[{found[0]}]' if ':' in found[0] else found[0]}:{found[1]}"
    finally:
        await runner.cleanup()


@web.middleware
async def _problems(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except Problem as found:
        problem = found
    except web.HTTPException as error:
        # Of a path or a method that there is not.
        problem = Problem.refused(error.status, error.reason)
    return web.Response(
        body=problem.body,
        status=problem.status,
        headers=problem.headers,
        content_type="application/json",
    )


async def _answers(request: web.Request) -> web.StreamResponse:
    service = request.app[_SERVICE]
    try:
        body = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise service.refused(Problem.too_large()) from None
    except web.RequestPayloadError:
        raise service.refused(Problem.refused(400, "the body is not what its headers say")) from None
    response = web.StreamResponse(headers=SSE_HEADERS)
    try:
        async with service.answer(body) as answer:
            await answer.begin()
            await response.prepare(request)
            async for frame in answer:
                await response.write(frame)
    except ConnectionError:
        # The client has left, or does not read: what it was to get is of no use to anybody.
        if request.transport is not None:
            request.transport.abort()
    return response


async def _healthz(request: web.Request) -> web.Response:
    problems = await request.app[_SERVICE].health()
    status = {"status": "unavailable" if problems else "ok", "problems": problems}
    return web.json_response(status, status=503 if problems else 200)


async def _metrics(request: web.Request) -> web.Response:
    body = request.app[_SERVICE].metrics.exposition()
    return web.Response(body=body, headers={"Content-Type": METRICS_TYPE})


if __name__ == "__main__":
    command(__doc__, listening)
