"""``lmcache-stream report``."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from .arguments import DEFAULT, Commands, add_command

__all__ = ["add_report"]


def add_report(commands: Commands) -> None:
    """Add the command."""
    summary = "Write a page, in one HTML file, of what jobs came to: figures, answers, what was dropped."
    add = add_command(commands, "report", summary, _report).add_argument
    add("outputs", nargs="+", type=Path, metavar="OUT.jsonl", help="outputs of `lmcache-stream run`")
    add("--html", type=Path, default=Path("report.html"), metavar="FILE", help=f"the page {DEFAULT}")


async def _report(arguments: argparse.Namespace) -> None:
    from ..report import write_report

    report = await asyncio.to_thread(write_report, arguments.outputs, arguments.html)
    sys.stdout.write(f"{report}\n")
