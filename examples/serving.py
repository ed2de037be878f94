"""What the token-dropping examples run on, and their arguments: by default all is in this process."""

from __future__ import annotations

import argparse
import asyncio
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import load_tokenizer

import lmcache_stream as lms

__all__ = [
    "Servers",
    "add_server_arguments",
    "add_text_arguments",
    "hide_progress_bars",
    "make_parser",
    "open_servers",
    "positive",
    "run",
]


@dataclass(frozen=True, slots=True)
class Servers:
    """A cache server and an engine, embedded or real.

    Attributes:
        cache: the connection to the cache server.
        engine: the engine's completions.
        engine_url: where the engine listens.
        tokenizer: that of the model.
        model: the model's folder or Hub id, from which ``HFQueries`` loads it.
    """

    cache: lms.AsyncLMCacheContext
    engine: lms.PostCompletion
    engine_url: str
    tokenizer: Any
    model: str


@asynccontextmanager
async def open_servers(args: argparse.Namespace) -> AsyncIterator[Servers]:
    """Start the embedded stack, or connect to the servers that ``--engine-url`` and its like name."""
    hide_progress_bars()
    if args.engine_url is None:
        from lmcache_stream.embedded import EmbeddedStack

        async with EmbeddedStack(args.model) as stack, stack.connect() as cache:
            yield Servers(cache, stack.post_completion, stack.engine_url, stack.tokenizer, stack.model_name)
        return
    url = args.engine_url.rstrip("/")
    # The engine's path of the model is its name in LMCache.
    root = args.model_path or (await lms.find_model(url, args.model, api_key=args.api_key)).root
    tokenizer = await asyncio.to_thread(load_tokenizer, root)
    async with (
        lms.connect(args.cache_url, args.http_url, root) as cache,
        lms.VLLMCompletions(url, args.model, api_key=args.api_key) as engine,
    ):
        yield Servers(cache, engine, url, tokenizer, root)


def hide_progress_bars() -> None:
    """Keep what transformers tells while it loads a model from between the lines of an example.

    In a notebook it would also warn that there are no widgets to draw its bars with.
    """
    with suppress(ImportError), warnings.catch_warnings():  # The stack says what is to be installed.
        warnings.filterwarnings("ignore", "IProgress not found")
        from transformers.utils import logging

        untyped: Any = logging
        untyped.disable_progress_bar()


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all these examples take."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server_arguments(parser)
    add = parser.add_argument
    add("--picture", type=_png, metavar="FILE.png", help="draw what was kept")
    add("--max-tokens", type=positive, default=14, metavar="N", help="tokens of an answer (14)")
    return parser


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add those that say what ``open_servers`` opens."""
    parser.add_argument(
        "--model", help="a folder or Hub id (SmolLM2-135M-Instruct); of a real vLLM the name in its API"
    )
    real = parser.add_argument_group("real servers instead of the embedded stack").add_argument
    real("--engine-url", help="vLLM, e.g. http://localhost:8000")
    real("--cache-url", default="tcp://localhost:5555", help="LMCache's --port (tcp://localhost:5555)")
    real("--http-url", default="http://localhost:8080", help="its --http-port (http://localhost:8080)")
    real("--model-path", help="the model's name in LMCache; by default vLLM is asked")
    real("--api-key", help="sent to vLLM as a bearer token")


def add_text_arguments(parser: argparse.ArgumentParser, *, ratios: tuple[float, ...]) -> None:
    """Add those of the examples that ask a question about a text, once for each share to drop."""
    add = parser.add_argument
    usual = " ".join(map(str, ratios))
    add("--ratio", type=_share, nargs="+", default=ratios, help=f"shares of the prompt to drop ({usual})")
    add("--text", type=_text, metavar="FILE", help="a text file (a ferry's log)")
    add("--question", help="about the text (what it says of a password)")


def run(main: Callable[[argparse.Namespace], Coroutine[Any, Any, None]], args: argparse.Namespace) -> None:
    """Run an example; its errors are one line, and Ctrl-C closes everything that it opened."""
    if args.engine_url is not None and args.model is None:
        raise SystemExit("--engine-url needs --model, the model's name in vLLM's API")
    try:
        asyncio.run(main(args))
    except (lms.LMCacheStreamError, OSError) as error:
        raise SystemExit(f"{type(error).__name__}: {' '.join(str(error).split())}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _png(value: str) -> Path:
    path = Path(value)
    if path.suffix.lower() != ".png" or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{value!r} is not a .png file in a folder that exists")
    return path


def positive(value: str) -> int:
    """Read an argument that counts something."""
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not a whole number from 1")
    return int(value)


def _share(value: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = 0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not a share between 0 and 1")
    return share


def _text(value: str) -> str:
    try:
        text = Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{value} is empty")
    return text
