"""Jobs over the scripted cache server and a scripted engine: every row is in the output, or told."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lmcache_stream as lms
from lmcache_stream.batch.retries import RetryPolicy
from lmcache_stream.dropping import KeyDiff
from lmcache_stream.jobs import Job, Output, Plan, Servers, Source

from ..batch.conftest import ROPE, SHAPE
from ..cache.conftest import FAST, GEOMETRY
from ..fakes.engine import Event, ScriptedEngine
from ..fakes.lmcache import FakeLMCache
from .rows import open_files

POLICY = KeyDiff(ratio=0.5, sinks=1, window=1)
PARAMS = {"max_tokens": 5, "temperature": 0}
PLAN = Plan(policy=POLICY, sampling_params=PARAMS, retries=RetryPolicy(max_attempts=2, first=0.001))


class Words:
    """A tokenizer of characters."""

    chat_template = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, ids))


def text_of(number: int) -> str:
    """Return five chunks of 4 characters and two more, as no other number's."""
    return f"{number:04}: the ferry came.."


class Engine(ScriptedEngine):
    """Answers each prompt with its number; ``trouble`` has an error, seconds or a script for each of a
    number's passes, the first one last."""

    trouble: dict[int, list[Any]]
    pause = 0.0
    most_at_once = 0
    at_once = 0

    async def __call__(
        self, prompt: Sequence[int], params: Mapping[str, Any], salt: str, /
    ) -> AsyncIterator[Event]:
        number = int("".join(map(chr, prompt[:4])))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self.pause)
            trouble = self.trouble.get(number)
            step = trouble.pop() if trouble else None
            if isinstance(step, BaseException):
                raise step
            if isinstance(step, float):
                await asyncio.sleep(step)
            usual = [1000 + number, "length"] if params["max_tokens"] == 1 else [number, 7, "stop"]
            self.scripts.insert(0, step if isinstance(step, list) else usual)
            async for event in super().__call__(prompt, params, salt):
                yield event
        finally:
            self.at_once -= 1


@pytest.fixture
async def server() -> AsyncIterator[FakeLMCache]:
    async with FakeLMCache() as fake:
        yield fake
        assert fake.violations == []
        assert fake.locked == (0, 0)


@pytest.fixture
async def engine(server: FakeLMCache) -> Engine:
    made = Engine(server, SHAPE)
    made.trouble = {}
    return made


@pytest.fixture
async def servers(server: FakeLMCache, engine: Engine) -> AsyncIterator[Servers]:
    async with lms.connect(
        server.url, server.http_url, "model", geometry=GEOMETRY, rope=ROPE, timeouts=FAST
    ) as context:
        yield Servers(context=context, engine=engine, model="served", load_tokenizer=Words, max_model_len=100)


class Folder:
    """Where a job's files are."""

    def __init__(self, path: Path) -> None:
        self.prompts, self.output = path / "prompts.jsonl", path / "out.jsonl"
        self.said: list[str] = []
        self.moves = 0

    def ask(self, *rows: Mapping[str, Any] | str) -> None:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        self.prompts.write_text("".join(f"{line}\n" for line in lines))

    def ask_numbers(self, count: int) -> None:
        self.ask(*({"id": number, "prompt": text_of(number)} for number in range(count)))

    async def run(
        self, servers: Servers, plan: Plan = PLAN, *, resume: bool = False, retry_failed: bool = False
    ) -> Job:
        output = Output(self.output, resume=resume)
        output.open()
        try:
            if retry_failed:
                output.take_failed_out()
            self.job = Job(servers, plan, Source(str(self.prompts), output.done_ids), output)
            await self.job.run(say=self.said.append, moved=self._move)
        finally:
            output.close()
        return self.job

    def _move(self) -> None:
        self.moves += 1

    @property
    def rows(self) -> list[dict[str, Any]]:
        text = self.output.read_text()
        assert text == "" or text.endswith("\n")
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


