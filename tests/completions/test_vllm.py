"""The client against a server that is scripted to the byte: what is sent, and what is made of answers."""

from __future__ import annotations

import asyncio
import gzip
import json
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest
from aioresponses import aioresponses

from lmcache_stream.completions import (
    CompletionTimeouts,
    FinishEvent,
    TokenEvent,
    VLLMCompletions,
)
from lmcache_stream.errors import (
    ClosedError,
    EngineError,
    EngineStatusError,
    EngineStreamError,
    InvalidRequestError,
    TruncatedStreamError,
)

from .scripted import DONE, STREAM, Connection, Incoming, event, playing, serving, usage

ANSWER = (
    event([5], "a", prompt_token_ids=[1, 2, 3]),
    event([6], "漢"),
    event([2], "", "stop"),
    usage(3, 3, 2),
    DONE,
)
WANTED = ([5, 6, 2], ["a", "漢", ""], FinishEvent("stop", "", 3, 3, 2))

Yielded = tuple[list[int], list[str], FinishEvent | None]


async def collect(
    engine: VLLMCompletions,
    prompt: Sequence[int] = (1, 2, 3),
    params: dict[str, Any] | None = None,
    salt: str = "",
    *,
    into: list[TokenEvent | FinishEvent] | None = None,
) -> Yielded:
    """Run a pass to its end; ``into`` has what was yielded even where it raises."""
    events = [] if into is None else into
    async with aclosing(engine(prompt, params or {}, salt)) as source:
        async for one in source:
            events.append(one)
    tokens = [one for one in events if isinstance(one, TokenEvent)]
    finish = [one for one in events if isinstance(one, FinishEvent)]
    assert events[len(tokens) :] == finish
    assert len(finish) <= 1
    return [one.token_id for one in tokens], [one.text for one in tokens], finish[0] if finish else None


async def test_a_pass() -> None:
    seen: list[Incoming] = []

    async def script(connection: Connection) -> None:
        seen.append(await connection.request())
        await connection.answer(*ANSWER)

    async with serving(script) as server, VLLMCompletions(server.url, "m", api_key="k") as engine:
        assert await collect(engine, (1, 2, 3), {"max_tokens": 7}, "salt") == WANTED
    (request,) = seen
    assert request.line == "POST /v1/completions HTTP/1.1"
    assert request.json == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 7,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "cache_salt": "salt",
    }
    assert request.headers["authorization"] == "Bearer k"
    assert request.headers["content-type"] == "application/json"
    assert request.headers["accept"] == "text/event-stream"


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/", "/under/v1"])
async def test_base_urls_and_headers(path: str) -> None:
    seen: list[Incoming] = []

    async def script(connection: Connection) -> None:
        seen.append(await connection.request())
        await connection.answer(*ANSWER)

    async with (
        serving(script) as server,
        VLLMCompletions(server.url + path, "m", headers={"X-Tenant": "a"}) as engine,
    ):
        await collect(engine)
    assert seen[0].line.split()[1] == path.rstrip("/").removesuffix("/v1") + "/v1/completions"
    assert seen[0].headers["x-tenant"] == "a"
    assert "cache_salt" not in seen[0].json


async def test_the_answer_cut_at_every_byte() -> None:
    answer = b"".join(ANSWER)

    async def script(connection: Connection) -> None:
        for cut in range(1, len(answer)):
            await connection.request()
            await connection.head()
            await connection.send(answer[:cut])
            await asyncio.sleep(0)
            await connection.send(answer[cut:])
            await connection.end()

    async with serving(script) as server, VLLMCompletions(server.url, "m") as engine:
        for cut in range(1, len(answer)):
            assert await collect(engine) == WANTED, cut


async def test_an_event_with_a_character_of_three_bytes_byte_by_byte() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.head()
        await connection.send(ANSWER[0])
        for byte in ANSWER[1]:
            await connection.send(bytes([byte]))
            await asyncio.sleep(0)
        await connection.send(*ANSWER[2:])
        await connection.end()

    async with serving(script) as server, VLLMCompletions(server.url, "m") as engine:
        assert await collect(engine) == WANTED


