"""LMCache's own client library, ``lmcache.sdk``, on the embedded server."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest
import torch

import lmcache_stream as lms
from lmcache_stream.embedded.cache import EmbeddedCacheServer

from ..real.install_stack import python_of
from .driver import CHUNK_SIZE, fresh_tokens
from .test_context import geometry, same, some_kv

CLIENT = Path(__file__).with_name("sdk_client.py")
QUIET = {"DO_NOT_TRACK": "1", "LMCACHE_TRACK_USAGE": "false"}


async def run_client(installed: Path, *arguments: str | Path) -> None:
    command = [python_of(installed), CLIENT, *arguments]
    done = await asyncio.to_thread(
        subprocess.run,
        command,
        env={**os.environ, **QUIET},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-4000:]


@pytest.mark.real
@pytest.mark.parametrize("shared_memory", [True, False])
async def test_the_sdk_reads_and_writes_the_same_bytes(
    installed: Path, tmp_path: Path, shared_memory: bool
) -> None:
    shape = geometry()
    first, second = fresh_tokens(3), fresh_tokens(4)
    kv, others = some_kv(shape, first), some_kv(shape, second)
    torch.save({"tokens": first}, tmp_path / "first.pt")
    torch.save({"tokens": second, "kv": others}, tmp_path / "second.pt")
    async with EmbeddedCacheServer(
        chunk_size=CHUNK_SIZE, size_gb=0.01, shared_memory=shared_memory
    ) as server:
        server.announce("served", shape)
        async with lms.connect(server.url, server.http_url, "served") as context:
            assert context.geometry == shape
            assert await context.store(kv, first)
            await run_client(installed, server.url, server.http_url, "served", tmp_path)
            assert same(await context.retrieve(second), others)
    assert same(torch.load(tmp_path / "read.pt"), kv)
    assert same(torch.load(tmp_path / "again.pt"), others)
