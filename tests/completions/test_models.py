"""What an engine says of its models, and what comes where it does not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

import lmcache_stream as lms
from lmcache_stream import ServedModel, find_model, sync

from .scripted import Connection, serving

CARDS = [{"id": "small", "root": "/models/small", "max_model_len": 512}, {"id": "bare"}]


def answering(body: Any, status: str = "200 OK", seen: list[Any] | None = None) -> Any:
    async def answer(connection: Connection) -> None:
        request = await connection.request()
        if request.line.startswith("GET / "):
            # Who is there, before anything is asked.
            await connection.reply("404 Not Found", b"")
            return
        if seen is not None:
            seen.append(request)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        await connection.reply(status, data)

    return answer


@pytest.mark.parametrize(
    ("name", "model"),
    [("small", ServedModel("small", "/models/small", 512)), ("bare", ServedModel("bare", "bare", None))],
)
async def test_a_model_is_found_by_its_name(name: str, model: ServedModel) -> None:
    seen: list[Any] = []
    async with serving(answering({"object": "list", "data": CARDS}, seen=seen)) as server:
        assert await find_model(f"{server.url}/v1", name, api_key="k") == model
    assert seen[0].line.startswith("GET /v1/models ")
    assert seen[0].headers["authorization"] == "Bearer k"


async def test_without_await_it_is_the_same() -> None:
    async with serving(answering({"data": CARDS})) as server:
        found = await asyncio.to_thread(sync.find_model, server.url, "small")
    assert found == ServedModel("small", "/models/small", 512)


async def test_the_names_that_are_served_are_told() -> None:
    async with serving(answering({"data": CARDS})) as server:
        with pytest.raises(lms.InvalidRequestError, match="no model 'large'; it serves: small, bare"):
            await find_model(server.url, "large")


@pytest.mark.parametrize(
    ("body", "status", "kind", "words"),
    [
        (b"<html>", "200 OK", lms.EngineStreamError, "GET http.*/v1/models: the answer is no list of models"),
        ({"data": 1}, "200 OK", lms.EngineStreamError, "the answer is no list of models"),
        (
            {"error": {"message": "who?"}},
            "401 Unauthorized",
            lms.EngineStatusError,
            "HTTP 401: who.*api_key=",
        ),
    ],
)
async def test_what_is_no_list_of_models_is_told(
    body: Any, status: str, kind: type[lms.EngineError], words: str
) -> None:
    async with serving(answering(body, status)) as server:
        with pytest.raises(kind, match=words):
            await find_model(server.url, "small")


async def test_an_engine_that_is_down_is_told() -> None:
    with pytest.raises(
        lms.EngineConnectError, match=r"GET http://127\.0\.0\.1:1/v1/models: .*start the engine"
    ):
        await find_model("http://127.0.0.1:1", "small")
