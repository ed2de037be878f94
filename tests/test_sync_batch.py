"""The blocking face of a batch."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

import lmcache_stream as lms
from lmcache_stream import sync

from .cache.conftest import FAST, GEOMETRY
from .fakes.engine import ScriptedEngine
from .fakes.lmcache import FakeLMCache
from .fakes.threaded import serving

SHAPE = GEOMETRY.kv_shape(1)


@pytest.fixture
def server() -> Iterator[FakeLMCache]:
    with serving() as fake:
        yield fake
        assert fake.locked == (0, 0)


def open_context(server: FakeLMCache) -> sync.LMCacheContext:
    return sync.connect(server.url, server.http_url, "model", geometry=GEOMETRY, timeouts=FAST)


def prompt_of(number: int) -> list[int]:
    return list(range(1000 * number + 100, 1000 * number + 118))


def first_half(kv: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
    half = len(tokens) // 2
    return kv[:, :, :half], tokens[:half]


def loop_threads() -> int:
    return sum(thread.name == "lmcache-stream loop" for thread in threading.enumerate())


def batch_in(
    context: sync.LMCacheContext, engines: list[ScriptedEngine], limit: int | None = None
) -> sync.LMCacheBatchedStream:
    batch = lms.LMCacheBatchedStream(limit)
    for number, engine in enumerate(engines):
        batch.add(sync.create_request(context, engine, prompt_of(number)))
    return batch


def engines_on(server: FakeLMCache, count: int) -> list[ScriptedEngine]:
    return [ScriptedEngine(server, SHAPE, scripts=[[1, "length"], [7, 8, "stop"]]) for _ in range(count)]


def test_the_whole_job_without_await(server: FakeLMCache) -> None:
    with open_context(server) as context:
        batch = batch_in(context, engines_on(server, 4), 2)
        outcomes = batch.run(first_half, {"max_tokens": 5})
        assert tuple(outcome.stream_id for outcome in outcomes) == batch.stream_ids()
        assert [outcome.token_ids for outcome in outcomes] == [(1, 7, 8)] * 4
        last = batch.stream_ids()[3]
        assert batch.get_stream(last).output_tokens() == [1, 7, 8]
        assert batch.get_perf_metrics("run").completed == len(batch) == 4
        with pytest.raises(lms.InvalidRequestError, match="already"):
            batch.add(batch.get_stream(last))
        with pytest.raises(lms.InvalidRequestError, match="no stream 'x'"):
            batch.get_stream("x")
        with pytest.raises(lms.InvalidRequestError, match="twice"):
            batch.run_streams({}, [last, last])
    assert loop_threads() == 0
    with pytest.raises(lms.ClosedError):
        batch.run_streams({})


def test_one_phase_at_a_time(server: FakeLMCache) -> None:
    with open_context(server) as context:
        batch = batch_in(context, engines_on(server, 2))
        assert batch.prefill({}).output_tokens == 2
        assert batch.modify(first_half).kv_bytes_before == 2 * 16 * GEOMETRY.bytes_per_token
        assert batch.decode({"max_tokens": 5}).output_tokens == 4
        (edited,) = batch.modify_stream(first_half, batch.stream_ids()[:1], timeout=5)
        assert edited.edit is not None
        assert edited.edit.tokens_before == 8
        assert len(batch.run_streams({"max_tokens": 1})) == 2


def test_outcomes_as_they_come_and_a_loop_that_is_left(server: FakeLMCache) -> None:
    with open_context(server) as context:
        engines = engines_on(server, 3)
        engines[0].scripts = [[30.0]]
        batch = batch_in(context, engines)
        started = time.monotonic()
        seen = []
        for outcome in batch.as_completed(first_half, {"max_tokens": 5}):
            seen.append(outcome.stream_id)
            if len(seen) == 2:
                break
        assert time.monotonic() - started < 15
        assert set(seen) == set(batch.stream_ids()[1:])
        # Leaving the loop has waited for the pass that it cancelled.
        assert engines[0].closed == 1
        for engine in engines:
            engine.scripts = []
        assert len(list(batch.as_completed(first_half, {"max_tokens": 1}))) == 3


def test_an_empty_batch_has_no_outcomes_and_leaves_no_loop() -> None:
    batch = sync.LMCacheBatchedStream()
    assert batch.run(first_half, {}) == []
    assert list(batch.as_completed(first_half, {})) == []
    assert batch.prefill({}).streams == 0
    assert loop_threads() == 0


def test_the_methods_are_those_of_the_asynchronous_side() -> None:
    for name, method in vars(lms.AsyncLMCacheBatchedStream).items():
        if not name.startswith("_"):
            blocking = getattr(sync.LMCacheBatchedStream, name)
            theirs, ours = inspect.signature(method), inspect.signature(blocking)
            assert list(ours.parameters.items()) == [
                (key, value if key != "stream" else ours.parameters[key])
                for key, value in theirs.parameters.items()
            ]


def test_an_interrupt_ends_the_batch_and_closes_its_streams(server: FakeLMCache) -> None:
    command = [sys.executable, "-X", "dev", "-m", "tests.sync_script", "batch", server.url, server.http_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0, err
    assert out.splitlines() == ["closed 3", "interrupted", "0 outcomes", "lookup 0"]
    assert "Traceback" not in err
