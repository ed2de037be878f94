"""The command line that both example servers share."""

from __future__ import annotations

import argparse
import math
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import anyio
from serving import add_server_arguments, open_servers, positive, run

from .service import DocumentService, Limits

__all__ = ["Listening", "command"]

Listening = Callable[[DocumentService, str, int], AbstractAsyncContextManager[str]]
"""Serves a service on a host and a port, 0 for a free one, while its block runs; gives its URL."""

_TRY = """\
{url} answers; Ctrl-C or SIGTERM ends it. Try:

curl -N {url}/v1/answers -d '{{"document": "Ada has a cat. Bob has a dog. Eve has a goldfish.",
    "question": "What does Bob have?", "policy": "none", "max_tokens": 16}}'

also {url}/healthz and {url}/metrics"""


def command(description: str | None, listening: Listening) -> None:
    """Read the arguments and serve until a signal comes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = Limits()
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    add("--port", type=_port, default=8900, help="0 for a free one (8900)")
    add("--running", type=positive, default=usual.running, help=f"answers at a time ({usual.running})")
    add("--waiting", type=positive, default=usual.waiting, help=f"requests in the queue ({usual.waiting})")
    add("--grace", type=_seconds, default=20.0, help="seconds that answers get at the end (20)")
    add_server_arguments(parser)

    async def main(args: argparse.Namespace) -> None:
        limits = Limits(running=args.running, waiting=args.waiting)
        async with open_servers(args) as servers, DocumentService(servers, limits) as service:
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                async with listening(service, args.host, args.port) as url:
                    print(_TRY.format(url=url), flush=True)
                    await anext(signals)
                    await _drain(service, args.grace, signals)

    run(main, parser.parse_args())


async def _drain(service: DocumentService, grace: float, signals: AsyncIterator[signal.Signals]) -> None:
    """Let answers end within ``grace`` seconds, or until a second signal comes."""
    async with anyio.create_task_group() as group:

        async def hurry() -> None:
            await anext(signals)
            group.start_soon(service.drain, 0)

        group.start_soon(hurry)
        await service.drain(grace)
        group.cancel_scope.cancel()


def _port(value: str) -> int:
    if not value.isdecimal() or int(value) > 65535:
        raise argparse.ArgumentTypeError(f"{value!r} is not a port")
    return int(value)


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number of seconds")
    return seconds
