"""Answers about long documents as server-sent events, from KV that tokens were dropped from; with FastAPI.

    python examples/fastapi_server.py --port 8900

The same service as `server.py`, and its schema at `/docs`. `POST /v1/answers` takes JSON: `document` and
`question`, and optionally `policy` (snapkv, keydiff, streaming-llm or none), `ratio` (the share to drop) and
`max_tokens`. The answer is a stream of the events `token`, `edit`, `done` and `error`. A client that leaves
ends the work on its answer, wherever that is. `/healthz` says whether engine and cache can be reached,
`/metrics` is for Prometheus.

Everything runs in this process, with a small model; `--engine-url` and its like name real servers
instead (see the README). Needs `pip install 'lmcache-stream[embedded,examples]'`. The policy snapkv loads
the model a second time, in this process, at its first use.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import FrameType
from typing import Any

import anyio
import uvicorn
from document_service import MAX_BODY, METRICS_TYPE, SSE_HEADERS, AnswerRequest, DocumentService, Problem
from document_service.command import command
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

__all__ = ["application", "listening"]

# Of the server, after the service has ended its answers.
_SHUTDOWN_SECONDS = 2

_BODY = {
    "requestBody": {"required": True, "content": {"application/json": {"schema": AnswerRequest.schema()}}}
}
_STREAM: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}


def application(service: DocumentService) -> FastAPI:
    """Return the routes over a service."""
    app = FastAPI(title="Answers about long documents")

    @app.post("/v1/answers", response_class=Response, responses=_STREAM, openapi_extra=_BODY)
    async def answers(request: Request) -> Response:
        return _AnswerResponse(service, await _body_of(request, service))

    @app.get("/healthz")
    async def healthz() -> JSONResponse:
        problems = await service.health()
        status = {"status": "unavailable" if problems else "ok", "problems": problems}
        return JSONResponse(status, 503 if problems else 200)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.exposition(), media_type=METRICS_TYPE)

    @app.exception_handler(Problem)
    async def problem(_: Request, error: Problem) -> Response:
        return _response_of(error)

    @app.exception_handler(HTTPException)
    async def http_problem(_: Request, error: HTTPException) -> Response:
        # Of a path or a method that there is not.
        return _response_of(Problem.refused(error.status_code, error.detail))

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        # It left while it sent its question: nobody reads this.
        return Response(status_code=400)

    return app


@asynccontextmanager
async def listening(service: DocumentService, host: str, port: int) -> AsyncIterator[str]:
    """Serve while the block runs; gives the URL."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=1024) as listener:
        config = uvicorn.Config(
            application(service),
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
        server = _Server(config)
        raised: Exception | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(server.serve, [listener])
            try:
                yield f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
            except Exception as error:
                # Kept, because a task group would wrap it.
                raised = error
            finally:
                server.should_exit = True
        if raised is not None:
            raise raised


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Leave signals to the command, which lets answers end before the server does."""


class _AnswerResponse(Response):
    """Answers while its client is there: Starlette's own streams watch for that too, but only once they
    have begun, which is after the first event."""

    def __init__(self, service: DocumentService, body: bytes) -> None:
        super().__init__()
        self._service = service
        self._request_body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as group:

            async def leave_with_the_client() -> None:
                while (await receive())["type"] != "http.disconnect":
                    pass
                group.cancel_scope.cancel()

            group.start_soon(leave_with_the_client)
            try:
                async with self._service.answer(self._request_body) as answer:
                    await answer.begin()
                    await StreamingResponse(answer, headers=SSE_HEADERS).stream_response(send)
            except Problem as problem:
                await _response_of(problem)(scope, receive, send)
            except ConnectionError:
                # The client does not read: what it was to get is of no use to anybody.
                pass
            group.cancel_scope.cancel()


async def _body_of(request: Request, service: DocumentService) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY:
            raise service.refused(Problem.too_large())
    return bytes(body)


def _response_of(problem: Problem) -> Response:
    return Response(problem.body, problem.status, problem.headers, "application/json")


if __name__ == "__main__":
    command(__doc__, listening)
