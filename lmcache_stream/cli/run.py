"""``lmcache-stream run``."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from ..errors import InvalidRequestError
from .arguments import (
    API_KEY,
    CACHE_URL,
    DEFAULT,
    HTTP_URL,
    Commands,
    add_command,
    api_key,
    checked,
    count,
    share,
)

__all__ = ["add_run"]

_MAX_TOKENS = 256
_TEMPERATURE = 0.0

_tokens = checked(int, lambda number: number >= 0, "a whole number from 0")
_temperature = checked(float, lambda number: 0 <= number < math.inf, "a number from 0")

_DESCRIPTION = """Take each row of a file through prefill, edit and decoding, and write a row a prompt."""
_EPILOG = f"""
prompts: a JSON object a line, with an id and one of prompt (text), messages (a chat) and prompt_token_ids;
other keys are passed through.

A row is written when it is through. A job that was ended, in whatever way, goes on with --resume: rows that
are in the output are not run again.

exit codes: 0 all rows are through; 3 it came to the end, but rows failed or could not be read; 1 an error;
2 wrong usage; 130 Ctrl-C (a second one does not wait for the engine); 143 SIGTERM.

environment: {API_KEY}, where --api-key is not given.
"""


def add_run(commands: Commands) -> None:
    """Add the command."""
    from ..jobs.policies import NO_POLICY, POLICIES

    parser = add_command(commands, "run", _DESCRIPTION, lambda arguments: _run(parser, arguments))
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    add = parser.add_argument
    add("--prompts", required=True, metavar="FILE.jsonl", help="rows to run; - reads standard input")
    add("--output", required=True, type=Path, metavar="FILE.jsonl", help="rows that are through")
    add("--resume", action="store_true", help="go on with an output: run the rows that it lacks")
    add("--retry-failed", action="store_true", help="as --resume, and run rows that failed again")
    add("--report", type=Path, metavar="FILE.json", help="write the figures there at the end")
    add("--no-progress", action="store_true", help="draw no bar (default: where stderr is a terminal)")

    edit = parser.add_argument_group("edit").add_argument
    names = [NO_POLICY, *POLICIES]
    edit("--policy", required=True, choices=names, metavar="POLICY", help=f"one of {', '.join(names)}")
    edit("--ratio", type=share, metavar="SHARE", help="of the prompt to drop; this or --budget")
    edit("--budget", type=count, metavar="N", help="tokens to keep")
    edit(
        "--sinks", type=_tokens, metavar="N", help="first tokens that are always kept (default: the policy's)"
    )
    edit(
        "--window", type=_tokens, metavar="N", help="last tokens that are always kept (default: the policy's)"
    )
    edit("--run", type=count, metavar="N", help="keep or drop runs of N tokens (default: single tokens)")
    edit("--queries-model", metavar="MODEL", help="computes queries (default: the model itself)")
    edit("--baseline", action="store_true", help="also decode from the whole KV")

    sampling = parser.add_argument_group("decoding").add_argument
    sampling("--max-tokens", type=count, metavar="N", help=f"longest answer (default: {_MAX_TOKENS})")
    sampling("--temperature", type=_temperature, metavar="T", help=f"(default: {_TEMPERATURE:g})")
    sampling("--sampling-params", type=_json, metavar="JSON", help="others, under vLLM's names")
    sampling("--max-concurrency", type=count, default=64, metavar="N", help=f"rows at once {DEFAULT}")

    servers = parser.add_argument_group("servers")
    where = servers.add_mutually_exclusive_group(required=True)
    where.add_argument("--engine-url", metavar="URL", help="vLLM, e.g. http://localhost:8000")
    where.add_argument("--embedded", action="store_true", help="a cache server and an engine in this process")
    server = servers.add_argument
    server("--cache-url", metavar="URL", help=f"LMCache's --port (default: {CACHE_URL})")
    server("--http-url", metavar="URL", help=f"its --http-port (default: {HTTP_URL})")
    server("--model", help="name in vLLM's API; embedded: folder or Hub id (default: SmolLM2-135M-Instruct)")
    server("--model-path", metavar="PATH", help="folder or Hub id of its config (default: vLLM's path of it)")
    server("--tokenizer", metavar="MODEL", help="folder or Hub id (default: the model's path)")
    server("--api-key", metavar="KEY", help=f"sent to vLLM (default: of {API_KEY})")


def _json(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Coroutine[Any, Any, int]:
    from ..completions.params import checked_sampling_params
    from ..jobs.policies import NO_POLICY, make_policy
    from .job import Settings, run_job
    from .servers import Addresses

    if arguments.engine_url is not None and arguments.model is None:
        parser.error("--engine-url needs --model, the model's name in vLLM's API")
    servers = ("cache_url", "http_url", "model_path", "api_key")
    given = [f"--{name.replace('_', '-')}" for name in servers if getattr(arguments, name) is not None]
    if arguments.embedded and given:
        parser.error(f"--embedded runs a stack of its own: give it no {' and no '.join(given)}")
    if (arguments.ratio is None) == (arguments.budget is None) and arguments.policy != NO_POLICY:
        parser.error(f"--policy {arguments.policy} needs either --ratio or --budget")
    options = {name: getattr(arguments, name) for name in ("ratio", "budget", "sinks", "window", "run")}
    try:
        policy = make_policy(arguments.policy, **options)
        if arguments.queries_model and not (policy is not None and policy.needs_queries):
            parser.error(f"--queries-model: --policy {arguments.policy} needs no queries")
        params = checked_sampling_params(_sampling(parser, arguments))
    except InvalidRequestError as error:
        parser.error(str(error))
    addresses = None
    if not arguments.embedded:
        addresses = Addresses(
            engine_url=arguments.engine_url,
            cache_url=arguments.cache_url or CACHE_URL,
            http_url=arguments.http_url or HTTP_URL,
            model=arguments.model,
            model_path=arguments.model_path,
            tokenizer=arguments.tokenizer,
            api_key=api_key(arguments),
        )
    return run_job(
        Settings(
            prompts=arguments.prompts,
            output=arguments.output,
            resume=arguments.resume or arguments.retry_failed,
            retry_failed=arguments.retry_failed,
            report=arguments.report,
            progress=not arguments.no_progress and sys.stderr.isatty(),
            policy=policy,
            sampling_params=params,
            queries_model=arguments.queries_model,
            baseline=arguments.baseline,
            max_concurrency=arguments.max_concurrency,
            addresses=addresses,
            model=arguments.model,
            tokenizer=arguments.tokenizer,
        )
    )


def _sampling(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> dict[str, Any]:
    params: dict[str, Any] = dict(arguments.sampling_params or {})
    for name, usual in (("max_tokens", _MAX_TOKENS), ("temperature", _TEMPERATURE)):
        given = getattr(arguments, name)
        if given is not None and name in params:
            parser.error(f"{name} is given twice: by --{name.replace('_', '-')} and in --sampling-params")
        params.setdefault(name, usual if given is None else given)
    return params