@pytest.mark.parametrize(
    "before", [b"\xef\xbb\xbf", b": keep-alive\n\n", b"retry: 5\n\n", b"\r\n", b"data:\n\n", b"event: x\n\n"]
)
async def test_what_is_no_event_changes_nothing(before: bytes) -> None:
    body = b"".join([before, *ANSWER[:2], before.removeprefix(b"\xef\xbb\xbf"), *ANSWER[2:]])
    async with serving(playing(body)) as server, VLLMCompletions(server.url, "m") as engine:
        assert await collect(engine) == WANTED


async def test_other_line_ends() -> None:
    body = b"".join(ANSWER).replace(b"\n", b"\r\n").replace(b"data: ", b"data:")
    async with serving(playing(body)) as server, VLLMCompletions(server.url, "m") as engine:
        assert await collect(engine) == WANTED


async def test_an_answer_that_a_stop_string_ends_at_once() -> None:
    stopped = json.loads(event([5], "", "stop")[6:])
    stopped["choices"][0]["stop_reason"] = "END"
    body = b"data: " + json.dumps(stopped).encode() + b"\n\n"
    async with (
        serving(playing(body, usage(3, 1), DONE)) as server,
        VLLMCompletions(server.url, "m") as engine,
    ):
        ids, texts, finish = await collect(engine, params={"stop": ["END"]})
    assert (ids, texts, finish) == ([5], [""], FinishEvent("stop", "", 3, 1))


async def test_a_response_without_length_or_chunks() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.raw(f"HTTP/1.0 200 OK\r\ncontent-type: {STREAM}\r\n\r\n".encode() + b"".join(ANSWER))

    async with serving(script) as server, VLLMCompletions(server.url, "m") as engine:
        assert await collect(engine) == WANTED


async def test_a_compressed_response() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.head("200 OK", STREAM, "content-encoding: gzip")
        await connection.send(gzip.compress(b"".join(ANSWER)))
        await connection.end()

    async with serving(script) as server, VLLMCompletions(server.url, "m") as engine:
        assert await collect(engine) == WANTED


async def test_lines_of_megabytes() -> None:
    prompt = list(range(100_000, 150_000))
    first = event([5], "a", prompt_token_ids=[1]).replace(b"[1]", b"[" + b"123456," * 500_000 + b"1]")
    assert len(first) > 3_000_000

    async def script(connection: Connection) -> None:
        assert (await connection.request()).json["prompt"] == prompt
        await connection.answer(first, *ANSWER[1:])

    async with serving(script) as server, VLLMCompletions(server.url, "m") as engine:
        assert await collect(engine, prompt) == WANTED


async def test_arrivals_are_those_of_the_reads() -> None:
    gate = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.head()
        await connection.send(event([5, 6], "ab") + event([7], "c"))
        await gate.wait()
        await connection.send(event([8], "d", "length"), usage(3, 4), DONE)
        await connection.end()

    arrivals: list[float] = []
    async with serving(script) as server, VLLMCompletions(server.url, "m") as engine:
        began = time.perf_counter()
        async for one in engine([1], {}, ""):
            if isinstance(one, TokenEvent):
                assert one.arrived is not None
                arrivals.append(one.arrived)
                if len(arrivals) == 3:
                    middle = time.perf_counter()
                    gate.set()
    assert began < arrivals[0] == arrivals[1] == arrivals[2] < middle
    assert middle < arrivals[3] < time.perf_counter()


async def test_passes_one_after_another_share_a_connection() -> None:
    async with serving(playing(*ANSWER)) as server, VLLMCompletions(server.url, "m") as engine:
        for _ in range(3):
            assert await collect(engine) == WANTED
        assert server.connections == 1


async def test_a_response_whose_end_comes_later_leaves_its_connection_too() -> None:
    async def script(connection: Connection) -> None:
        while True:
            await connection.request()
            await connection.head()
            await connection.send(*ANSWER)
            await asyncio.sleep(0.03)
            await connection.end()

    async with serving(script) as server, VLLMCompletions(server.url, "m") as engine:
        for _ in range(2):
            assert await collect(engine) == WANTED
        assert server.connections == 1


