"""The demo over a scripted engine and cache: what it sends, stores, reports and refuses."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import lmcache_stream as lms
from lmcache_stream.embedded.demo import Comparison, Document, Options, Step, run_demo
from lmcache_stream.embedded.demo.as_json import comparison_data
from lmcache_stream.embedded.demo.documents import build_prompt

from ...cache.conftest import GEOMETRY
from ...fakes.engine import ScriptedEngine, kv_of
from .conftest import FakeStack

TEXT = "0123456789abcdefghijklmnopqrstuvwxyz"
DOCUMENT = Document("digits", TEXT, "Why so?")
OPTIONS = Options(ratio=0.25, max_tokens=5)
SCRIPTS: list[list[object]] = [
    [7, "length"],
    [8, 0.01, 9, "stop"],
    [7, "length"],
    [10, 0.01, 11, 0.01, 12, 0.01, 13, "length"],
]


async def compared(
    stack: FakeStack, *documents: Document, options: Options = OPTIONS, steps: list[Step] | None = None
) -> list[Comparison]:
    seen = [] if steps is None else steps
    return [found async for found in run_demo(stack, documents, options, seen.append)]


async def test_one_prompt_is_answered_from_whole_and_from_edited_kv(stack: FakeStack) -> None:
    engine = stack.post_completion
    engine.scripts = [list(script) for script in SCRIPTS]
    prompt = build_prompt(stack.tokenizer, DOCUMENT)
    ids = list(prompt.token_ids)
    assert len(ids) == 79

    (comparison,) = await compared(stack, DOCUMENT)

    # Of 19 chunks of 4 tokens, 5 are a quarter of the prompt; the question begins at 44.
    assert comparison.dropped == range(24, 44)
    assert prompt.question_start == 44
    cached = ids[:76]
    kept = [*cached[:24], *cached[44:]]
    prefill, decode, prefill_again, decode_edited = engine.requests
    assert prefill[:2] == (ids, {"max_tokens": 1, "temperature": 0})
    assert decode == ([*ids, 7], {"max_tokens": 4, "temperature": 0}, prefill[2])
    assert prefill_again[:2] == prefill[:2]
    assert decode_edited[:2] == ([*kept, *ids[76:], 7], {"max_tokens": 4, "temperature": 0})
    whole_salt, edited_salt = prefill[2], prefill_again[2]
    assert whole_salt != edited_salt
    assert decode_edited[2].startswith(f"{edited_salt}~")

    edited_kv = kv_of(kept, GEOMETRY.kv_shape(1))
    for end in range(4, len(kept) + 1, 4):
        chunk = stack.server.chunks["model", decode_edited[2], tuple(kept[:end])]
        assert torch.equal(chunk, edited_kv[:, :, end - 4 : end])

    assert comparison.prompt_token_ids == prompt.token_ids
    assert comparison.kept_tokens == 59
    assert comparison.edit.recomputed_tokens == 0
    per_token = GEOMETRY.bytes_per_token
    assert (comparison.edit.bytes_before, comparison.edit.bytes_after) == (76 * per_token, 56 * per_token)
    assert comparison.whole.text == "<7><8><9>"
    assert comparison.whole.token_ids == (7, 8, 9)
    assert comparison.whole.finish_reason == "stop"
    assert comparison.whole.cached_tokens == 76
    assert comparison.edited.text == "<7><10><11><12><13>"
    assert comparison.edited.finish_reason == "length"
    assert comparison.edited.cached_tokens == 56
    for answer in (comparison.whole, comparison.edited):
        assert answer.ttft is not None
        assert 0 < answer.ttft < 5
        assert answer.tokens_per_second is not None
        assert 1 < answer.tokens_per_second <= 110


async def test_the_whole_kv_is_waited_for_where_the_engine_offloads_late(stack: FakeStack) -> None:
    class LateEngine(ScriptedEngine):
        def _offload(self, prompt: Sequence[int], salt: str) -> None:
            asyncio.get_running_loop().call_later(0.3, super()._offload, list(prompt), salt)

    stack.post_completion = LateEngine(stack.server, GEOMETRY.kv_shape(1))
    (comparison,) = await compared(stack, DOCUMENT)
    await asyncio.sleep(0.4)
    assert comparison.whole.cached_tokens == 76
    assert comparison.edited.cached_tokens == 56


async def test_every_document_gets_streams_of_its_own(stack: FakeStack) -> None:
    other = replace(DOCUMENT, title="letters", question="And?")
    found = await compared(stack, DOCUMENT, other, DOCUMENT)
    assert [comparison.document for comparison in found] == [DOCUMENT, other, DOCUMENT]
    salts = [salt for _, _, salt in stack.post_completion.requests]
    # A stream prefills and decodes; an edit gives it one more salt.
    assert len(salts) == 12
    assert len(set(salts)) == 9


async def test_an_answer_that_ends_with_its_first_token_is_not_gone_on_with(stack: FakeStack) -> None:
    stack.post_completion.scripts = [[7, "stop"], [7, "stop"]]
    (comparison,) = await compared(stack, DOCUMENT)
    assert len(stack.post_completion.requests) == 2
    assert comparison.whole.token_ids == comparison.edited.token_ids == (7,)
    assert comparison.edited.finish_reason == "stop"
    assert comparison.edited.tokens_per_second is None
    assert comparison.edit.tokens_after == 56


async def test_the_steps_count_the_tokens_of_both_answers(stack: FakeStack) -> None:
    stack.post_completion.scripts = [list(script) for script in SCRIPTS]
    steps: list[Step] = []
    await compared(stack, DOCUMENT, steps=steps)
    phases = list(dict.fromkeys(step.phase for step in steps))
    assert phases == ["prefill", "answer from the whole KV", "edit", "answer from the edited KV"]
    assert [step.tokens for step in steps] == sorted(step.tokens for step in steps)
    assert steps[-1] == Step(0, "answer from the edited KV", 8)


@pytest.mark.parametrize(
    ("document", "options", "words"),
    [
        (Document("short", "a", "Who?"), OPTIONS, "too short"),
        (DOCUMENT, Options(ratio=0.6, max_tokens=2), "too short"),
        (DOCUMENT, Options(max_tokens=26), "79 prompt tokens and 26 .* the 100"),
    ],
)
async def test_no_document_is_computed_when_one_cannot_be(
    stack: FakeStack, document: Document, options: Options, words: str
) -> None:
    stack.max_model_len = 100
    fitting = Document("fits", TEXT, "?")
    with pytest.raises(lms.InvalidRequestError, match=words):
        await compared(stack, fitting, document, options=options)
    assert stack.post_completion.requests == []


@pytest.mark.parametrize("options", [{"ratio": 0.0}, {"ratio": 1.0}, {"max_tokens": 1}])
def test_options_that_cannot_be_right_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(lms.InvalidRequestError):
        Options(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("passes", range(4))
async def test_an_error_of_the_engine_comes_through(stack: FakeStack, passes: int) -> None:
    scripts = [list(script) for script in SCRIPTS]
    scripts[passes] = [lms.EngineConnectError("gone")]
    stack.post_completion.scripts = scripts
    with pytest.raises(lms.EngineConnectError, match="gone"):
        await compared(stack, DOCUMENT)


@pytest.mark.parametrize("passes", range(4))
async def test_a_cancel_in_any_pass_leaves_nothing_behind(stack: FakeStack, passes: int) -> None:
    scripts = [list(script) for script in SCRIPTS]
    scripts[passes] = [7, 60.0, "length"]
    stack.post_completion.scripts = scripts
    steps: list[Step] = []

    async def until_closed() -> None:
        async with contextlib.aclosing(run_demo(stack, [DOCUMENT], OPTIONS, steps.append)) as results:
            async for _ in results:
                pass

    task = asyncio.create_task(until_closed())
    while len(stack.post_completion.requests) <= passes:
        assert not task.done()
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stack.post_completion.closed == passes + 1


async def test_a_comparison_is_plain_data(stack: FakeStack) -> None:
    stack.post_completion.scripts = [list(script) for script in SCRIPTS]
    (comparison,) = await compared(stack, DOCUMENT)
    data = json.loads(json.dumps(comparison_data(comparison), allow_nan=False))
    assert data["prompt_token_ids"] == list(comparison.prompt_token_ids)
    assert data["dropped"] == [24, 44]
    assert (data["prompt_tokens"], data["kept_tokens"]) == (79, 59)
    assert (data["kv_tokens_before"], data["kv_tokens_after"]) == (76, 56)
    assert data["edited"]["token_ids"] == [7, 10, 11, 12, 13]
    assert data["whole"]["text"] == "<7><8><9>"
