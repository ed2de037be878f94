"""``lmcache-stream demo``."""

from __future__ import annotations

import argparse
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from .arguments import DEFAULT, Commands, add_command, answer_length, share

__all__ = ["add_demo"]


def add_demo(commands: Commands) -> None:
    """Add the command."""
    summary = "Answer questions from a whole KV cache and from edited ones, on this machine alone."
    add = add_command(commands, "demo", summary, _demo).add_argument
    add("--model", metavar="MODEL", help="model folder or Hub id (default: SmolLM2-135M-Instruct)")
    add(
        "--text", type=Path, metavar="FILE", help="own text (default: facts hidden in Python's documentation)"
    )
    add("--question", metavar="TEXT", help="about the text, or about three of Python's documentation")
    add("--ratio", type=share, default=0.5, metavar="SHARE", help=f"of the prompt to drop {DEFAULT}")
    add("--max-tokens", type=answer_length, default=60, metavar="N", help=f"longest answer {DEFAULT}")
    add("--json", action="store_true", help="write the result as JSON to stdout, all else to stderr")


def _demo(arguments: argparse.Namespace) -> Coroutine[Any, Any, None]:
    from ..embedded.demo.command import demo

    return demo(
        model=arguments.model,
        text=arguments.text,
        question=arguments.question,
        ratio=arguments.ratio,
        max_tokens=arguments.max_tokens,
        as_json=arguments.json,
    )