async def test_more_passes_at_once_than_aiohttps_usual_hundred() -> None:
    number = 110
    waiting = asyncio.Semaphore(0)
    gate = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        waiting.release()
        await gate.wait()
        await connection.answer(*ANSWER)

    async with (
        serving(script) as server,
        VLLMCompletions(server.url, "m") as engine,
        asyncio.TaskGroup() as group,
    ):
        passes = [group.create_task(collect(engine)) for _ in range(number)]
        for _ in range(number):
            await asyncio.wait_for(waiting.acquire(), 10)
        gate.set()
    assert [one.result() for one in passes] == [WANTED] * number


@pytest.mark.parametrize(
    ("prompt", "params", "salt"),
    [
        ([], {}, ""),
        ([1, -1], {}, ""),
        ("text", {}, ""),
        ([1.5], {}, ""),
        ([1], {"n": 2}, ""),
        ([1], {"stream": False}, ""),
        ([1], {}, "a@b"),
        ([1], {}, "x" * 129),
    ],
)
async def test_what_cannot_be_right_is_not_sent(prompt: Any, params: Any, salt: str) -> None:
    async with serving(playing(*ANSWER)) as server, VLLMCompletions(server.url, "m") as engine:
        with pytest.raises(InvalidRequestError):
            engine(prompt, params, salt)
        assert server.connections == 0


@pytest.mark.parametrize("model", ["", None, 5])
def test_a_model_needs_a_name(model: Any) -> None:
    with pytest.raises(InvalidRequestError, match="model"):
        VLLMCompletions("http://engine", model)


URL = "http://engine:8000/v1/completions"


@pytest.mark.parametrize(
    ("status", "body", "headers", "detail", "retry_after"),
    [
        (404, {"error": {"message": "no model m", "code": 404}}, {}, "no model m", None),
        (400, {"object": "error", "message": "too long"}, {}, "too long", None),
        (401, {"error": "Unauthorized"}, {}, "Unauthorized", None),
        (422, {"detail": "bad"}, {}, "bad", None),
        (429, {"error": {"message": "slow down"}}, {"Retry-After": "7"}, "slow down", 7.0),
        (503, "<html>overloaded</html>", {"Retry-After": "soon"}, "<html>overloaded</html>", None),
        (500, "", {}, "", None),
        (307, "", {"Location": "http://other/v1"}, "redirect to http://other/v1", None),
    ],
)
async def test_error_statuses(
    status: int, body: Any, headers: dict[str, str], detail: str, retry_after: float | None
) -> None:
    text = body if isinstance(body, str) else json.dumps(body)
    with aioresponses() as mocked:
        mocked.post(URL, status=status, body=text, headers=headers)
        async with VLLMCompletions("http://engine:8000", "m") as engine:
            with pytest.raises(EngineStatusError) as caught:
                await collect(engine)
    error = caught.value
    assert (error.status, error.detail, error.retry_after) == (status, detail, retry_after)
    assert error.token_ids == ()
    assert f"POST {URL}: HTTP {status}" in str(error)
    assert detail in str(error)


@pytest.mark.parametrize(
    ("content_type", "body", "said"),
    [
        ("text/html", "<html>\nLog in</html>", "Log in"),
        ("application/json", '{"error": {"message": "odd"}}', "odd"),
        ("application/json", '{"choices": []}', "choices"),
        ("text/plain", "", "text/plain"),
    ],
)
async def test_an_answer_that_is_no_stream_says_what_answered(
    content_type: str, body: str, said: str
) -> None:
    with aioresponses() as mocked:
        mocked.post(URL, status=200, body=body, content_type=content_type)
        async with VLLMCompletions("http://engine:8000", "m") as engine:
            with pytest.raises(EngineStreamError, match=content_type) as caught:
                await collect(engine)
    assert said in str(caught.value)
    assert "base_url" in str(caught.value)


async def test_a_status_leaves_its_connection_for_the_next_pass() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.reply("400 Bad Request", b'{"error": {"message": "no"}}')
        await connection.request()
        await connection.answer(*ANSWER)

    async with serving(script) as server, VLLMCompletions(server.url, "m") as engine:
        with pytest.raises(EngineStatusError):
            await collect(engine)
        assert await collect(engine) == WANTED
        assert server.connections == 1


