"""The embedded stack: both servers behind one name, asynchronous and blocking."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
import torch

import lmcache_stream as lms
from lmcache_stream import sync
from lmcache_stream.embedded import EmbeddedCacheServer, EmbeddedStack, servers
from lmcache_stream.embedded.engine import CausalModel
from lmcache_stream.embedded.sync import EmbeddedStack as SyncEmbeddedStack

from .engine.test_answers import GREEDY, prompt_of

KEPT = [*range(32), *range(128, 192)]


@pytest.fixture(autouse=True)
def pools(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The shared segments of the stacks of one test, none of which may be there at its end."""
    made: list[Path] = []

    class Watched(EmbeddedCacheServer):
        async def __aenter__(self) -> Self:
            await super().__aenter__()
            if self.shm_name:
                made.append(Path("/dev/shm") / self.shm_name)
            return self

    monkeypatch.setattr(servers, "EmbeddedCacheServer", Watched)
    yield made
    assert [path for path in made if path.exists()] == []


def stack_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "embedded" in thread.name]


@pytest.mark.parametrize("shared_memory", [True, False])
async def test_the_main_job(model: CausalModel, pools: list[Path], shared_memory: bool) -> None:
    async with EmbeddedStack(model, cache_gb=0.05, shared_memory=shared_memory) as stack:
        assert [path.exists() for path in pools] == [True] * shared_memory
        assert stack.model_name == model.name
        assert stack.max_model_len == 4096
        # The engine's threads use its own.
        assert stack.tokenizer is not model.tokenizer
        assert stack.tokenizer.get_vocab() == model.tokenizer.get_vocab()
        async with stack.connect() as context:
            assert context.chunk_size == 32
            assert context.geometry == stack.geometry == model.geometry
            stream = lms.create_request(context, stack.post_completion, prompt_of(200))
            await stream.generate({**GREEDY, "max_tokens": 1})
            await stream.modify_kv(lms.keep(KEPT))
            metrics = await stream.generate({**GREEDY, "max_tokens": 8})
            assert metrics.cached_tokens == len(KEPT)
            again = await context.retrieve(stream.tokens[:96], stream.cache_salt)
            assert again is not None
        completions = stack.post_completion
    assert stack_threads() == []
    with pytest.raises(lms.ClosedError):
        _ = stack.url
    with pytest.raises(lms.ClosedError):
        await anext(completions([1], {}, ""))


def test_the_main_job_without_await(model: CausalModel) -> None:
    with SyncEmbeddedStack(model, cache_gb=0.05) as stack, stack.connect() as context:
        stream = sync.create_request(context, stack.post_completion, prompt_of(200))
        stream.generate({**GREEDY, "max_tokens": 1})
        stream.modify_kv(sync.keep(KEPT))
        metrics = stream.generate({**GREEDY, "max_tokens": 8})
        assert metrics.cached_tokens == len(KEPT)
        without_await = stream.output_tokens()
    stack.close()
    assert stack_threads() == []
    assert len(without_await) == 9


@pytest.mark.blocking
async def test_the_blocking_stack_inside_a_running_loop(model: CausalModel) -> None:
    with SyncEmbeddedStack(model, cache_gb=0.05) as stack, stack.connect() as context:
        assert context.lookup(prompt_of(64)) == 0


async def test_remote_names_reach_an_embedded_stack(model: CausalModel) -> None:
    async with (
        EmbeddedStack(model, cache_gb=0.05) as stack,
        lms.connect(stack.url, stack.http_url, stack.model_name) as context,
        lms.VLLMCompletions(stack.engine_url, stack.model_name) as engine,
    ):
        stream = lms.create_request(context, engine, prompt_of(200))
        await stream.generate({**GREEDY, "max_tokens": 1})
        await stream.modify_kv(lms.keep(KEPT))
        metrics = await stream.generate({**GREEDY, "max_tokens": 8})
    assert metrics.cached_tokens == len(KEPT)


async def test_a_stack_is_started_once(model: CausalModel) -> None:
    async with EmbeddedStack(model, cache_gb=0.02) as stack:
        pass
    with pytest.raises(lms.ClosedError, match="started once"):
        await stack.__aenter__()


async def test_two_stacks_at_once(model: CausalModel) -> None:
    async with EmbeddedStack(model, cache_gb=0.02) as one, EmbeddedStack(model, cache_gb=0.02) as other:
        assert len({one.url, one.http_url, one.engine_url, other.url, other.http_url, other.engine_url}) == 6


@pytest.mark.blocking
async def test_a_stack_that_cannot_start_leaves_nothing(tmp_path: Path, pools: list[Path]) -> None:
    with pytest.raises(lms.InvalidRequestError, match=r"cannot load the model .*: there is no such folder"):
        await EmbeddedStack(tmp_path / "nothing").__aenter__()
    with pytest.raises(lms.InvalidRequestError, match="cannot load the model"):
        SyncEmbeddedStack(tmp_path / "nothing").__enter__()
    assert len(pools) == 2
    assert stack_threads() == []


async def test_a_cancel_while_it_starts_leaves_nothing(tiny_folder: Path, pools: list[Path]) -> None:
    cancelled = 0
    for delay in (0.0, 0.005, 0.01, 0.02, 0.04, 0.08):
        stack = EmbeddedStack(tiny_folder, cache_gb=0.02)
        starting = asyncio.create_task(stack.__aenter__())
        await asyncio.sleep(delay)
        starting.cancel()
        try:
            await starting
        except asyncio.CancelledError:
            cancelled += 1
        await stack.aclose()
        assert stack_threads() == []
    assert cancelled >= 2


async def test_a_stack_that_is_forgotten_warns(model: CausalModel) -> None:
    stack = await EmbeddedStack(model, cache_gb=0.02).__aenter__()
    await stack.post_completion.aclose()
    thread = stack._thread
    with pytest.warns(ResourceWarning, match="was not closed"):
        del stack
        gc.collect()
    await asyncio.to_thread(thread.stop)
    assert stack_threads() == []


@pytest.mark.parametrize("busy", [False, True])
def test_a_script_that_ends_without_closing_leaves_no_segment(tiny_folder: Path, busy: bool) -> None:
    work = (
        "import threading\n"
        "run = lambda: list(stack.post_completion([1, 2, 3], {'max_tokens': 4000, 'ignore_eos': True}))\n"
        "threading.Thread(target=run, daemon=True).start()\n"
        "import time; time.sleep(0.5)\n"
    )
    script = (
        "from lmcache_stream.embedded.sync import EmbeddedStack\n"
        f"stack = EmbeddedStack({str(tiny_folder)!r}, cache_gb=0.02).__enter__()\n"
        "print(stack._servers.cache.shm_name, flush=True)\n"
        f"{work if busy else ''}"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    name = done.stdout.strip()
    assert name
    assert not (Path("/dev/shm") / name).exists()


async def test_the_dtype_is_the_cache_s(tiny_folder: Path) -> None:
    async with EmbeddedStack(tiny_folder, cache_gb=0.02, dtype=torch.bfloat16) as stack:
        assert stack.geometry.dtype == torch.bfloat16
        async with stack.connect() as context:
            stream = lms.create_request(context, stack.post_completion, prompt_of(100))
            await stream.generate({**GREEDY, "max_tokens": 1})
            assert (await stream.retrieve_kv()).dtype == torch.bfloat16