async def test_every_row_is_answered_from_its_edited_kv(
    folder: Folder, servers: Servers, engine: Engine
) -> None:
    folder.ask_numbers(20)
    engine.pause = 0.02
    job = await folder.run(servers, replace(PLAN, limit=3))
    assert job.counts.done == 20
    assert job.is_through
    assert job.position == (folder.prompts.stat().st_size,) * 2
    assert engine.most_at_once == 3
    rows = sorted(folder.rows, key=lambda row: row["id"])
    for number, row in enumerate(rows):
        assert (row["id"], row["line"], row["model"]) == (number, number + 1, "served")
        # Without the token of the prefill, which was decoded from the whole KV.
        assert (row["token_ids"], row["text"], row["finish_reason"]) == (
            [number, 7],
            f"<{number}><7>",
            "stop",
        )
        assert row["error"] is row["baseline"] is None
        assert (row["kv"]["tokens_before"], row["kv"]["tokens_after"]) == (20, 8)
        assert "".join(text for text, _ in row["pieces"]) == text_of(number)
        kept = "".join(text for text, is_kept in row["pieces"] if is_kept)
        # Two chunks, and what lies behind the whole chunks.
        assert len(kept) == 8 + len(text_of(number)) - 20
        assert row["metrics"]["input_tokens"] == len(kept)
        assert row["metrics"]["cached_tokens"] == 8
        figures = row["metrics"]
        assert figures["attempts"] == 3
        # Of all three, and none of it was waited for in this client.
        assert figures["seconds"] >= figures["prefill_ttft"] + figures["edit_time"] + figures["ttft"]
        assert figures["queue_time"] < 0.05
    prefills = [request for request in engine.requests if request[1]["max_tokens"] == 1]
    assert len(prefills) == len(engine.requests) / 2 == 20
    assert all(salt == "" for _, _, salt in prefills)
    report = job.report()
    assert (report.completed, report.failed, report.outcomes) == (20, 0, ())
    assert report.edit_time is not None
    assert report.edit_time.count == 20


async def test_without_a_policy_there_is_one_pass(folder: Folder, servers: Servers, engine: Engine) -> None:
    folder.ask_numbers(2)
    await folder.run(servers, replace(PLAN, policy=None))
    assert [request[1] for request in engine.requests] == [PARAMS, PARAMS]
    for row in folder.rows:
        assert row["kv"] is row["policy"] is None
        assert row["pieces"] == [[text_of(row["id"]), True]]


async def test_the_baseline_is_decoded_from_the_whole_kv(
    folder: Folder, servers: Servers, engine: Engine
) -> None:
    folder.ask_numbers(1)
    await folder.run(servers, replace(PLAN, baseline=True))
    whole = engine.requests[-1]
    assert (len(whole[0]), whole[1], whole[2]) == (len(text_of(0)), PARAMS, "")
    (row,) = folder.rows
    assert row["baseline"]["token_ids"] == [0, 7]
    assert row["baseline"]["ttft"] > 0


async def test_a_row_that_fails_is_a_row_and_takes_nothing_from_the_others(
    folder: Folder, servers: Servers, engine: Engine
) -> None:
    refusal = lms.EngineStatusError("POST x: HTTP 400: no", status=400, detail="no")
    cut = lms.TruncatedStreamError("cut", token_ids=[3])
    engine.trouble = {1: [refusal], 3: [cut, None], 5: [lms.EngineStreamError("late"), None, None]}
    folder.ask_numbers(6)
    folder.ask(*folder.prompts.read_text().splitlines(), {"id": "short", "prompt": "008"})
    job = await folder.run(servers, replace(PLAN, baseline=True))
    assert (job.counts.done, job.counts.failed) == (3, 4)
    failed = {row["id"]: row["error"] for row in folder.rows if row["error"]}
    assert {name: (error["type"], error["phase"]) for name, error in failed.items()} == {
        1: ("EngineStatusError", "prefill"),
        3: ("TruncatedStreamError", "decode"),
        5: ("EngineStreamError", "baseline"),
        "short": ("InvalidRequestError", "edit"),
    }
    assert failed[1]["message"] == "POST x: HTTP 400: no"
    # What has failed already needs no baseline.
    assert {row["id"] for row in folder.rows if row["baseline"] is not None} == {0, 2, 4, 5}
    (fifth,) = (row for row in folder.rows if row["id"] == 5)
    assert fifth["token_ids"] == [5, 7]
    report = job.report()
    assert (report.completed, report.failed) == (3, 4)
    assert report.failures["EngineStreamError"] == 1


