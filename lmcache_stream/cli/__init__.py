"""The command line: ``lmcache-stream COMMAND``, a command a module.

What a command needs is imported when it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import atexit
import os
import signal
from collections.abc import Coroutine, Sequence
from typing import Any

from .._version import __version__
from .._workers import wait_at_exit
from ..errors import InvalidRequestError, LMCacheStreamError
from .demo import add_demo
from .doctor import add_doctor
from .report import add_report
from .run import add_run
from .serve import add_serve_cache, add_serve_engine
from .streams import flush_streams, prepare_streams, say

__all__ = ["main"]

_PROGRAM = "lmcache-stream"
# The extra that brings a package which a command may miss.
_EXTRAS = dict.fromkeys(
    ("accelerate", "gguf", "rich", "safetensors", "tokenizers", "transformers"), "embedded"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    0: done. 1: an error, told in one line on stderr. 2: wrong usage. 130 and 143: ended by Ctrl-C and by
    SIGTERM, everything being closed. A command may have more of its own, as ``run`` has 3: some rows failed.
    """
    prepare_streams()
    arguments = _parser().parse_args(argv)
    try:
        return asyncio.run(_until_terminated(arguments.prepare(arguments))) or 0
    except KeyboardInterrupt:
        return _ended(130)
    except asyncio.CancelledError:
        return _ended(143)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        how = f"pip install 'lmcache-stream[{_EXTRAS[package]}]'"
        return _failed(InvalidRequestError(f"{package} is missing: {how}"))
    except (LMCacheStreamError, OSError) as error:
        return _failed(error)


def _ended(code: int) -> int:
    # Before the wait that the threads have of their own, which does not know the code.
    atexit.register(_leave, code)
    return code


def _leave(code: int) -> None:
    """End the process where an interpreter that ends is aborted: a thread is inside torch, for long."""
    if not wait_at_exit():
        flush_streams()
        os._exit(code)


def _failed(error: Exception) -> int:
    text = " ".join(str(error).split())
    say(f"{_PROGRAM}: {type(error).__name__}: {text}")
    return 1


async def _until_terminated(command: Coroutine[Any, Any, int | None]) -> int | None:
    """Run ``command``; SIGTERM cancels it, as Ctrl-C does, so that segments and sockets are closed."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await command
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM, description="Edit the KV cache of a running vLLM + LMCache, or try it without both."
    )
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for add in (add_demo, add_run, add_report, add_doctor, add_serve_cache, add_serve_engine):
        add(commands)
    return parser
