"""``lmcache-stream doctor``."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from ..errors import InvalidRequestError
from .arguments import API_KEY, CACHE_URL, DEFAULT, HTTP_URL, Commands, add_command, api_key, checked

if TYPE_CHECKING:
    from ..doctor import Targets

__all__ = ["add_doctor"]

_URLS = {
    "engine_url": "http://localhost:8000",
    "cache_url": CACHE_URL,
    "http_url": HTTP_URL,
}
_seconds = checked(float, lambda number: 0 < number < float("inf"), "a number of seconds above 0")


def add_doctor(commands: Commands) -> None:
    """Add the command."""
    summary = "Check a vLLM and its LMCache, and say what is right, what is wrong and what to do."
    add = add_command(commands, "doctor", summary, _doctor).add_argument
    add("--engine-url", metavar="URL", help=f"vLLM's API (default: {_URLS['engine_url']})")
    add("--cache-url", metavar="URL", help=f"LMCache's --port (default: {_URLS['cache_url']})")
    add("--http-url", metavar="URL", help=f"LMCache's --http-port (default: {_URLS['http_url']})")
    add("--model", metavar="NAME", help="served name (default: the only one that vLLM serves)")
    add("--model-path", metavar="PATH", help="folder or Hub id of its config (default: vLLM's path of it)")
    add("--api-key", metavar="KEY", help=f"vLLM's (default: of {API_KEY})")
    add("--timeout", type=_seconds, default=180.0, metavar="S", help=f"seconds for all checks {DEFAULT}")
    add("--json", action="store_true", help="write the results as JSON to stdout, all else to stderr")
    add(
        "--embedded",
        action="store_true",
        help="start the embedded stack and check that, to see what is healthy (--model: folder or Hub id)",
    )


async def _doctor(arguments: argparse.Namespace) -> int:
    from ..doctor import Deadlines, examine
    from ..doctor.render import Printer, as_json

    printer = Printer(sys.stderr if arguments.json else sys.stdout)
    stdout = sys.stdout
    # Whatever a library writes while it works must not get into the JSON.
    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        async with _targets(arguments) as targets:
            results = await examine(
                targets, deadlines=Deadlines(total=arguments.timeout), report=printer.show
            )
    printer.sum_up(results)
    if arguments.json:
        stdout.write(as_json(results) + "\n")
        stdout.flush()
    return 0 if all(result.is_good for result in results) else 1


@asynccontextmanager
async def _targets(arguments: argparse.Namespace) -> AsyncIterator[Targets]:
    from ..doctor import Targets

    given = {name: getattr(arguments, name) for name in _URLS if getattr(arguments, name) is not None}
    if not arguments.embedded:
        yield Targets(
            **{**_URLS, **given},
            model=arguments.model,
            model_path=arguments.model_path,
            api_key=api_key(arguments),
        )
        return
    if given or arguments.model_path or arguments.api_key:
        raise InvalidRequestError("--embedded checks a stack of its own: give it no URL, path or key")
    from ..embedded import EmbeddedStack
    from .servers import hide_progress_bars

    hide_progress_bars()
    sys.stderr.write("Starting a cache server and an engine in this process.\n")
    async with EmbeddedStack(arguments.model) as stack:
        yield Targets(
            engine_url=stack.engine_url,
            cache_url=stack.url,
            http_url=stack.http_url,
            model=stack.model_name,
        )