async def test_a_token_of_a_prefill_that_broke_is_no_answer(
    folder: Folder, servers: Servers, engine: Engine
) -> None:
    engine.trouble = {0: [[1000, lms.TruncatedStreamError("cut", token_ids=[1000])]]}
    folder.ask_numbers(1)
    await folder.run(servers)
    (row,) = folder.rows
    assert (row["token_ids"], row["text"], row["error"]["phase"]) == ([], "", "prefill")


async def test_failed_rows_run_again_where_that_is_wanted(
    folder: Folder, servers: Servers, engine: Engine
) -> None:
    engine.trouble = {1: [lms.EngineStreamError("no")]}
    folder.ask_numbers(3)
    await folder.run(servers)
    asked = len(engine.requests)
    job = await folder.run(servers, resume=True)
    assert (job.counts.skipped, job.counts.done, len(engine.requests)) == (3, 0, asked)
    job = await folder.run(servers, resume=True, retry_failed=True)
    assert (job.counts.skipped, job.counts.done) == (2, 1)
    assert sorted(row["id"] for row in folder.rows) == [0, 1, 2]
    assert all(row["error"] is None for row in folder.rows)


async def test_what_is_busy_is_tried_again(folder: Folder, servers: Servers, engine: Engine) -> None:
    engine.trouble = {0: [lms.EngineStatusError("busy", status=503, detail="busy")]}
    folder.ask_numbers(1)
    job = await folder.run(servers)
    assert job.counts.done == 1
    assert folder.rows[0]["metrics"]["attempts"] == 4


async def test_bad_rows_are_told_by_their_lines(folder: Folder, servers: Servers) -> None:
    folder.ask(
        "{",
        "",
        {"id": 1, "prompt": text_of(1)},
        {"id": 1, "prompt": text_of(1)},
        {"id": 2, "messages": [{"role": "user", "content": "x"}]},
        {"id": 3, "prompt": ""},
        {"id": 4, "prompt": text_of(4) * 9},
        {"id": 5, "prompt_token_ids": list(map(ord, text_of(5)))},
    )
    job = await folder.run(servers)
    assert (job.counts.done, job.counts.bad, folder.moves) == (2, 5, 7)
    assert job.position == (folder.prompts.stat().st_size,) * 2
    assert sorted(row["line"] for row in folder.rows) == [3, 8]
    said = [line.partition(":")[::2] for line in folder.said]
    assert [place for place, _ in said] == ["line 1", "line 4", "line 5", "line 6", "line 7"]
    for (_, reason), words in zip(
        said, ["no JSON", "was there before", "no chat template", "empty", "no room"], strict=True
    ):
        assert words in reason


async def test_text_needs_a_tokenizer_and_token_ids_do_not(folder: Folder, servers: Servers) -> None:
    def nothing() -> Any:
        raise lms.InvalidRequestError("no tokenizer here")

    without = replace(servers, load_tokenizer=nothing)
    folder.ask({"id": 5, "prompt_token_ids": list(map(ord, text_of(5)))})
    await folder.run(without)
    assert folder.rows[0]["pieces"] is None
    folder.ask_numbers(1)
    with pytest.raises(lms.InvalidRequestError, match="no tokenizer here"):
        await folder.run(without, resume=True)


@pytest.mark.parametrize("party", ["engine", "cache"])
async def test_an_outage_stops_the_job_and_is_no_rows_fault(
    folder: Folder, servers: Servers, engine: Engine, party: str
) -> None:
    kind = lms.EngineConnectError if party == "engine" else lms.CacheConnectError
    # Row 2 meets it, row 3 is under way.
    engine.trouble = {2: [kind("POST x: refused")] * 2, 3: [30.0]}
    folder.ask_numbers(30)
    with pytest.raises(
        lms.BatchStoppedError, match=rf"the {party} is down: POST x: refused.*--resume"
    ) as caught:
        await folder.run(servers, replace(PLAN, limit=2))
    assert caught.value.party == party
    assert isinstance(caught.value.__cause__, kind)
    ids = [row["id"] for row in folder.rows]
    assert set(ids) <= {0, 1}
    assert not folder.job.is_through
    # The job is over, and its time with it.
    assert folder.job.report() == folder.job.report()
    assert f"{len(ids)} rows are in" in str(caught.value)
    engine.trouble = {}
    await folder.run(servers, resume=True)
    assert sorted(row["id"] for row in folder.rows) == list(range(30))


