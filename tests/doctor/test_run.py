"""The order of the checks, and that nothing is left wherever they are cut off."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from lmcache_stream.cache.context import AsyncLMCacheContext
from lmcache_stream.doctor import Deadlines, Result, Status, Targets, examine
from lmcache_stream.doctor.chart import Chart
from lmcache_stream.doctor.checks import CHECKS, Check
from lmcache_stream.doctor.results import Finding, failed, ok, warning
from lmcache_stream.errors import InvalidRequestError

from ..cancelling import cancelled_at
from .conftest import Stage, clients_of, http_server, nothing_is_held
from .lines import DEADLINES, examined


def test_a_check_needs_only_what_comes_before_it() -> None:
    seen: list[str] = []
    for check in CHECKS:
        assert set(check.needs) <= set(seen), check.path
        assert check.seconds(Deadlines()) > 0
        seen.append(check.path)
    assert len(set(seen)) == len(CHECKS)


async def test_what_others_need_and_the_time_for_all_decide_what_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check(name: str, finding: Finding, *needs: str, seconds: float = 0.0) -> Check:
        async def run(chart: Chart) -> Finding:
            await asyncio.sleep(seconds)
            return finding

        return Check("g", name, run, [f"g/{need}" for need in needs])

    checks = (
        check("good", ok("well")),
        check("poor", warning("so so", "x"), "good"),
        check("behind it", ok("well"), "poor"),
        check("bad", failed("no", "x")),
        check("needs it", ok("well"), "behind it", "bad"),
        check("needs that", ok("well"), "needs it"),
        check("slow", ok("well"), seconds=30.0),
        check("late", ok("well")),
    )
    monkeypatch.setattr("lmcache_stream.doctor.run.CHECKS", checks)
    results = await examine(Targets(), deadlines=Deadlines(total=0.2))
    assert [(one.name, str(one.status), one.seen) for one in results] == [
        ("good", "ok", "well"),
        ("poor", "warning", "so so"),
        ("behind it", "ok", "well"),
        ("bad", "failed", "no"),
        ("needs it", "not checked", "because of g: bad"),
        # What is at the root of it.
        ("needs that", "not checked", "because of g: bad"),
        ("slow", "failed", "not through when the 0.2 s for all checks were over"),
        ("late", "not checked", "the 0.2 s for all checks are over"),
    ]


@pytest.mark.timeout(300)
async def test_a_cancel_anywhere_leaves_nothing(stage: Stage) -> None:
    clients = await clients_of(stage.cache)
    number, cut = 1, 0
    while await cancelled_at(examine(stage.targets, deadlines=DEADLINES), number):
        await nothing_is_held(stage.cache, clients)
        cut += 1
        number += 1 + number // 6
    await nothing_is_held(stage.cache, clients)
    assert cut > 15


@pytest.mark.parametrize("check", [check.path for check in CHECKS])
async def test_a_cancel_between_two_checks_leaves_nothing(stage: Stage, check: str) -> None:
    clients = await clients_of(stage.cache)
    task: asyncio.Task[list[Result]]

    def cancel(result: Result) -> None:
        if f"{result.group}/{result.name}" == check:
            task.cancel()

    task = asyncio.create_task(examine(stage.targets, deadlines=DEADLINES, report=cancel))
    await asyncio.wait({task})
    # Nothing is waited for behind the last check but the closing, which a cancel does not cut short.
    assert task.cancelled()
    await nothing_is_held(stage.cache, clients)


async def test_cancels_without_end_do_not_interrupt_the_closing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = await clients_of(stage.cache)
    closed: list[str] = []
    real = AsyncLMCacheContext.aclose

    async def slowly(context: AsyncLMCacheContext) -> None:
        await asyncio.sleep(0.2)
        await real(context)
        closed.append(context.model_name)

    monkeypatch.setattr(AsyncLMCacheContext, "aclose", slowly)
    behind = asyncio.Event()

    def tell(result: Result) -> None:
        if result.name == "offload":
            behind.set()

    task = asyncio.create_task(examine(stage.targets, deadlines=DEADLINES, report=tell))
    await asyncio.wait_for(behind.wait(), 20)
    while not task.done():
        task.cancel()
        await asyncio.sleep(0.01)
    assert task.cancelled()
    assert closed == [stage.model.name]
    await nothing_is_held(stage.cache, clients)


async def test_two_at_once_do_not_disturb_each_other(stage: Stage) -> None:
    clients = await clients_of(stage.cache)
    for results in await asyncio.gather(examined(stage.targets), examined(stage.targets)):
        assert {one.status for one in results.values()} == {Status.OK}
    await nothing_is_held(stage.cache, clients)


async def test_an_engine_that_hangs_is_left_in_time(stage: Stage) -> None:
    async def hang(request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "tiny"}]})
        await asyncio.sleep(60)
        raise AssertionError

    async with http_server(hang) as address:
        targets = replace(stage.targets, engine_url=address)
        task = asyncio.create_task(examine(targets, deadlines=replace(DEADLINES, answer=0.2)))
        await asyncio.sleep(1)
        began = time.monotonic()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        assert time.monotonic() - began < 9


@pytest.mark.parametrize(
    "wrong",
    [
        {"engine_url": "localhost:8000"},
        {"engine_url": "tcp://localhost:8000"},
        {"engine_url": "http://user:password@localhost:8000"},
        {"cache_url": "http://localhost:5555"},
        {"cache_url": "tcp://localhost"},
        {"http_url": "tcp://localhost:8080"},
    ],
)
def test_a_url_of_the_wrong_form_is_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidRequestError, match=f"{next(iter(wrong))}|holds credentials"):
        Targets(**wrong)


@pytest.mark.parametrize("name", ["answer", "completion", "offload", "transfer", "total"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_deadline_is_a_positive_number(name: str, value: float) -> None:
    with pytest.raises(InvalidRequestError, match=f"deadlines: {name}"):
        Deadlines(**{name: value})


async def test_a_zeromq_socket_is_asked_nothing_in_http() -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        root = f"http://127.0.0.1:{port}"
        targets = Targets(engine_url=root, http_url=root, cache_url="tcp://127.0.0.1:9", model="m" * 100)
        results = await examine(targets)
        # LMCache's thread dies of a message that is not its own.
        assert not await socket.poll(500)
    seen = {f"{one.group}/{one.name}": one.seen for one in results}
    for group in ("engine", "cache HTTP"):
        assert seen[f"{group}/reachable"] == f"a ZeroMQ socket answers at {root}, not HTTP"
