"""Associative recall under token dropping: which policy keeps the fact that is asked?

    python benchmarks/recall.py --samples 50 --output recall.json

A prompt is some 960 tokens of Python's documentation with four sentences "The secret code of NAME is NNNN."
at random places, one of which is asked, and the answer's first words. It is prefilled once on the embedded
stack; then each policy edits a copy of its KV, and the model decodes greedily. An answer is right when it
begins with the code. Only the prompt's whole chunks are edited; what is behind them, part of the question,
is computed by the engine as it decodes.

Sample i is that of seed SEED + i. Texts differ between versions of Python, so its version is told.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lmcache_stream.dropping import (
    RKV,
    TOVA,
    DropPolicy,
    HFQueries,
    KeyDiff,
    KNorm,
    RandomDrop,
    SnapKV,
    StreamingLLM,
    ValueDiff,
    WholeChunks,
)
from lmcache_stream.embedded import EmbeddedStack
from lmcache_stream.embedded.demo.recall_run import prefill, recall
from lmcache_stream.embedded.demo.recall_task import make_task, recall_prompt
from lmcache_stream.errors import LMCacheStreamError

SINKS, WINDOW = 4, 32

POLICIES: dict[str, Callable[..., DropPolicy | WholeChunks]] = {
    "RandomDrop": RandomDrop,
    "StreamingLLM": StreamingLLM,
    "KNorm": KNorm,
    "KeyDiff": KeyDiff,
    "KeyDiff-rotated": partial(KeyDiff, rotated=True),
    "KeyDiff-runs-of-8": lambda **given: WholeChunks(KeyDiff(**given), 8),
    "ValueDiff": ValueDiff,
    "ValueDiff-runs-of-8": lambda **given: WholeChunks(ValueDiff(**given), 8),
    "TOVA": TOVA,
    "SnapKV": SnapKV,
    "SnapKV-max": partial(SnapKV, reduce="max"),
    "RKV": RKV,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One cell of one sample; ``policy`` is None for the whole KV, ``fact_kept`` a share of its tokens."""

    seed: int
    policy: str | None
    ratio: float
    prompt_tokens: int
    kept_tokens: int
    code: str
    answer: str
    is_right: bool
    fact_kept: float


def make_policy(name: str, ratio: float, seed: int) -> DropPolicy | WholeChunks:
    """Return a policy that always keeps sinks and window; the random one draws by the sample's seed."""
    seeded = {"seed": seed} if name == "RandomDrop" else {}
    return POLICIES[name](ratio=ratio, sinks=SINKS, window=WINDOW, **seeded)


async def measure(options: argparse.Namespace, outcomes: list[Outcome], settings: dict[str, Any]) -> None:
    """Add the outcomes to ``outcomes``, a whole sample at a time, and what was run to ``settings``."""
    cells = [(name, ratio) for name in options.policies for ratio in options.ratios]
    async with (
        EmbeddedStack(options.model, chunk_size=options.chunk_size) as stack,
        stack.connect() as context,
    ):
        settings.update(settings_of(options, stack))
        print(json.dumps(settings), file=sys.stderr)
        queries = HFQueries(stack.model_name, window=WINDOW)
        progress = Progress(options.samples * (len(cells) + 1))
        for seed in range(options.seed, options.seed + options.samples):
            task = make_task(stack.tokenizer, seed=seed, prompt_tokens=options.prompt_tokens)
            prompt = recall_prompt(stack.tokenizer, task)
            salt = f"recall-{seed}"
            await prefill(stack, context, prompt, salt)
            found: list[Outcome] = []
            for name, ratio in [(None, 0.0), *cells]:
                policy = None if name is None else make_policy(name, ratio, seed)
                answer = await recall(stack, context, task, prompt, salt, policy, queries=queries)
                found.append(
                    Outcome(
                        seed=seed,
                        policy=name,
                        ratio=ratio,
                        prompt_tokens=len(prompt.token_ids),
                        kept_tokens=len(answer.kept_indices),
                        code=task.code,
                        answer=answer.text,
                        is_right=answer.is_right,
                        fact_kept=answer.fact_kept / len(prompt.fact),
                    )
                )
                progress.step(f"seed {seed}, {name or 'whole KV'} {ratio:g}")
            outcomes += found
        progress.end()


