"""``lmcache-stream serve-cache`` and ``serve-engine``."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING

from .arguments import DEFAULT, HOST, Commands, add_command, count, port, size

if TYPE_CHECKING:
    from ..embedded.cache import EmbeddedCacheServer

__all__ = ["add_serve_cache", "add_serve_engine"]

_DTYPES = ("float32", "bfloat16", "float16")
_HOW_TO_END = "Ctrl-C ends it."


def add_serve_cache(commands: Commands) -> None:
    """Add ``serve-cache``."""
    summary = "Run a cache server that speaks LMCache's multiprocess protocol, until Ctrl-C."
    add = add_command(commands, "serve-cache", summary, _serve_cache).add_argument
    add("--host", default=HOST, help=f"address to listen on {DEFAULT}")
    add("--port", type=port, default=5555, metavar="PORT", help=f"for clients, 0: a free one {DEFAULT}")
    add("--http-port", type=port, default=8080, metavar="PORT", help=f"status, 0: a free one {DEFAULT}")
    add("--chunk-size", type=count, default=256, metavar="N", help=f"tokens of a chunk {DEFAULT}")
    add("--size-gb", type=size, default=1.0, metavar="GB", help=f"memory for KV {DEFAULT}")
    add(
        "--no-shared-memory",
        dest="shared_memory",
        action="store_false",
        help="send KV through sockets (default: through shared memory)",
    )


def add_serve_engine(commands: Commands) -> None:
    """Add ``serve-engine``."""
    summary = "Serve a Hugging Face model through vLLM's completions API, with its KV in a cache server."
    add = add_command(commands, "serve-engine", summary, _serve_engine).add_argument
    add("model", nargs="?", metavar="MODEL", help="folder or Hub id (default: SmolLM2-135M-Instruct)")
    add("--host", default=HOST, help=f"address to listen on {DEFAULT}")
    add("--port", type=port, default=8000, metavar="PORT", help=f"0: a free one {DEFAULT}")
    add("--served-model-name", metavar="NAME", help="the model's name in the API (default: its path)")
    add("--cache-url", default=f"tcp://{HOST}:5555", metavar="URL", help=f"cache server {DEFAULT}")
    add("--cache-http-url", default=f"http://{HOST}:8080", metavar="URL", help=f"its status {DEFAULT}")
    add("--dtype", choices=_DTYPES, default="float32", help=f"of weights and KV {DEFAULT}")
    add("--max-model-len", type=count, metavar="N", help="longest sequence (default: the model's own)")
    add("--offload-queries", action="store_true", help="also store queries, which some policies need")
    add("--workers", type=count, default=1, metavar="N", help=f"requests computed at once {DEFAULT}")


async def _serve_cache(arguments: argparse.Namespace) -> None:
    from ..embedded.serve_cache import serve_cache

    def show(server: EmbeddedCacheServer) -> None:
        memory = f"shared memory {server.shm_name}" if server.shm_name else "no shared memory"
        _say(f"cache server: {server.url} and {server.http_url}, {memory}\n{_HOW_TO_END}")

    await serve_cache(
        host=arguments.host,
        port=arguments.port,
        http_port=arguments.http_port,
        chunk_size=arguments.chunk_size,
        size_gb=arguments.size_gb,
        shared_memory=arguments.shared_memory,
        on_ready=show,
    )


async def _serve_engine(arguments: argparse.Namespace) -> None:
    import torch

    from ..embedded.default_model import default_model
    from ..embedded.engine import EmbeddedEngine

    model = arguments.model or await asyncio.to_thread(default_model)
    async with EmbeddedEngine(
        model,
        host=arguments.host,
        port=arguments.port,
        served_model_name=arguments.served_model_name,
        cache_url=arguments.cache_url,
        cache_http_url=arguments.cache_http_url,
        dtype=getattr(torch, arguments.dtype),
        max_model_len=arguments.max_model_len,
        offload_queries=arguments.offload_queries,
        workers=arguments.workers,
    ) as engine:
        name = arguments.served_model_name or model
        _say(f"engine: {engine.url}, model {name}\n{_HOW_TO_END}")
        await asyncio.Event().wait()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
