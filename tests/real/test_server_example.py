"""The aiohttp example server before a real vLLM and LMCache: an answer, and clients that leave."""

from __future__ import annotations

import asyncio
import pydoc_data.topics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from document_service import DocumentService, Limits
from server import listening
from serving import Servers

import lmcache_stream as lms

from ..embedded.answer_client import Reply, ask, asking, get, samples
from ..embedded.served import until
from .conftest import RealStack, tokenizer, until_idle, until_unlocked

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.parametrize("stack", ["bfloat16-shared-memory"], indirect=True),
]

QUESTION = {
    "document": pydoc_data.topics.topics["with"] + pydoc_data.topics.topics["assert"],
    "question": "What does the assert statement do? Answer in two sentences.",
    "policy": "keydiff",
    "max_tokens": 24,
}


@asynccontextmanager
async def serving(stack: RealStack) -> AsyncIterator[str]:
    async with (
        lms.connect(stack.cache.url, stack.cache.http_url, stack.model_name) as cache,
        lms.VLLMCompletions(stack.engine.url, stack.engine.model) as engine,
    ):
        servers = Servers(cache, engine, stack.engine.url, tokenizer(), stack.model_name)
        async with (
            DocumentService(servers, Limits(heartbeat=0.2)) as service,
            listening(service, "127.0.0.1", 0) as url,
        ):
            yield url


@pytest.mark.parametrize("policy", ["keydiff", "snapkv"])
async def test_an_answer_from_cut_kv_is_streamed(stack: RealStack, policy: str) -> None:
    async with serving(stack) as url:
        assert (await get(f"{url}/healthz"))[0] == 200
        reply = await ask(url, {**QUESTION, "policy": policy})
        figures = await samples(url)
    edit, done = reply.data("edit"), reply.data("done")
    assert done["text"] == reply.text
    assert len(reply.text) > 20
    assert edit["tokens_before"] == done["prompt_tokens"] > 500
    assert edit["kept_share"] == pytest.approx(0.5, abs=0.05)
    # What vLLM says that it took from LMCache; it computes the last token of a prompt itself.
    assert edit["tokens_after"] - done["cached_tokens"] <= 32
    assert figures["document_requests_total{answered}"] == 1
    await until_unlocked(stack.cache)


async def until_point(reply: Reply, point: str) -> None:
    """Read until that event, or into the middle of the answer."""
    if point == "headers":
        return
    async for _ in reply.read():
        if point in dict(reply.events) or (point == "answer" and len(reply.events) > 8):
            return
    raise AssertionError(f"the answer is over, and there was no {point}")


async def test_who_leaves_at_any_point_leaves_nothing_behind(stack: RealStack) -> None:
    async with serving(stack) as url:
        for number, point in enumerate(("before headers", "headers", "token", "edit", "answer")):
            # A text that vLLM has not prefilled, and an answer that does not end by itself soon.
            body = {**QUESTION, "document": f"{number}. {QUESTION['document']}", "max_tokens": 1500}
            if point == "before headers":
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.1):
                        await ask(url, body)
                continue
            async with asking(url, body) as reply:
                await until_point(reply, point)
        await until_idle(stack.engine, seconds=20)
        await until_unlocked(stack.cache)

        async def all_have_left() -> bool:
            figures = await samples(url)
            return figures["document_streams{running}"] == 0 and figures["document_requests_total{left}"] == 5

        await until(all_have_left)
        # All goes on for those who come later.
        assert (await ask(url, QUESTION)).data("done")["output_tokens"] == 24