async def test_a_row_whose_baseline_meets_an_outage_is_run_again(
    folder: Folder, servers: Servers, engine: Engine
) -> None:
    plan = replace(PLAN, baseline=True, limit=1)
    # Behind its prefill and its answer.
    engine.trouble = {1: [*[lms.EngineConnectError("POST x: refused")] * 2, None, None]}
    folder.ask_numbers(2)
    with pytest.raises(lms.BatchStoppedError, match="the engine is down"):
        await folder.run(servers, plan)
    assert [row["id"] for row in folder.rows] == [0]
    engine.trouble = {}
    await folder.run(servers, plan, resume=True)
    assert [(row["id"], row["error"], row["baseline"]["token_ids"]) for row in folder.rows] == [
        (0, None, [0, 7]),
        (1, None, [1, 7]),
    ]


async def test_a_job_that_is_cancelled_at_any_point_goes_on_where_it_was(
    folder: Folder, servers: Servers, engine: Engine, server: FakeLMCache
) -> None:
    folder.ask_numbers(40)
    ends = 0
    for ticks in range(40, 4000, 97):
        task = asyncio.ensure_future(folder.run(servers, replace(PLAN, limit=4), resume=True))
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        try:
            await task
            break
        except asyncio.CancelledError:
            ends += 1
        ids = [row["id"] for row in folder.rows]
        assert len(ids) == len(set(ids))
        assert engine.at_once == 0
    assert ends >= 3
    await folder.run(servers, resume=True)
    assert sorted(row["id"] for row in folder.rows) == list(range(40))
    async with asyncio.timeout(5):
        while server.locked != (0, 0):
            await asyncio.sleep(0.005)


async def test_a_row_that_is_being_written_is_whole_when_a_cancelled_job_is_over(
    folder: Folder, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, begun = Output.append, threading.Event()

    def slowly(self: Output, line: bytes) -> None:
        begun.set()
        time.sleep(0.3)
        append(self, line)

    monkeypatch.setattr(Output, "append", slowly)
    folder.ask_numbers(1)
    task = asyncio.ensure_future(folder.run(servers))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    for _ in range(2):
        # Also where whoever cancelled does so again, because the job does not end at once.
        task.cancel()
        await asyncio.sleep(0.02)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [row["id"] for row in folder.rows] == [0]
    assert folder.job.counts.done == folder.job.report().completed == 1


async def test_a_cancelled_job_does_not_wait_for_a_tokenizer_that_is_being_loaded(
    folder: Folder, servers: Servers
) -> None:
    begun, free = threading.Event(), threading.Event()

    def slowly() -> Any:
        begun.set()
        free.wait(30)
        return Words()

    folder.ask_numbers(1)
    task = asyncio.ensure_future(folder.run(replace(servers, load_tokenizer=slowly)))
    try:
        while not begun.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        async with asyncio.timeout(5):
            with pytest.raises(asyncio.CancelledError):
                await task
    finally:
        free.set()
    await folder.run(servers, resume=True)
    assert [row["id"] for row in folder.rows] == [0]


async def test_an_output_that_cannot_be_written_ends_the_job(
    folder: Folder, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    folder.ask_numbers(10)
    monkeypatch.setattr(Output, "append", full)
    with pytest.raises(OSError, match="No space left"):
        await folder.run(servers)


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_job_lets_its_source_go(
    folder: Folder, servers: Servers, engine: Engine, is_cancelled: bool
) -> None:
    folder.ask_numbers(1)
    engine.pause = 0.05
    task = asyncio.ensure_future(folder.run(servers))
    while not engine.at_once:
        await asyncio.sleep(0.001)
    assert str(folder.prompts) in open_files(folder.prompts.parent)
    if is_cancelled:
        task.cancel()
    await asyncio.wait({task})
    # In a thread, for which a job that is over does not wait.
    async with asyncio.timeout(5):
        while open_files(folder.prompts.parent):
            await asyncio.sleep(0.001)


async def test_a_source_that_cannot_be_read_ends_the_job(folder: Folder, servers: Servers) -> None:
    with pytest.raises(lms.InvalidRequestError, match="No such file"):
        await folder.run(servers)
    assert folder.rows == []