def settings_of(options: argparse.Namespace, stack: EmbeddedStack) -> dict[str, Any]:
    """Return all that the result depends on."""
    return {
        "model": Path(stack.model_name).name,
        "dtype": str(stack.geometry.dtype).removeprefix("torch."),
        "seeds": [options.seed, options.seed + options.samples - 1],
        "prompt_tokens": options.prompt_tokens,
        "chunk_size": options.chunk_size,
        "sinks": SINKS,
        "window": WINDOW,
        "policies": {
            name: {
                field: value
                for field, value in asdict(make_policy(name, 0.5, 0)).items()
                if field not in ("ratio", "budget", "sinks", "window", "seed")
            }
            for name in options.policies
        },
        "ratios": options.ratios,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


class Progress:
    """A line on stderr, drawn anew at each step; nothing where stderr is no terminal."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._started = time.monotonic()

    def step(self, words: str) -> None:
        self._done += 1
        if sys.stderr.isatty():
            left = (time.monotonic() - self._started) / self._done * (self._total - self._done)
            line = f"{self._done}/{self._total}  {left / 60:.0f} min left  {words}"
            print(f"\r{line[:78]:<78}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if sys.stderr.isatty():
            print("\r" + " " * 78 + "\r", end="", file=sys.stderr, flush=True)


def table(outcomes: Sequence[Outcome], policies: Sequence[str], ratios: Sequence[float]) -> str:
    """Return right answers and the mean share of the fact's tokens that were kept, as Markdown."""
    head = ["dropped", *(f"{ratio:.0%}: right | fact kept" for ratio in ratios)]
    lines = [f"| {' | '.join(head)} |", "|---" * (1 + 2 * len(ratios)) + "|"]
    whole = [one for one in outcomes if one.policy is None]
    lines.insert(0, f"Nothing dropped: {right_of(whole)} right\n")
    for name in policies:
        cells = [[one for one in outcomes if (one.policy, one.ratio) == (name, ratio)] for ratio in ratios]
        shown = [f"{right_of(cell)} | {kept_of(cell)}" for cell in cells]
        lines.append(f"| {' | '.join([name, *shown])} |")
    return "\n".join(lines)


def right_of(cell: Sequence[Outcome]) -> str:
    """Return right answers of all, and their share with its 95 % interval (Wilson's)."""
    count, right = len(cell), sum(one.is_right for one in cell)
    if not count:
        return "-"
    share, z = right / count, 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return f"{right}/{count} ({max(0.0, middle - half):.0%} to {min(1.0, middle + half):.0%})"


def kept_of(cell: Sequence[Outcome]) -> str:
    """Return the mean share of the fact's tokens that were kept."""
    return f"{sum(one.fact_kept for one in cell) / len(cell):.0%}" if cell else "-"


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; wrong ones end the program with exit code 2."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="folder or Hub id (default: the embedded stack's)")
    add("--samples", type=int, default=50, help="prompts (default: 50)")
    add(
        "--policies",
        nargs="+",
        choices=POLICIES,
        default=list(POLICIES),
        metavar="NAME",
        help=f"of these: {', '.join(POLICIES)} (default: all)",
    )
    add(
        "--ratios",
        nargs="+",
        type=float,
        default=[0.5, 0.75],
        metavar="SHARE",
        help="shares to drop, above 0 and below 1 (default: 0.5 0.75)",
    )
    add("--seed", type=int, default=0, help="of the first sample (default: 0)")
    add("--prompt-tokens", type=int, default=960, help="longest prompt (default: 960)")
    add("--chunk-size", type=int, default=16, help="tokens of a chunk of the cache (default: 16)")
    add("--output", type=Path, metavar="FILE", help="write settings and every outcome as JSON")
    options = parser.parse_args(argv)
    if options.samples < 1 or options.chunk_size < 1:
        parser.error("--samples and --chunk-size must be positive")
    if not all(0 < ratio < 1 for ratio in options.ratios):
        parser.error("--ratios must lie above 0 and below 1")
    return options


def main() -> int:
    """Run it and return the exit code; Ctrl-C shows the samples that were done, and exits with 130."""
    options = parsed()
    outcomes: list[Outcome] = []
    settings: dict[str, Any] = {}
    code = 0
    started = time.monotonic()
    try:
        asyncio.run(measure(options, outcomes, settings))
    except KeyboardInterrupt:
        code = 130
        print(f"\ninterrupted in sample {len({one.seed for one in outcomes}) + 1}", file=sys.stderr)
    except LMCacheStreamError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    settings["seconds"] = round(time.monotonic() - started)
    if outcomes:
        print(table(outcomes, options.policies, options.ratios))
        print(f"\n{settings['seconds']} s")
    if options.output is not None:
        result = {"settings": settings, "outcomes": [asdict(one) for one in outcomes]}
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
