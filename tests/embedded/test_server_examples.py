"""The example servers: what clients are told, and what is counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest
from document_service import MAX_BODY, DocumentService, Limits, Problem
from document_service.prompt import DocumentPrompt
from serving import Servers

import lmcache_stream as lms
from lmcache_stream.embedded import EmbeddedCacheServer, EmbeddedEngine
from lmcache_stream.embedded.engine import CausalModel

from .answer_client import ask, asking, get, samples
from .served import CHUNK, MODULES, document, serving, until

both = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)

QUESTION = {"document": document(1), "question": "When?", "max_tokens": 8}
ENDLESS = {**QUESTION, "max_tokens": 2000}


@both
@pytest.mark.parametrize("policy", ["keydiff", "snapkv", "streaming-llm"])
async def test_an_answer_is_events_of_an_edit_tokens_and_their_sum(
    module: ModuleType, policy: str, model: CausalModel
) -> None:
    async with serving(module, model) as served:
        reply = await ask(served.url, {**QUESTION, "policy": policy, "ratio": 0.5})
        figures = await samples(served.url)
        await served.until_clean()
    assert reply.status == 200
    assert reply.response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert reply.events[-1][0] == "done"
    edit, done = reply.data("edit"), reply.data("done")
    assert done["text"] == reply.text
    assert done["output_tokens"] == 8
    assert done["finish_reason"] == "length"
    before, after = edit["tokens_before"], edit["tokens_after"]
    assert before == done["prompt_tokens"]
    assert before % CHUNK == 0
    assert after == round(before / 2 / CHUNK) * CHUNK
    assert done["cached_tokens"] == after
    assert edit["kept_share"] == pytest.approx(after / before, abs=1e-4)
    assert edit["bytes_after"] * before == edit["bytes_before"] * after
    assert 0 < done["ttft"] < done["duration"]
    # What Prometheus reads is the same.
    assert figures["document_requests_total{answered}"] == 1
    assert figures["document_tokens_total{kept}"] == after
    assert figures["document_tokens_total{dropped}"] == before - after
    assert figures["document_kv_bytes_total{before}"] == edit["bytes_before"]
    assert figures["document_kv_bytes_total{after}"] == edit["bytes_after"]
    assert figures[f"document_edit_seconds_count{{{policy}}}"] == 1
    assert figures[f"document_edit_seconds_sum{{{policy}}}"] == pytest.approx(edit["seconds"])
    assert figures["document_ttft_seconds_count"] == 1
    assert figures["document_ttft_seconds_sum"] == pytest.approx(done["ttft"])
    # Of the seven tokens of the second pass; those that arrived together have no gap between them.
    assert 1 <= figures["document_itl_seconds_count"] <= 6
    assert figures["document_itl_seconds_sum"] == pytest.approx(6 * done["tpot"])


@both
async def test_without_a_policy_or_for_one_token_nothing_is_edited(
    module: ModuleType, model: CausalModel
) -> None:
    async with serving(module, model) as served:
        whole = await ask(served.url, {**QUESTION, "policy": "none"})
        one = await ask(served.url, {**QUESTION, "max_tokens": 1})
        figures = await samples(served.url)
    for reply, count in ((whole, 8), (one, 1)):
        assert {name for name, _ in reply.events} <= {"token", "done"}
        assert reply.data("done")["output_tokens"] == count
    assert whole.text.startswith(one.text)
    assert figures["document_tokens_total{kept}"] == 0
    assert figures["document_requests_total{answered}"] == 2


BAD = [
    (b'{"document"', 400, "the body must be JSON"),
    (b"\xff\xfe", 400, "the body must be JSON"),
    (b"", 400, "the body must be JSON"),
    (b"[" * 10_000, 422, "Expected `object`"),
    (b'["a"]', 422, "Expected `object`"),
    ({"document": "a"}, 422, "missing required field `question`"),
    ({"document": " \n", "question": "b"}, 422, "`document` is empty"),
    ({**QUESTION, "question": ""}, 422, "`question` is empty"),
    ({**QUESTION, "document": 3}, 422, "$.document"),
    ({**QUESTION, "policy": "all"}, 422, "$.policy"),
    ({**QUESTION, "ratio": 1}, 422, "$.ratio"),
    ({**QUESTION, "ratio": 0}, 422, "$.ratio"),
    ({**QUESTION, "max_tokens": 0}, 422, "$.max_tokens"),
    ({**QUESTION, "max_token": 5}, 422, "`max_token`"),
    ({**QUESTION, "document": "a" * MAX_BODY}, 413, f"larger than {MAX_BODY} bytes"),
    # The engine's refusal: this is more than the model can read.
    ({**QUESTION, "document": "a" * 5000}, 400, "4096 tokens"),
]


@both
async def test_what_cannot_be_answered_is_refused_before_anything_streams(
    module: ModuleType, model: CausalModel
) -> None:
    async with serving(module, model) as served:
        for body, status, words in BAD:
            reply = await ask(served.url, body)
            assert (reply.status, reply.response.content_type) == (status, "application/json"), body
            assert reply.problem is not None
            assert words in reply.problem["message"]
            assert "\n" not in reply.problem["message"]
        assert (await get(f"{served.url}/nowhere"))[0] == 404
        assert (await get(f"{served.url}/v1/answers"))[0] == 405
        figures = await samples(served.url)
        await served.until_clean()
    assert figures["document_requests_total{refused}"] == len(BAD)
    assert figures["document_requests_total{failed}"] == 0


@both
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_is_not_what_its_headers_say_is_refused(
    module: ModuleType, encoding: str, model: CausalModel, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(module, model) as served:
        where = urlsplit(served.url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        head = f"POST /v1/answers HTTP/1.1\r\nHost: x\r\nContent-Encoding: {encoding}\r\n"
        writer.write(f"{head}Content-Length: 9\r\nConnection: close\r\n\r\n".encode() + b"\0\1garbage")
        async with asyncio.timeout(5):
            answer = await reader.read()
        writer.close()
        figures = await samples(served.url)
        await served.until_clean()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'{"error":{"type":"InvalidRequestError","message":"the body ' in answer
    assert figures["document_requests_total{refused}"] == 1
    assert [record for record in caplog.records if "handling request" in record.message] == []


@both
async def test_who_leaves_in_mid_question_is_no_error(
    module: ModuleType, model: CausalModel, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(module, model) as served:
        where = urlsplit(served.url)
        _, writer = await asyncio.open_connection(where.hostname, where.port)
        writer.write(b"POST /v1/answers HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nhalf of a")
        await asyncio.sleep(0.1)
        writer.close()
        await writer.wait_closed()
        await served.until_clean()
    assert [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")] == []


@both
async def test_beyond_the_queue_is_429_and_those_in_it_get_their_turn(
    module: ModuleType, endless: CausalModel
) -> None:
    limits = Limits(running=1, waiting=1, heartbeat=0.05)
    async with serving(module, endless, limits) as served:
        async with asking(served.url, ENDLESS) as first:
            assert await anext(first.read())
            second = asyncio.create_task(ask(served.url, QUESTION))

            async def waits() -> bool:
                return (await samples(served.url))["document_streams{waiting}"] == 1

            await until(waits)
            third = await ask(served.url, QUESTION)
            assert third.status == 429
            assert third.retry_after > 0
            assert third.problem is not None
            assert third.problem["type"] == "TooManyRequestsError"
            await asyncio.sleep(0.2)
            assert not second.done()
        answered = await second
        assert answered.comments > 0
        assert answered.data("done")["text"] == answered.text
        figures = await samples(served.url)
        await served.until_clean()
    outcomes = {name: figures[f"document_requests_total{{{name}}}"] for name in ("answered", "left", "busy")}
    assert outcomes == {"answered": 1, "left": 1, "busy": 1}


@both
async def test_an_engine_that_is_down_is_503_and_healthz_says_so(
    module: ModuleType, model: CausalModel
) -> None:
    nowhere = "http://127.0.0.1:1"
    async with lms.VLLMCompletions(nowhere, "m") as engine:

        def without_engine(servers: Servers) -> Servers:
            return replace(servers, engine=engine, engine_url=nowhere)

        async with serving(module, model, change=without_engine) as served:
            reply = await ask(served.url, QUESTION)
            status, text = await get(f"{served.url}/healthz")
            figures = await samples(served.url)
    assert (reply.status, reply.retry_after > 0) == (503, True)
    assert reply.problem is not None
    assert reply.problem["type"] == "EngineConnectError"
    assert figures["document_requests_total{failed}"] == 1
    assert status == 503
    (problem,) = json.loads(text)["problems"]
    assert problem.startswith(f"engine: GET {nowhere}/health: ")


@both
async def test_a_cache_that_is_down_is_an_error_and_healthz_says_so(
    module: ModuleType,
    model: CausalModel,
    cache: EmbeddedCacheServer,
    engine: EmbeddedEngine,
    completions: lms.VLLMCompletions,
) -> None:
    async with (
        lms.connect(
            cache.url,
            cache.http_url,
            model.name,
            geometry=model.geometry,
            model_config=model.config,
            timeouts=lms.Timeouts(connect=1, lookup=1, retrieve=1, store=1),
        ) as context,
        DocumentService(Servers(context, completions, engine.url, model.tokenizer, model.name)) as service,
        module.listening(service, "127.0.0.1", 0) as url,
    ):
        status, text = await get(f"{url}/healthz")
        assert (status, json.loads(text)) == (200, {"status": "ok", "problems": []})
        await cache.aclose()
        status, text = await get(f"{url}/healthz")
        assert status == 503
        (problem,) = json.loads(text)["problems"]
        assert problem.startswith("cache: ")
        reply = await ask(url, QUESTION)
        told = reply.problem or reply.data("error")
        assert told["type"] in ("CacheConnectError", "CacheTimeoutError")
        assert (await samples(url))["document_requests_total{failed}"] == 1


@both
async def test_an_error_in_mid_answer_is_an_event(module: ModuleType, model: CausalModel) -> None:
    async def breaking(
        prompt: Sequence[int], params: Mapping[str, Any], salt: str
    ) -> AsyncIterator[lms.TokenEvent]:
        yield lms.TokenEvent(65, "A")
        yield lms.TokenEvent(66, "B")
        raise lms.TruncatedStreamError("the connection\nbroke", token_ids=[65, 66])

    async with serving(module, model, change=lambda servers: replace(servers, engine=breaking)) as served:
        reply = await ask(served.url, {**QUESTION, "policy": "none"})
        figures = await samples(served.url)
        await served.until_clean()
    assert reply.status == 200
    assert reply.text == "AB"
    assert reply.data("error") == {"type": "TruncatedStreamError", "message": "the connection broke"}
    assert reply.events[-1][0] == "error"
    assert figures["document_requests_total{failed}"] == 1


@both
async def test_what_runs_at_the_end_is_answered_within_the_grace_and_no_other(
    module: ModuleType, model: CausalModel
) -> None:
    async with serving(module, model) as served, asking(served.url, {**QUESTION, "max_tokens": 64}) as reply:
        events = reply.read()
        assert await anext(events)
        drained = asyncio.create_task(served.service.drain(30))
        await asyncio.sleep(0)
        late = await ask(served.url, QUESTION)
        status, text = await get(f"{served.url}/healthz")
        async for _ in events:
            pass
        await drained
    assert (late.status, late.retry_after > 0) == (503, True)
    assert status == 503
    assert "being stopped" in text
    assert reply.data("done")["output_tokens"] == 64


@both
async def test_what_runs_longer_is_ended_with_an_error(module: ModuleType, endless: CausalModel) -> None:
    async with serving(module, endless) as served, asking(served.url, ENDLESS) as reply:
        events = reply.read()
        assert await anext(events)
        await served.service.drain(0.05)
        async for _ in events:
            pass
        figures = await samples(served.url)
    assert reply.events[-1] == ("error", Problem.stopping().data)
    assert figures["document_requests_total{stopped}"] == 1


async def test_a_client_that_reads_nothing_is_left_after_a_while(endless: CausalModel) -> None:
    limits = Limits(stall=0.2)
    async with serving(MODULES[0], endless, limits) as served:
        with pytest.raises(ConnectionResetError):
            async with served.service.answer(json.dumps(ENDLESS).encode()) as answer:
                await answer.begin()
                await asyncio.sleep(60)
        figures = await samples(served.url)
        await served.until_clean()
    assert figures["document_requests_total{left}"] == 1


def test_what_a_client_writes_is_text_and_the_prompt_whole_chunks(model: CausalModel) -> None:
    prompt = DocumentPrompt(model.tokenizer, CHUNK)
    special = set(model.tokenizer.all_special_ids)
    assert model.tokenizer("<eos>")["input_ids"][0] in special
    for length in (1, 40, 71, 72):
        ids = prompt("<eos>" + "x" * length, "who is <a>?")
        assert len(ids) % CHUNK == 0
        assert special.isdisjoint(ids)
        assert model.tokenizer.decode(ids).replace("\n", "") == (
            "<eos>" + "x" * length + "Question: who is <a>?Answer:"
        )
