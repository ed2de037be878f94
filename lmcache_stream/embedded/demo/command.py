"""``lmcache-stream demo``: starts the embedded stack, runs the demo on it and shows what came of it."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from rich.console import Console

from ...dropping import HFQueries
from ...errors import InvalidRequestError
from ..default_model import default_model
from .as_json import comparison_data, recall_data
from .documents import Document, builtin_documents
from .recall_render import RecallProgress, recall_table
from .recall_run import Recall, demo_policies, run_recall
from .render import DocumentProgress, comparison_table
from .run import Comparison, Options, Stack, run_demo

__all__ = ["choose_documents", "compare_all", "demo", "recall_all"]

_DEFAULT_QUESTION = "What is this text about? Answer in two sentences."
_RECALL_SEEDS = range(3)


def choose_documents(text: Path | None, question: str | None) -> tuple[Document, ...]:
    """Return the document in the file ``text``, or those that come with the demo: one, or with a
    ``question`` all.

    Raises:
        InvalidRequestError: the file cannot be read as UTF-8 text or is empty.
    """
    if text is None:
        return builtin_documents(question) if question else builtin_documents()[:1]
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"--text {text}: {error}") from error
    if not content.strip():
        raise InvalidRequestError(f"--text {text}: the file is empty")
    return (Document(text.name, content, question or _DEFAULT_QUESTION),)


def demo(
    *,
    model: str | None,
    text: Path | None,
    question: str | None,
    ratio: float,
    max_tokens: int,
    as_json: bool,
) -> Coroutine[Any, Any, None]:
    """Read the text and get the model ready, which blocks, and return what runs the demo.

    With ``as_json`` the result alone goes to stdout, all else to stderr.

    Raises:
        InvalidRequestError: the text cannot be read, or packages are missing.
    """
    documents = choose_documents(text, question)
    options = Options(ratio=ratio, max_tokens=max_tokens)
    console = Console(stderr=as_json)
    if model is None:
        _say(console, "Preparing the default model; the first time it is converted, which takes a while.")
        with _quiet_stdout(as_json):
            model = default_model()
    # Who brings a text or a question wants an answer to that.
    seeds = range(0) if text or question else _RECALL_SEEDS
    return _run(model, seeds, documents, options, console, as_json)


async def _run(
    model: str,
    seeds: range,
    documents: tuple[Document, ...],
    options: Options,
    console: Console,
    as_json: bool,
) -> None:
    with _quiet_stdout(as_json):
        from lmcache_stream.embedded import EmbeddedStack

        _say(console, f"Starting a cache server and an engine with {model} in this process.")
        async with EmbeddedStack(model=model) as stack:
            recalls: list[Recall] = []
            if seeds:
                queries = HFQueries(stack.model_name)
                recalls = await recall_all(stack, seeds, queries, options, console, tables=not as_json)
            comparisons = await compare_all(stack, documents, options, console, tables=not as_json)
    if as_json:
        found = [comparison_data(comparison) for comparison in comparisons]
        settings = {"model": model, "ratio": options.ratio, "max_tokens": options.max_tokens}
        recalled = [recall_data(recall) for recall in recalls]
        result = {**settings, "recall": recalled, "documents": found}
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
        sys.stdout.flush()


async def recall_all(
    stack: Stack,
    seeds: range,
    queries: HFQueries,
    options: Options,
    console: Console,
    *,
    tables: bool,
) -> list[Recall]:
    """Ask for a fact in each prompt, with progress bars on ``console``, and a table there as each is done."""
    policies = demo_policies(options.ratio)
    _say(
        console,
        f"Facts are hidden in a text, one is asked: from the whole KV, and from KV of which a policy dropped "
        f"{options.ratio:.0%}.",
    )
    recalls: list[Recall] = []
    with RecallProgress(console, 1 + len(policies)) as progress:
        run = run_recall(stack, seeds, policies, queries, progress.step)
        async with contextlib.aclosing(run) as results:
            async for recall in results:
                recalls.append(recall)
                if tables:
                    console.print(recall_table(recall))
    return recalls


async def compare_all(
    stack: Stack, documents: tuple[Document, ...], options: Options, console: Console, *, tables: bool
) -> list[Comparison]:
    """Run the demo with progress bars on ``console``, and a table there as each document is done."""
    _say(
        console,
        f"Each prompt is computed, then answered twice: from its whole KV, and from KV of which "
        f"{options.ratio:.0%} in the middle was dropped.",
    )
    comparisons: list[Comparison] = []
    with DocumentProgress(console, documents, options) as progress:
        async with contextlib.aclosing(run_demo(stack, documents, options, progress.step)) as results:
            async for comparison in results:
                progress.finish(len(comparisons))
                comparisons.append(comparison)
                if tables:
                    console.print(comparison_table(comparison))
    return comparisons


def _quiet_stdout(is_wanted: bool) -> contextlib.AbstractContextManager[object]:
    """Whatever a library writes while it works must not get into the JSON."""
    return contextlib.redirect_stdout(sys.stderr) if is_wanted else contextlib.nullcontext()


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
