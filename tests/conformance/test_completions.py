"""The engine's API on both stacks: answers, endings, refusals."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

import lmcache_stream as lms

from .engines import GREEDY, StackPlace, engines, fresh_prompt, fresh_salt

pytestmark = [engines(), pytest.mark.timeout(300)]


async def answer(
    stack: StackPlace, prompt: list[int], params: dict[str, Any], salt: str = ""
) -> tuple[list[int], str, lms.FinishEvent]:
    ids: list[int] = []
    text = ""
    async with lms.VLLMCompletions(stack.engine_url, stack.served_name) as engine:
        async for event in engine(prompt, params, salt or fresh_salt()):
            text += event.text
            if isinstance(event, lms.FinishEvent):
                return ids, text, event
            ids.append(event.token_id)
    raise AssertionError("no finish event")


async def token_of(stack: StackPlace, text: str) -> int:
    _, found = await stack.post({"prompt": text, "add_special_tokens": False}, "/tokenize")
    (token,) = found["tokens"]
    return int(token)


async def test_the_model(stack: StackPlace) -> None:
    async with (
        aiohttp.ClientSession(stack.engine_url) as session,
        session.get("/v1/models") as response,
    ):
        (card,) = (await response.json())["data"]
    assert card["id"] == stack.served_name
    assert card["root"] == stack.model_name
    assert card["max_model_len"] == stack.max_model_len


async def test_the_events(stack: StackPlace) -> None:
    prompt = fresh_prompt(10)
    body = {
        **GREEDY,
        "model": stack.served_name,
        "prompt": prompt,
        "max_tokens": 3,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    async with (
        aiohttp.ClientSession(stack.engine_url) as session,
        session.post("/v1/completions", json=body) as response,
    ):
        assert response.content_type == "text/event-stream"
        events = [one for one in (await response.read()).decode().split("\n\n") if one]
    assert events.pop() == "data: [DONE]"
    *chunks, usage = (json.loads(one.removeprefix("data: ")) for one in events)
    assert usage["choices"] == []
    counts = usage["usage"]
    assert (counts["prompt_tokens"], counts["completion_tokens"], counts["total_tokens"]) == (10, 3, 13)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert choices[0]["prompt_token_ids"] == prompt
    assert all(choice.get("prompt_token_ids") is None for choice in choices[1:])
    assert sum(len(choice["token_ids"]) for choice in choices) == 3
    assert [choice["finish_reason"] for choice in choices][-1] == "length"
    assert {choice["index"] for choice in choices} == {0}
    assert {"id", "object", "created", "model"} <= set(chunks[0])


async def test_an_answer_that_is_not_streamed_is_the_streamed_one(stack: StackPlace) -> None:
    prompt = fresh_prompt(10)
    ids, text, _ = await answer(stack, prompt, {**GREEDY, "max_tokens": 5})
    status, whole = await stack.post({**GREEDY, "prompt": prompt, "max_tokens": 5, "return_token_ids": True})
    assert status == 200
    (choice,) = whole["choices"]
    assert choice["token_ids"] == ids
    assert choice["text"] == text
    assert choice["prompt_token_ids"] == prompt
    assert whole["usage"]["completion_tokens"] == 5


async def test_sixteen_tokens_where_none_are_asked_for(stack: StackPlace) -> None:
    ids, _, finish = await answer(stack, fresh_prompt(10), GREEDY)
    assert (len(ids), finish.reason) == (16, "length")


async def test_an_end_of_sequence_is_an_id_without_text(stack: StackPlace) -> None:
    params = {"temperature": 0, "logit_bias": {str(stack.eos): 100}, "max_tokens": 9}
    ids, text, finish = await answer(stack, fresh_prompt(10), params)
    assert (ids, text, finish.reason) == ([stack.eos], "", "stop")
    ids, _, finish = await answer(stack, fresh_prompt(10), {**params, "min_tokens": 3})
    assert (len(ids), ids[-1], finish.reason) == (4, stack.eos, "stop")
    ids, _, finish = await answer(stack, fresh_prompt(10), {**params, "ignore_eos": True})
    assert (ids, finish.reason) == ([stack.eos] * 9, "length")


async def test_a_stop_string_cuts_the_text_and_not_the_ids(stack: StackPlace) -> None:
    letter = await token_of(stack, "A")
    # Ends in a whole character: otherwise vLLM repeats the prompt's text.
    prompt = [*fresh_prompt(10), letter]
    params = {**GREEDY, "allowed_token_ids": [letter], "stop": ["AAA"], "max_tokens": 9}
    ids, text, finish = await answer(stack, prompt, params)
    assert (ids, text, finish.reason) == ([letter] * 3, "", "stop")
    ids, text, _ = await answer(stack, prompt, {**params, "include_stop_str_in_output": True})
    assert (ids, text) == ([letter] * 3, "AAA")
    ids, text, finish = await answer(stack, prompt, {**params, "stop": ["AB"]})
    assert (ids, text, finish.reason) == ([letter] * 9, "A" * 9, "length")


async def test_a_stop_token_is_an_id_without_text(stack: StackPlace) -> None:
    letter = await token_of(stack, "A")
    params = {**GREEDY, "allowed_token_ids": [letter], "stop_token_ids": [letter], "max_tokens": 9}
    ids, text, finish = await answer(stack, fresh_prompt(10), params)
    assert (ids, text, finish.reason) == ([letter], "", "stop")


async def test_a_seed_gives_the_same_answer_again(stack: StackPlace) -> None:
    prompt = fresh_prompt(10)
    sampled = {"temperature": 1.3, "max_tokens": 12, "ignore_eos": True}
    first, again, other = [(await answer(stack, prompt, {**sampled, "seed": seed}))[0] for seed in (5, 5, 6)]
    assert first == again
    assert first != other


REFUSED: list[tuple[dict[str, Any], int]] = [
    ({"prompt": None}, 400),
    ({"prompt": []}, 400),
    ({"prompt": [-1]}, 400),
    ({"prompt": {}}, 400),
    ({"max_tokens": 0}, 400),
    ({"max_tokens": -5}, 400),
    ({"max_tokens": "many"}, 400),
    ({"max_tokens": 10**6}, 400),
    ({"prompt": [30] * 10**4}, 400),
    ({"min_tokens": 20}, 400),
    ({"temperature": -1}, 400),
    ({"top_p": 0}, 400),
    ({"top_p": 2}, 400),
    ({"top_k": -5}, 400),
    ({"min_p": 2}, 400),
    ({"repetition_penalty": 0}, 400),
    ({"presence_penalty": 3}, 400),
    ({"frequency_penalty": -3}, 400),
    ({"stop": [""]}, 400),
    ({"stop_token_ids": ["x"]}, 400),
    ({"allowed_token_ids": []}, 400),
    ({"logit_bias": {"9999999": 1}}, 400),
    ({"cache_salt": ""}, 400),
    ({"cache_salt": "a/b"}, 400),
    ({"cache_salt": "a@b"}, 400),
    ({"cache_salt": "x" * 129}, 400),
    ({"stream_options": {"include_usage": True}}, 400),
    ({"prompt": [10**6]}, 400),
    ({"model": "no-such-model"}, 404),
]


@pytest.mark.parametrize(("change", "status"), REFUSED, ids=[str(one[0])[:40] for one in REFUSED])
async def test_bad_input(stack: StackPlace, change: dict[str, Any], status: int) -> None:
    given, said = await stack.post({"prompt": [30, 31], "max_tokens": 8, **change})
    assert given == status, said
    error = said["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["type"]) == (status, "NotFoundError" if status == 404 else error["type"])
    assert error["message"]
    assert await stack.running() == 0
