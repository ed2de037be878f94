"""``lmcache-stream run`` in processes that are killed and interrupted, and in this one."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from lmcache_stream.embedded.sync import EmbeddedStack

from .conftest import Start, files, rows_of, where, write_prompts

TEXT = "the ferry ü came 三 back; "
FAST = ["--policy", "keydiff", "--ratio", "0.5", "--sinks", "1", "--window", "8", "--max-tokens", "2"]


@pytest.mark.timeout(300)
def test_a_job_that_is_killed_ten_times_has_every_row_once(
    stack: EmbeddedStack, start: Start, tmp_path: Path
) -> None:
    # Long enough for writes that a kill can fall into.
    rows = [{"id": f"ü-{n}", "prompt": f"{n:03} {TEXT}", "much": TEXT * 400} for n in range(200)]
    write_prompts(tmp_path / "prompts.jsonl", rows)
    output = tmp_path / "out.jsonl"
    chance = random.Random(7)
    command = ["run", *files(tmp_path), *where(stack), *FAST, "--resume", "--max-concurrency", "8"]
    had = 0
    for _ in range(10):
        job = start(*command)
        job.until_lines(output, had + chance.randint(0, 18))
        time.sleep(chance.random() * 0.02)
        job.send(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        content = output.read_bytes() if output.exists() else b""
        whole = [json.loads(line) for line in content.split(b"\n")[:-1]]
        ids = [row["id"] for row in whole]
        assert len(ids) == len(set(ids))
        # No row that was there is lost.
        assert len(ids) >= had
        had = len(ids)
    assert 0 < had < 200
    job = start(*command)
    assert job.wait() == 0, job.errors.read_text()
    found = rows_of(output)
    assert sorted(row["id"] for row in found) == sorted(row["id"] for row in rows)
    for row in found:
        assert row["error"] is None
        assert row["extra"] == {"much": TEXT * 400}
        assert "".join(text for text, _ in row["pieces"]) == rows[row["line"] - 1]["prompt"]
    assert f"{200 - had} done, 0 failed, {had} skipped, 0 bad" in job.errors.read_text()


def test_a_job_whose_servers_go_away_stops_and_goes_on_with_others(
    tiny: Path, start: Start, tmp_path: Path
) -> None:
    write_prompts(tmp_path / "prompts.jsonl", [{"id": n, "prompt": f"{n:03} {TEXT}"} for n in range(60)])
    limited = ["--max-concurrency", "2"]
    with EmbeddedStack(str(tiny), chunk_size=16, cache_gb=0.05) as stack:
        job = start("run", *files(tmp_path), *where(stack), *FAST, *limited)
        job.until_lines(tmp_path / "out.jsonl", 5)
    assert job.wait() == 1
    told = job.errors.read_text()
    assert "BatchStoppedError: the job was stopped, because the " in told
    assert "the same command with --resume runs the others" in told
    assert "Traceback" not in told
    had = rows_of(tmp_path / "out.jsonl")
    # Only what was under way when the connection broke is a failed row.
    assert sum(row["error"] is not None for row in had) <= 2
    with EmbeddedStack(str(tiny), chunk_size=16, cache_gb=0.05) as stack:
        job = start("run", *files(tmp_path), *where(stack), *FAST, "--retry-failed")
        assert job.wait() == 0, job.errors.read_text()
    rows = rows_of(tmp_path / "out.jsonl")
    assert sorted(row["id"] for row in rows) == list(range(60))
    assert all(row["error"] is None for row in rows)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_job_in_order(
    stack: EmbeddedStack, start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    write_prompts(tmp_path / "prompts.jsonl", [{"id": n, "prompt": f"{n:03} {TEXT}"} for n in range(500)])
    command = ["run", *files(tmp_path), *where(stack), *FAST, "--max-concurrency", "4"]
    job = start(*command)
    job.until_lines(tmp_path / "out.jsonl", 5)
    job.send(number)
    assert job.wait(20) == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert len(rows_of(tmp_path / "out.jsonl")) >= 5
    told = job.errors.read_text()
    assert "the same command with --resume goes on with it" in told
    assert "Traceback" not in told


def test_a_second_interrupt_does_not_wait_for_the_engine(
    stack: EmbeddedStack, start: Start, tmp_path: Path, silent_engine: str
) -> None:
    write_prompts(tmp_path / "prompts.jsonl", [{"id": 1, "prompt_token_ids": [1, 2, 3]}])
    servers = where(stack)
    servers[1] = silent_engine
    arguments = ["--model-path", stack.model_name, "--policy", "none"]
    job = start("run", *files(tmp_path), *servers, *arguments)
    job.until_lines(Path(f"{tmp_path}/asked"), 1)
    job.send(signal.SIGINT)
    time.sleep(0.7)
    # The engine has the request and has not answered: the connection is held.
    assert job.is_running
    began = time.monotonic()
    job.send(signal.SIGINT)
    assert job.wait(20) == 130
    assert time.monotonic() - began < 5
    assert "Traceback" not in job.errors.read_text()
    assert rows_of(tmp_path / "out.jsonl") == []


def test_a_pipe_is_a_source_as_good_as_any(stack: EmbeddedStack, start: Start, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "rows", [{"id": 1, "prompt": TEXT}])
    arguments = ["--prompts", "-", "--output", str(tmp_path / "out.jsonl")]
    job = start("run", *arguments, *where(stack), *FAST, file=str(prompts))
    assert job.wait() == 0, job.errors.read_text()
    assert [row["id"] for row in rows_of(tmp_path / "out.jsonl")] == [1]


def test_input_that_does_not_come_holds_up_neither_rows_nor_the_end(
    stack: EmbeddedStack, start: Start, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    # Both ends are held here, so that the job is never told of an end.
    writer = os.open(pipe, os.O_RDWR)
    os.write(writer, json.dumps({"id": 1, "prompt": TEXT}).encode() + b"\n")
    arguments = ["--prompts", "-", "--output", str(tmp_path / "out.jsonl")]
    job = start("run", *arguments, *where(stack), *FAST, file=str(pipe))
    job.until_lines(tmp_path / "out.jsonl", 1)
    assert job.is_running
    began = time.monotonic()
    job.send(signal.SIGINT)
    assert job.wait(20) == 130
    assert time.monotonic() - began < 5
    os.close(writer)
    assert "rows: 1 done" in job.errors.read_text()
    assert "Traceback" not in job.errors.read_text()
