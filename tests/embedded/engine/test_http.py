"""The engine over HTTP: vLLM's objects, status codes and refusals."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

import lmcache_stream as lms
from lmcache_stream.embedded import EmbeddedCacheServer, EmbeddedEngine
from lmcache_stream.embedded.engine import CausalModel

from ...tiny_model import VOCAB_SIZE, write_tiny_llama

GREEDY = {"model": "tiny", "prompt": [1, 2, 3], "temperature": 0, "ignore_eos": True}


@pytest.fixture
async def session(engine: EmbeddedEngine) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(engine.url) as opened:
        yield opened


async def post(session: aiohttp.ClientSession, body: Any, path: str = "/v1/completions") -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    async with session.post(path, data=data, headers=headers) as response:
        return response.status, json.loads(await response.read())


async def test_the_models(session: aiohttp.ClientSession, model: CausalModel) -> None:
    async with session.get("/v1/models") as response:
        (card,) = (await response.json())["data"]
    assert (card["id"], card["root"], card["max_model_len"]) == ("tiny", model.name, 4096)


async def test_an_answer_that_is_not_streamed(session: aiohttp.ClientSession) -> None:
    status, answer = await post(session, {**GREEDY, "max_tokens": 5, "return_token_ids": True})
    assert status == 200
    (choice,) = answer["choices"]
    assert choice["prompt_token_ids"] == [1, 2, 3]
    assert len(choice["token_ids"]) == 5
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 5
    _, plain = await post(session, {**GREEDY, "max_tokens": 5})
    assert "token_ids" not in plain["choices"][0]
    assert plain["choices"][0]["text"] == choice["text"]


async def test_the_events_of_a_stream(session: aiohttp.ClientSession) -> None:
    body = {**GREEDY, "max_tokens": 3, "stream": True, "return_token_ids": True}
    async with session.post("/v1/completions", json=body) as response:
        assert response.content_type == "text/event-stream"
        lines = [line for line in (await response.read()).decode().split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [len(choice["token_ids"]) for choice in choices] == [1, 1, 1]
    assert [choice.get("prompt_token_ids") for choice in choices] == [[1, 2, 3], None, None]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]


async def test_a_prompt_of_text_and_the_tokenizer_over_http(session: aiohttp.ClientSession) -> None:
    text = "héllo"
    status, answer = await post(session, {"prompt": text, "model": "tiny"}, "/tokenize")
    assert (status, answer["tokens"]) == (200, list(text.encode()))
    status, answer = await post(session, {"tokens": list(text.encode())}, "/detokenize")
    assert (status, answer) == (200, {"prompt": text})
    by_text = await post(session, {**GREEDY, "prompt": text})
    by_ids = await post(session, {**GREEDY, "prompt": list(text.encode())})
    assert by_text[1]["choices"][0]["text"] == by_ids[1]["choices"][0]["text"]


# What is sent, and a word of the answer.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": ["a", "b"]}, "one prompt"),
    ({"prompt": [[1], [2]]}, "one prompt"),
    ({"prompt": "a" * 200_000}, "maximum context length"),
    ({"prompt": [1, "b"]}, "one prompt"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [10**30]}, "out of vocabulary"),
    ({"prompt": [1] * 4096}, "maximum context length"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 5000}, "maximum context length"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"n": 2}, "n=2"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e999}, "JSON"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "a/b"}, "/"),
    ({"cache_salt": "x" * 129}, "128"),
    ({"logprobs": 3}, "logprobs"),
    ({"echo": True}, "echo"),
    ({"stream_options": {"include_usage": True}}, "stream"),
    ({"prompt": [VOCAB_SIZE]}, "out of vocabulary"),
]


@pytest.mark.parametrize(("change", "word"), REFUSED, ids=[str(one[0])[:40] for one in REFUSED])
async def test_bad_input_is_a_400_with_vllm_s_error_object(
    session: aiohttp.ClientSession, engine: EmbeddedEngine, change: dict[str, Any], word: str
) -> None:
    status, answer = await post(session, {**GREEDY, **change})
    assert status == 400
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["code"] == 400
    assert word in answer["error"]["message"]
    assert (engine.core.running, engine.core.waiting) == (0, 0)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'"text"'])
async def test_a_body_that_is_no_request(session: aiohttp.ClientSession, body: bytes) -> None:
    for path in ("/v1/completions", "/tokenize", "/detokenize"):
        status, answer = await post(session, body, path)
        assert (status, answer["error"]["code"]) == (400, 400)


async def test_an_unknown_model_and_an_unknown_path(session: aiohttp.ClientSession) -> None:
    for path, field in (("/v1/completions", "prompt"), ("/tokenize", "prompt"), ("/detokenize", "tokens")):
        status, answer = await post(session, {field: "a" if field == "prompt" else [1], "model": "no"}, path)
        assert (status, answer["error"]["type"]) == (404, "NotFoundError")
        assert "`no`" in answer["error"]["message"]
    status, answer = await post(session, {}, "/v1/nothing")
    assert (status, answer["error"]["code"]) == (404, 404)


async def test_an_id_beyond_the_vocabulary_is_an_error_within_the_stream(
    completions: lms.VLLMCompletions,
) -> None:
    with pytest.raises(lms.EngineStreamError, match="out of vocabulary"):
        async for _ in completions([1, VOCAB_SIZE], {}, ""):
            pass


async def test_the_counts_of_requests(session: aiohttp.ClientSession) -> None:
    async def running() -> float:
        async with session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_r"))

    assert await running() == 0
    body = {**GREEDY, "max_tokens": 4000, "stream": True}
    async with session.post("/v1/completions", json=body) as response:
        await response.content.readline()
        assert await running() == 1
        response.close()
    while await running():
        await asyncio.sleep(0.01)


async def test_what_fails_within_is_an_internal_error(
    session: aiohttp.ClientSession, engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(engine.core.model, "forward", broken)
    status, answer = await post(session, GREEDY)
    assert status == 500
    assert "secret" not in json.dumps(answer)
    async with lms.VLLMCompletions(engine.url, "tiny") as completions:
        with pytest.raises(lms.EngineStreamError, match="Internal server error"):
            async for _ in completions([1, 2], {}, ""):
                pass
    assert (engine.core.running, engine.core.waiting) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"cache_url": "tcp://127.0.0.1:1"}, "cache_http_url"),
        ({"offload_queries": True}, "offload_queries"),
        ({"workers": 0}, "workers"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"dtype": torch.bfloat16}, "CausalModel.load"),
        ({"max_model_len": 100}, "CausalModel.load"),
        (
            {"offload_queries": True, "cache_url": "tcp://a:1", "cache_http_url": "http://a:1"},
            "CausalModel.load",
        ),
    ],
)
def test_arguments_that_do_not_fit(model: CausalModel, arguments: dict[str, Any], word: str) -> None:
    with pytest.raises(lms.InvalidRequestError, match=word):
        EmbeddedEngine(model, **arguments)


async def test_models_that_cannot_be_served(tmp_path: Path) -> None:
    with pytest.raises(lms.InvalidRequestError, match="cannot load the model"):
        await EmbeddedEngine(str(tmp_path / "nothing")).__aenter__()
    short = await asyncio.to_thread(write_tiny_llama, tmp_path / "short")
    with pytest.raises(lms.InvalidRequestError, match="max_model_len=5000"):
        await EmbeddedEngine(short, max_model_len=5000).__aenter__()
    (short / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(lms.InvalidRequestError, match="cannot load the model"):
        await EmbeddedEngine(short).__aenter__()


def write_sliding_model(folder: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    write_tiny_llama(folder)
    config = MistralConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCAB_SIZE,
        sliding_window=16,
    )
    MistralForCausalLM(config).save_pretrained(folder)


async def test_a_model_with_sliding_windows_is_refused(tmp_path: Path) -> None:
    await asyncio.to_thread(write_sliding_model, tmp_path)
    with pytest.raises(lms.GeometryError, match="sliding"):
        await EmbeddedEngine(tmp_path).__aenter__()


async def test_without_a_cache_server_it_does_not_start(model: CausalModel) -> None:
    async with EmbeddedCacheServer(size_gb=0.01) as cache:
        engine = EmbeddedEngine(model, cache_url=cache.url, cache_http_url=cache.http_url)
    with pytest.raises(lms.CacheConnectError):
        await engine.__aenter__()


async def test_a_name_that_an_engine_of_another_kind_has_registered_is_left_alone(
    model: CausalModel, cache: EmbeddedCacheServer
) -> None:
    other = dataclasses.replace(model.geometry, block_size=16)
    async with lms.connect(cache.url, cache.http_url, model.name, geometry=other):
        engine = EmbeddedEngine(model, cache_url=cache.url, cache_http_url=cache.http_url)
        with pytest.raises(lms.GeometryError, match="block_size 16"):
            await engine.__aenter__()


async def test_a_name_that_the_cache_refuses(tmp_path: Path, cache: EmbeddedCacheServer) -> None:
    folder = await asyncio.to_thread(write_tiny_llama, tmp_path / "me@work")
    engine = EmbeddedEngine(folder, cache_url=cache.url, cache_http_url=cache.http_url)
    with pytest.raises(lms.InvalidRequestError, match="'@'"):
        await engine.__aenter__()


async def test_an_engine_is_started_once(model: CausalModel) -> None:
    async with EmbeddedEngine(model) as engine:
        pass
    with pytest.raises(lms.ClosedError, match="started once"):
        await engine.__aenter__()


async def test_a_client_that_closes_before_the_end_is_no_error(
    engine: EmbeddedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async with aiohttp.ClientSession(engine.url) as session:
        for _ in range(5):
            body = {**GREEDY, "max_tokens": 3, "stream": True}
            async with session.post("/v1/completions", json=body) as response:
                await response.content.readline()
                response.close()
    while engine.core.running:
        await asyncio.sleep(0.01)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_prompts_in_a_list_of_one(session: aiohttp.ClientSession) -> None:
    alone = await post(session, {**GREEDY, "max_tokens": 4})
    listed = await post(session, {**GREEDY, "max_tokens": 4, "prompt": [[1, 2, 3]]})
    assert listed[1]["choices"][0]["text"] == alone[1]["choices"][0]["text"]
    assert (await post(session, {**GREEDY, "prompt": ["abc"]}))[0] == 200


async def test_an_id_that_no_token_has_is_not_detokenized(session: aiohttp.ClientSession) -> None:
    for token in (VOCAB_SIZE, 10**30):
        status, answer = await post(session, {"tokens": [token]}, "/detokenize")
        assert (status, answer["error"]["code"]) == (400, 400)


async def test_logits_that_are_not_finite_are_an_error(
    session: aiohttp.ClientSession, engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = engine.core.model.forward
    monkeypatch.setattr(engine.core.model, "forward", lambda *given: forward(*given) * torch.nan)
    for temperature in (0, 1):
        status, answer = await post(session, {**GREEDY, "temperature": temperature})
        assert status == 500
        assert "not finite" in answer["error"]["message"]


async def test_texts_and_ids_that_are_far_too_long_are_refused_at_once(
    session: aiohttp.ClientSession,
) -> None:
    for path, body in (("/tokenize", {"prompt": "a" * 10**6}), ("/detokenize", {"tokens": [5] * 10**5})):
        status, answer = await post(session, body, path)
        assert status == 400
        assert "maximum context length" in answer["error"]["message"]


async def test_a_body_that_is_not_compressed_as_it_says(session: aiohttp.ClientSession) -> None:
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with session.post("/v1/completions", data=b"no gzip", headers=headers) as response:
        assert response.status == 400


async def test_a_port_that_is_taken_is_named(engine: EmbeddedEngine, model: CausalModel) -> None:
    port = int(engine.url.rsplit(":", 1)[1])
    with pytest.raises(lms.InvalidRequestError, match=f"127.0.0.1:{port}"):
        await EmbeddedEngine(model, port=port).__aenter__()
    with pytest.raises(lms.ClosedError):
        _ = EmbeddedEngine(model).url