THREE = (event([5], "a"), event([6], "b"), event([7], "c"))
ERROR = b'data: {"error": {"message": "EngineCore died", "code": 500}}\n\n'


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("events", "ending", "error"),
    [
        ((*THREE, ERROR, DONE), "end", EngineStreamError),
        ((*THREE, event([], "", "abort"), DONE), "end", EngineStreamError),
        ((*THREE, event([9], "d", "error")), "end", EngineStreamError),
        ((*THREE, b"data: nonsense\n\n"), "end", EngineStreamError),
        ((*THREE, DONE), "end", TruncatedStreamError),
        (THREE, "end", TruncatedStreamError),
        ((*THREE, event([9], "d", "length")[:-1]), "end", TruncatedStreamError),
        (THREE, "close", TruncatedStreamError),
        (THREE, "reset", TruncatedStreamError),
        (THREE, "garbage", TruncatedStreamError),
    ],
)
async def test_how_a_stream_breaks_off(
    events: Sequence[bytes], ending: str, error: type[EngineError], at_once: bool
) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.head()
        await connection.send(*([b"".join(events)] if at_once else events))
        await asyncio.sleep(0.05)
        match ending:
            case "end":
                await connection.end()
                await connection.lost()
            case "close":
                connection.close()
            case "reset":
                connection.reset()
            case "garbage":
                await connection.raw(b"this is no chunk\r\n")
                await connection.lost()

    got: list[TokenEvent | FinishEvent] = []
    async with serving(script) as server, VLLMCompletions(server.url, "m") as engine:
        with pytest.raises(error) as caught:
            await collect(engine, into=got)
    assert [one.token_id for one in got if isinstance(one, TokenEvent)] == [5, 6, 7]
    assert len(got) == 3
    assert caught.value.token_ids[:3] == (5, 6, 7)
    assert type(caught.value) is error
    assert "POST http://127.0.0.1:" in str(caught.value)
    if ERROR in events:
        assert "EngineCore died" in str(caught.value)


@pytest.mark.parametrize("ending", ["close", "reset"])
async def test_what_had_arrived_before_a_break_is_not_lost_on_a_slow_caller(ending: str) -> None:
    gate = asyncio.Event()

    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.head()
        await connection.send(THREE[0])
        await gate.wait()
        await connection.send(*THREE[1:])
        await asyncio.sleep(0.05)
        connection.reset() if ending == "reset" else connection.close()

    got: list[TokenEvent | FinishEvent] = []
    async with serving(script) as server, VLLMCompletions(server.url, "m") as engine:

        async def slowly() -> None:
            async for one in engine([1], {}, ""):
                got.append(one)
                gate.set()
                await server.finished()
                await asyncio.sleep(0.05)

        with pytest.raises(TruncatedStreamError) as caught:
            await slowly()
    assert [one.token_id for one in got if isinstance(one, TokenEvent)] == [5, 6, 7]
    assert caught.value.token_ids == (5, 6, 7)


@pytest.mark.parametrize("ending", ["end", "close", "reset"])
@pytest.mark.parametrize("further", [[], [usage(1, 4)], [usage(1, 4), DONE]], ids=len)
async def test_after_the_finish_reason_nothing_can_break_the_answer(
    further: list[bytes], ending: str
) -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.head()
        await connection.send(*THREE, event([8], "d", "length"), *further)
        await asyncio.sleep(0.05)
        if ending == "end":
            await connection.end()
        elif ending == "reset":
            connection.reset()

    async with serving(script) as server, VLLMCompletions(server.url, "m") as engine:
        ids, _, finish = await collect(engine)
    assert ids == [5, 6, 7, 8]
    assert finish is not None
    assert (finish.reason, finish.completion_tokens) == ("length", 4 if further else None)


async def test_a_connection_that_is_not_ended_after_the_answer_is_not_waited_for() -> None:
    async def script(connection: Connection) -> None:
        await connection.request()
        await connection.head()
        await connection.send(*ANSWER)
        await connection.lost()

    async with serving(script) as server, VLLMCompletions(server.url, "m") as engine:
        assert await asyncio.wait_for(collect(engine), 5) == WANTED
        await server.finished()


