"""The blocking face: in scripts, threads and running loops, interrupted, forked, and forgotten."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import lmcache_stream as lms
from lmcache_stream import sync

from .cache.conftest import FAST, GEOMETRY
from .fakes.engine import ScriptedEngine, kv_of
from .fakes.lmcache import FakeLMCache
from .fakes.threaded import serving

PROMPT = list(range(100, 118))
SHAPE = GEOMETRY.kv_shape(1)


@pytest.fixture
def server() -> Iterator[FakeLMCache]:
    with serving() as fake:
        yield fake


def open_context(server: FakeLMCache) -> sync.LMCacheContext:
    return sync.connect(server.url, server.http_url, "model", geometry=GEOMETRY, timeouts=FAST)


def loop_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "lmcache-stream loop"]


def run_all(server: FakeLMCache, salt: str = "") -> list[int]:
    with open_context(server) as context:
        engine = ScriptedEngine(server, SHAPE, scripts=[[7, "length"], [8, 9, "stop"]])
        stream = sync.create_request(context, engine, PROMPT, salt)
        stream.generate({"max_tokens": 1})
        stream.modify_kv(lambda kv, tokens: (kv[:, :, :8].contiguous(), tokens[:8]))
        kv = stream.retrieve_kv()
        assert torch.equal(kv, kv_of(PROMPT[:8], SHAPE))
        stream.update_kv(kv, PROMPT[:8], tail=[5])
        with stream.open_generation({"max_tokens": 5}) as generation:
            ids = [event.token_id for event in generation]
        assert generation.metrics.output_tokens == 2
        assert generation.finish_reason == "stop"
        assert stream.is_done()
        assert stream.output_text() == "<7><8><9>"
        assert len(stream.edits) == 2
        return ids


def test_the_whole_job_without_await(server: FakeLMCache) -> None:
    assert run_all(server) == [8, 9]
    assert loop_threads() == []


def test_asking_for_a_model_leaves_no_loop_behind() -> None:
    with pytest.raises(lms.EngineConnectError, match=r"GET http://127\.0\.0\.1:1/v1/models"):
        sync.find_model("http://127.0.0.1:1", "small")
    assert loop_threads() == []


async def test_inside_a_running_loop() -> None:
    with serving() as server:
        assert run_all(server) == [8, 9]


def test_in_many_threads_over_one_loop(server: FakeLMCache) -> None:
    with open_context(server), ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda number: run_all(server, f"s{number}"), range(8)))
        assert len(loop_threads()) == 1
    assert results == [[8, 9]] * 8
    assert loop_threads() == []


def test_the_async_context_s_errors_come_through(server: FakeLMCache) -> None:
    with pytest.raises(lms.GeometryError, match="'model'"):
        sync.connect(server.url, server.http_url, "other", timeouts=FAST)
    assert loop_threads() == []
    with open_context(server) as context:
        with pytest.raises(lms.InvalidRequestError):
            context.lookup([-1])
        assert context.retrieve(PROMPT) is None
        assert context.store(kv_of(PROMPT[:8], SHAPE), PROMPT[:8])
        assert context.lookup(PROMPT) == 8
        assert (context.chunk_size, context.geometry, context.model_name) == (4, GEOMETRY, "model")
        assert context.layout_spread is None
        with pytest.raises(lms.GeometryError, match="model_config="):
            _ = context.rope
    context.close()
    with pytest.raises(lms.ClosedError):
        context.lookup(PROMPT)


def test_an_ordinary_generator_is_iterated_and_closed_in_one_thread(server: FakeLMCache) -> None:
    threads: list[str] = []

    def post(
        prompt: Sequence[int], params: Mapping[str, Any], salt: str
    ) -> Iterator[lms.TokenEvent | lms.FinishEvent]:
        try:
            for token in (7, 8, 9):
                threads.append(threading.current_thread().name)
                yield lms.TokenEvent(token, str(token))
            yield lms.FinishEvent("stop")
        finally:
            threads.append(threading.current_thread().name)

    with open_context(server) as context:
        stream = sync.create_request(context, post, PROMPT)
        stream.generate({"max_tokens": 5})
        assert stream.output_tokens() == [7, 8, 9]
        with stream.open_generation({"max_tokens": 5}) as generation:
            next(generation)
        deadline = time.monotonic() + 2
        while len(threads) < 6 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert len(threads) == 6
    assert len(set(threads[:4])) == len(set(threads[4:])) == 1


def test_an_asynchronous_post_completion_will_do(server: FakeLMCache) -> None:
    async def post(
        prompt: Sequence[int], params: Mapping[str, Any], salt: str
    ) -> AsyncIterator[lms.TokenEvent]:
        yield lms.TokenEvent(7, "7")

    with open_context(server) as context:
        stream = sync.create_request(context, post, PROMPT)
        stream.generate({"max_tokens": 5})
        assert stream.output_tokens() == [7]


@pytest.mark.parametrize("wrong", [None, lambda *_: 5, lambda *_: [5]])
def test_what_is_no_post_completion_is_refused(server: FakeLMCache, wrong: Any) -> None:
    with open_context(server) as context, pytest.raises(lms.InvalidRequestError, match="post_completion"):
        sync.create_request(context, wrong, PROMPT).generate({})


def test_a_blocking_call_on_the_loop_s_own_thread_is_refused(server: FakeLMCache) -> None:
    async def post(*_: Any) -> AsyncIterator[lms.TokenEvent]:
        context.lookup(PROMPT)
        yield lms.TokenEvent(1)

    with open_context(server) as context:
        stream = sync.create_request(context, post, PROMPT)
        with pytest.raises(lms.InvalidRequestError, match="loop's own thread"):
            stream.generate({})


_started: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    while _started:
        with _started.pop() as process:
            process.kill()


def start(program: str, server: FakeLMCache) -> subprocess.Popen[str]:
    command = [sys.executable, "-X", "dev", "-m", "tests.sync_script"]
    process = subprocess.Popen(
        [*command, program, server.url, server.http_url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _started.append(process)
    return process


def until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate(timeout=20)


def test_an_interrupt_ends_the_pass_and_leaves_everything_usable(server: FakeLMCache) -> None:
    process = start("interrupted", server)
    until_ready(process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == ["generator closed", "interrupted", "lookup 0"]


def test_an_interrupt_ends_a_call_that_waits_for_the_server(server: FakeLMCache) -> None:
    server.prefetch_done.clear()
    process = start("blocked", server)
    until_ready(process)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    word, seconds = process.stdout.readline().split()
    assert word == "interrupted"
    assert float(seconds) < 2
    process.stdout.close()
    server.prefetch_done.set()
    process.wait(20)
    for stream in (process.stdin, process.stderr):
        assert stream is not None
        stream.close()


def test_the_interpreter_exits_at_once_when_the_server_is_gone() -> None:
    with serving() as server:
        process = start("forgotten", server)
        until_ready(process)
    assert process.stdout is not None
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "exit\n"
    started = time.monotonic()
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - started < 3
    assert process.returncode == 0, err


def test_a_forked_child_is_told_to_make_its_own(server: FakeLMCache) -> None:
    process = start("forked", server)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    child, own, parent = out.splitlines()
    assert "before this process was forked" in child
    assert own == "child's own: 0"
    assert parent == "parent: 0"


def test_the_names_are_those_of_the_asynchronous_side() -> None:
    asynchronous = {name for name in lms.__all__ if "Async" not in name}
    assert asynchronous <= set(sync.__all__)
    assert all(hasattr(sync, name) for name in sync.__all__)


# What streams use of a context; not for callers of the blocking side.
SEAM = {
    "caller_workers",
    "check_kv",
    "edit_workers",
    "fingerprint",
    "hold",
    "pin",
    "read",
    "unpin",
    "unpin_soon",
}


def public(kind: type) -> set[str]:
    """Return the public names of a class, closing under its blocking name."""
    return {name.replace("aclose", "close") for name in dir(kind) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("asynchronous", "blocking", "seam"),
    [
        (lms.AsyncLMCacheContext, sync.LMCacheContext, SEAM),
        (lms.AsyncLMCacheStream, sync.LMCacheStream, set()),
        (lms.Generation, sync.Generation, set()),
        (lms.VLLMCompletions, sync.VLLMCompletions, set()),
    ],
)
def test_each_class_has_the_names_of_its_asynchronous_side(
    asynchronous: type, blocking: type, seam: set[str]
) -> None:
    assert public(asynchronous) - seam <= public(blocking)


@pytest.mark.parametrize("name", ["generate", "open_generation", "retrieve_kv", "update_kv", "modify_kv"])
def test_a_stream_s_operations_take_the_same_arguments(name: str) -> None:
    asynchronous, blocking = (
        inspect.signature(getattr(kind, name)).parameters
        for kind in (lms.AsyncLMCacheStream, sync.LMCacheStream)
    )
    assert dict(asynchronous) == dict(blocking)


def test_connect_takes_the_same_arguments() -> None:
    wanted = list(inspect.signature(lms.connect.__init__).parameters.values())[1:]
    assert list(inspect.signature(sync.connect).parameters.values()) == wanted


def test_a_forgotten_context_warns(server: FakeLMCache) -> None:
    context = open_context(server)
    with pytest.warns(ResourceWarning, match="was not closed"):
        context.__del__()
    context.close()
