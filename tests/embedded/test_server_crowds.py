"""Clients of the example servers that leave, at every point, alone and among two hundred."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest
from document_service import Limits
from serving import Servers
from torch import Tensor

import lmcache_stream as lms
from lmcache_stream.dropping import CachedPrefix, KeyDiff
from lmcache_stream.embedded.engine import CausalModel

from .answer_client import ask, asking, samples
from .served import MODULES, document, serving

both = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)

CLIENTS = 200
TOKENS = 6
# Of those who leave: long enough never to come to its end before they do.
LONG = 1500


class Stage:
    """An engine that holds one of its passes, or a policy that holds the edit, until a client has left."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reached = asyncio.Event()
        self.go_on = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._engine: Any = None
        self._passes = 0

    def change(self, servers: Servers) -> Servers:
        self._engine = servers.engine
        return replace(servers, engine=self._complete)

    async def _complete(
        self, prompt: Sequence[int], params: Mapping[str, Any], salt: str
    ) -> AsyncIterator[lms.TokenEvent | lms.FinishEvent]:
        self._passes += 1
        count = 0
        async for event in self._engine(prompt, params, salt):
            if self.name == ("prefill", "answer")[self._passes - 1] and count == 3 * (self._passes - 1):
                self.reached.set()
                await asyncio.sleep(3600)
            count += 1
            yield event

    def score(self, policy: KeyDiff, prefix: CachedPrefix) -> Tensor:
        if self.name == "edit":
            self._loop.call_soon_threadsafe(self.reached.set)
            assert self.go_on.wait(10)
        return SCORE(policy, prefix)


SCORE = KeyDiff.score


@both
@pytest.mark.parametrize("heartbeat", [0.02, 60.0])
@pytest.mark.parametrize("stage", ["prefill", "edit", "answer"])
async def test_a_client_that_leaves_ends_its_answer_at_every_stage(
    module: ModuleType,
    heartbeat: float,
    stage: str,
    model: CausalModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = Stage(stage)
    monkeypatch.setattr(KeyDiff, "score", lambda self, prefix: held.score(self, prefix))
    async with serving(module, model, Limits(heartbeat=heartbeat), held.change) as served:
        body = {"document": document(1), "question": "When?", "policy": "keydiff", "max_tokens": LONG}
        asked = asyncio.create_task(ask(served.url, body))
        await held.reached.wait()
        assert (await samples(served.url))["document_streams{running}"] == 1
        await asyncio.sleep(0.1)
        asked.cancel()
        await asyncio.wait({asked})
        if stage == "edit":
            # What computes in a thread ends by itself, and what it holds is given back then.
            await asyncio.sleep(0.1)
            held.go_on.set()
        await served.until_clean()
        figures = await samples(served.url)
    assert figures["document_requests_total{left}"] == 1
    assert figures["document_tokens_total{kept}"] == (128 if stage == "answer" else 0)


def without_eos(servers: Servers) -> Servers:
    """Let every answer have its ``max_tokens``: who leaves shall not find that it was over anyway."""
    engine = servers.engine

    def complete(
        prompt: list[int], params: dict[str, Any], salt: str
    ) -> AsyncIterator[lms.TokenEvent | lms.FinishEvent]:
        return engine(prompt, {**params, "ignore_eos": True}, salt)

    return replace(servers, engine=complete)


POINTS = ("before headers", "prefill", "edit", "answer")


async def leave(url: str, body: dict[str, Any], point: str, chance: random.Random) -> None:
    """Ask, and leave at ``point``, as it looks from outside."""
    if point == "before headers":
        await leave_before_headers(url, body, chance.uniform(0, 0.3))
        return
    async with asking(url, body) as reply:
        assert reply.status == 200, reply.problem
        if point == "prefill":
            await asyncio.sleep(chance.uniform(0, 0.1))
            return
        wanted = chance.randint(1, 20)
        async for _ in reply.read():
            if reply.events and point == "edit":
                break
            if len(reply.events) > wanted and any(name == "edit" for name, _ in reply.events):
                break
        assert reply.events[0][0] == "token"
        assert reply.events[-1][0] != "done"


async def leave_before_headers(url: str, body: dict[str, Any], seconds: float) -> None:
    where = urlsplit(url)
    _, writer = await asyncio.open_connection(where.hostname, where.port)
    data = json.dumps(body).encode()
    writer.write(b"POST /v1/answers HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
    await writer.drain()
    await asyncio.sleep(seconds)
    writer.close()
    await writer.wait_closed()


@both
@pytest.mark.timeout(300)
async def test_two_hundred_clients_of_whom_half_leave(module: ModuleType, model: CausalModel) -> None:
    chance = random.Random(7)
    policies = ("keydiff", "streaming-llm", "snapkv", "none")
    bodies = [
        {
            "document": document(number, 4 + number % 3),
            "question": "When did it come in?",
            "policy": policies[number % 4],
            "ratio": 0.4,
            "max_tokens": TOKENS,
        }
        for number in range(12)
    ]
    limits = Limits(running=24, waiting=CLIENTS, heartbeat=0.1)
    async with serving(module, model, limits, without_eos) as served:
        replies = [await ask(served.url, body) for body in bodies]
        alone = [reply.data("done")["text"] for reply in replies]
        assert len(set(alone)) > 6
        # Those whose first token is a whole character, which is told before the edit begins.
        telling = [
            body["document"]
            for body, reply in zip(bodies, replies, strict=True)
            if reply.events[0][0] == "token"
        ]
        assert len(telling) > 3
        before = await samples(served.url)
        stays = [True, False] * (CLIENTS // 2)
        chance.shuffle(stays)
        points: Counter[str] = Counter()
        wrong: list[str] = []

        async def stay(number: int) -> None:
            reply = await ask(served.url, bodies[number])
            said = reply.data("done")["text"] if reply.problem is None else reply.problem["message"]
            if not said == reply.text == alone[number]:
                wrong.append(f"{number}: {said!r}, alone {alone[number]!r}")

        async with asyncio.TaskGroup() as clients:
            for stays_on in stays:
                if stays_on:
                    clients.create_task(stay(chance.randrange(len(bodies))))
                else:
                    point = POINTS[points.total() % len(POINTS)]
                    points[point] += 1
                    text, policy = chance.choice(telling), chance.choice(policies[:3])
                    body = {**bodies[0], "document": text, "policy": policy, "max_tokens": LONG}
                    clients.create_task(leave(served.url, body, point, chance))
                await asyncio.sleep(chance.uniform(0, 0.02))
        assert wrong == []
        await served.until_clean()
        after = await samples(served.url)
    assert points == dict.fromkeys(POINTS, CLIENTS // 8)
    grown = {
        outcome: after[f"document_requests_total{{{outcome}}}"]
        - before[f"document_requests_total{{{outcome}}}"]
        for outcome in ("answered", "left", "refused", "busy", "failed", "stopped")
    }
    # Who left before the server had read the request was none of its clients.
    unseen = CLIENTS // 2 - grown.pop("left")
    assert 0 <= unseen <= points["before headers"]
    assert grown == {"answered": CLIENTS // 2, "refused": 0, "busy": 0, "failed": 0, "stopped": 0}