async def test_the_first_pass_opens_and_closing_is_idempotent() -> None:
    async with serving(playing(*ANSWER)) as server:
        engine = VLLMCompletions(server.url, "m")
        try:
            async with asyncio.TaskGroup() as group:
                passes = [group.create_task(collect(engine)) for _ in range(2)]
        finally:
            await engine.aclose()
            await engine.aclose()
        assert [one.result() for one in passes] == [WANTED, WANTED]
        with pytest.raises(ClosedError):
            await collect(engine)
        with pytest.raises(ClosedError):
            await engine.__aenter__()
        await server.finished()


async def test_closing_what_was_never_opened() -> None:
    engine = VLLMCompletions("http://engine", "m")
    await engine.aclose()
    with pytest.raises(ClosedError):
        await collect(engine)


async def test_another_loop_is_refused() -> None:
    async with serving(playing(*ANSWER)) as server, VLLMCompletions(server.url, "m") as engine:
        with pytest.raises(ClosedError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, collect(engine))


async def test_one_that_is_forgotten_says_so() -> None:
    async with serving(playing(*ANSWER)) as server:
        engine = VLLMCompletions(server.url, "m")
        assert await collect(engine) == WANTED
        inside = engine._engine
        assert inside is not None
        with pytest.warns(ResourceWarning, match="VLLMCompletions .* was not closed"):
            del engine
        await inside.session.close()
        await inside.background.aclose()


async def test_the_prompts_text_in_front_of_the_first_text_is_taken_out() -> None:
    character = "\U0001f336".encode()
    asked = []

    async def script(connection: Connection) -> None:
        while True:
            request = await connection.request()
            if request.line.split()[1] == "/v1/completions":
                prompt = request.json["prompt"]
                text = bytes([*prompt, character[3]]).decode()
                first = event([character[3]], text, prompt_token_ids=prompt)
                await connection.answer(first, event([33], "!", "length"), usage(9, 2), DONE)
            else:
                assert request.line.split()[1] == "/detokenize"
                assert request.json["model"] == "m"
                asked.append(request.json["tokens"])
                text = bytes(request.json["tokens"]).decode("utf-8", "replace")
                await connection.reply("200 OK", json.dumps({"prompt": text}).encode())

    prompt = [*b"Hello \xf0\x9f\x8c\xb6 world, and all who live in it ", *character[:3]]
    async with serving(script) as server, VLLMCompletions(server.url, "m") as engine:
        for _ in range(2):
            ids, texts, _ = await collect(engine, prompt)
            assert (ids, texts) == ([character[3], 33], ["\U0001f336", "!"])
    assert asked.count([character[2]]) == 1


async def test_an_engine_without_a_detokenizer_gets_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def script(connection: Connection) -> None:
        while True:
            request = await connection.request()
            if request.line.split()[1] == "/v1/completions":
                await connection.answer(event([5], "-" * 40, "length"), usage(2, 1), DONE)
            else:
                await connection.reply("404 Not Found", b'{"detail": "Not Found"}')

    async with serving(script) as server, VLLMCompletions(server.url, "m") as engine:
        for prompt in ([1, 2], [3, 4]):
            assert (await collect(engine, prompt))[1] == ["-" * 40]
    (record,) = caplog.records
    assert "vllm#48853" in record.message


async def test_a_proxy_is_used_for_other_machines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Incoming] = []

    async def script(connection: Connection) -> None:
        seen.append(await connection.request())
        await connection.answer(*ANSWER)

    async with serving(script) as proxy, serving(playing(*ANSWER)) as server:
        monkeypatch.setenv("http_proxy", f"http://user:secret@127.0.0.1:{proxy.port}")
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        async with VLLMCompletions("http://engine.example:8000", "m", api_key="k") as engine:
            assert await collect(engine) == WANTED
        async with VLLMCompletions(server.url, "m") as engine:
            assert await collect(engine) == WANTED
    (request,) = seen
    assert request.line == "POST http://engine.example:8000/v1/completions HTTP/1.1"
    assert request.headers["proxy-authorization"].startswith("Basic ")
    assert request.headers["authorization"] == "Bearer k"


async def test_timeouts_must_be_timeouts() -> None:
    with pytest.raises(InvalidRequestError):
        VLLMCompletions("http://engine", "m", timeouts=5)  # type: ignore[arg-type]
    assert CompletionTimeouts() == CompletionTimeouts(connect=5, first_token=None, idle=60, drain=30)
