"""The command line: ``lmcache-stream demo``, ``serve-cache`` and ``serve-engine``.

What a subcommand needs is imported when it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import math
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import InvalidRequestError, LMCacheStreamError

if TYPE_CHECKING:
    from .embedded.cache import EmbeddedCacheServer

__all__ = ["main"]

_PROGRAM = "lmcache-stream"
_HOST = "127.0.0.1"
_DEFAULT = "(default: %(default)s)"
_DTYPES = ("float32", "bfloat16", "float16")
_HOW_TO_END = "Ctrl-C ends it."
T = TypeVar("T")
# What the extra `embedded` brings.
_EXTRA = ("accelerate", "gguf", "rich", "safetensors", "tokenizers", "transformers")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0: done. 1: an error, told in one line on stderr. 2: wrong usage. 130 and 143: ended by Ctrl-C and by
    SIGTERM, everything being closed.
    """
    arguments = _parser().parse_args(argv)
    try:
        asyncio.run(_until_terminated(arguments.prepare(arguments)))
    except KeyboardInterrupt:
        return 130
    except asyncio.CancelledError:
        return 143
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        return _failed(InvalidRequestError(f"{package} is missing: pip install 'lmcache-stream[embedded]'"))
    except (LMCacheStreamError, OSError) as error:
        return _failed(error)
    return 0


def _failed(error: Exception) -> int:
    text = " ".join(str(error).split())
    sys.stderr.write(f"{_PROGRAM}: {type(error).__name__}: {text}\n")
    return 1


async def _until_terminated(command: Coroutine[Any, Any, None]) -> None:
    """Run ``command``; SIGTERM cancels it, as Ctrl-C does, so that segments and sockets are closed."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        await command
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _demo(arguments: argparse.Namespace) -> Coroutine[Any, Any, None]:
    from .embedded.demo.command import demo

    return demo(
        model=arguments.model,
        text=arguments.text,
        question=arguments.question,
        ratio=arguments.ratio,
        max_tokens=arguments.max_tokens,
        as_json=arguments.json,
    )


async def _serve_cache(arguments: argparse.Namespace) -> None:
    from .embedded.serve_cache import serve_cache

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

    from .embedded.default_model import default_model
    from .embedded.engine import EmbeddedEngine

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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM, description="Edit the KV cache of a running vLLM + LMCache, or try it without both."
    )
    version = importlib.metadata.version("lmcache-stream")
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {version}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (_add_demo, _add_serve_cache, _add_serve_engine):
        add(commands)
    return parser


# typeshed has no public name for what `add_subparsers` returns.
_Commands = Any
_Prepare = Callable[[argparse.Namespace], Coroutine[Any, Any, None]]


def _add_command(commands: _Commands, name: str, summary: str, prepare: _Prepare) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=summary[0].lower() + summary[1:].rstrip("."), description=summary
    )
    command.set_defaults(prepare=prepare)
    return command


def _checked(kind: Callable[[str], T], is_right: Callable[[T], bool], rule: str) -> Callable[[str], T]:
    """Return an argument type that says by ``rule`` what it takes."""

    def convert(text: str) -> T:
        try:
            value = kind(text)
        except ValueError:
            pass
        else:
            if is_right(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {rule}")

    return convert


_port = _checked(int, lambda number: 0 <= number <= 65535, "a port from 0 to 65535")
_count = _checked(int, lambda number: number >= 1, "a whole number from 1")
_answer_length = _checked(int, lambda number: number >= 2, "a whole number from 2")
_size = _checked(float, lambda number: 0 < number < math.inf, "a size above 0")
_share = _checked(float, lambda number: 0 < number < 1, "a share between 0 and 1")


def _add_demo(commands: _Commands) -> None:
    summary = "Answer questions from a whole KV cache and from edited ones, on this machine alone."
    add = _add_command(commands, "demo", summary, _demo).add_argument
    add("--model", metavar="MODEL", help="model folder or Hub id (default: SmolLM2-135M-Instruct)")
    add(
        "--text", type=Path, metavar="FILE", help="own text (default: facts hidden in Python's documentation)"
    )
    add("--question", metavar="TEXT", help="about the text, or about three of Python's documentation")
    add("--ratio", type=_share, default=0.5, metavar="SHARE", help=f"of the prompt to drop {_DEFAULT}")
    add("--max-tokens", type=_answer_length, default=60, metavar="N", help=f"longest answer {_DEFAULT}")
    add("--json", action="store_true", help="write the result as JSON to stdout, all else to stderr")


def _add_serve_cache(commands: _Commands) -> None:
    summary = "Run a cache server that speaks LMCache's multiprocess protocol, until Ctrl-C."
    add = _add_command(commands, "serve-cache", summary, _serve_cache).add_argument
    add("--host", default=_HOST, help=f"address to listen on {_DEFAULT}")
    add("--port", type=_port, default=5555, metavar="PORT", help=f"for clients, 0: a free one {_DEFAULT}")
    add("--http-port", type=_port, default=8080, metavar="PORT", help=f"status, 0: a free one {_DEFAULT}")
    add("--chunk-size", type=_count, default=256, metavar="N", help=f"tokens of a chunk {_DEFAULT}")
    add("--size-gb", type=_size, default=1.0, metavar="GB", help=f"memory for KV {_DEFAULT}")
    add(
        "--no-shared-memory",
        dest="shared_memory",
        action="store_false",
        help="send KV through sockets (default: through shared memory)",
    )


def _add_serve_engine(commands: _Commands) -> None:
    summary = "Serve a Hugging Face model through vLLM's completions API, with its KV in a cache server."
    add = _add_command(commands, "serve-engine", summary, _serve_engine).add_argument
    add("model", nargs="?", metavar="MODEL", help="folder or Hub id (default: SmolLM2-135M-Instruct)")
    add("--host", default=_HOST, help=f"address to listen on {_DEFAULT}")
    add("--port", type=_port, default=8000, metavar="PORT", help=f"0: a free one {_DEFAULT}")
    add("--served-model-name", metavar="NAME", help="the model's name in the API (default: its path)")
    add("--cache-url", default=f"tcp://{_HOST}:5555", metavar="URL", help=f"cache server {_DEFAULT}")
    add("--cache-http-url", default=f"http://{_HOST}:8080", metavar="URL", help=f"its status {_DEFAULT}")
    add("--dtype", choices=_DTYPES, default="float32", help=f"of weights and KV {_DEFAULT}")
    add("--max-model-len", type=_count, metavar="N", help="longest sequence (default: the model's own)")
    add("--offload-queries", action="store_true", help="also store queries, which some policies need")
    add("--workers", type=_count, default=1, metavar="N", help=f"requests computed at once {_DEFAULT}")
