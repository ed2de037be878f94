"""What the commands' arguments share: types that say what they take, and one way to add a command."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = [
    "API_KEY",
    "CACHE_URL",
    "DEFAULT",
    "HOST",
    "HTTP_URL",
    "Commands",
    "add_command",
    "answer_length",
    "api_key",
    "checked",
    "count",
    "port",
    "share",
    "size",
]

HOST = "127.0.0.1"
CACHE_URL, HTTP_URL = "tcp://localhost:5555", "http://localhost:8080"
API_KEY = "VLLM_API_KEY"
"""The environment variable that holds vLLM's API key; `vllm serve` reads the same."""
DEFAULT = "(default: %(default)s)"
T = TypeVar("T")

# typeshed has no public name for what `add_subparsers` returns.
Commands = Any
Prepare = Callable[[argparse.Namespace], Coroutine[Any, Any, int | None]]


def add_command(commands: Commands, name: str, summary: str, prepare: Prepare) -> argparse.ArgumentParser:
    """Add a command.

    Args:
        commands: where to.
        name: its name.
        summary: a sentence.
        prepare: is called with the arguments before there is an event loop, so that it may block; it
            returns the coroutine that is run, whose result is the exit code, None being 0.
    """
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=summary[0].lower() + summary[1:].rstrip("."), description=summary
    )
    command.set_defaults(prepare=prepare)
    return command


def api_key(arguments: argparse.Namespace) -> str | None:
    """Return vLLM's API key: ``--api-key``, else that of the environment; an empty one is none."""
    return arguments.api_key or os.environ.get(API_KEY) or None


def checked(kind: Callable[[str], T], is_right: Callable[[T], bool], rule: str) -> Callable[[str], T]:
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


port = checked(int, lambda number: 0 <= number <= 65535, "a port from 0 to 65535")
count = checked(int, lambda number: number >= 1, "a whole number from 1")
answer_length = checked(int, lambda number: number >= 2, "a whole number from 2")
size = checked(float, lambda number: 0 < number < math.inf, "a size above 0")
share = checked(float, lambda number: 0 < number < 1, "a share between 0 and 1")
