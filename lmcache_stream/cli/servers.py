"""What a job runs on: the embedded stack, or servers that its arguments name."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .._workers import Workers
from ..cache.connect import connect
from ..cache.model_config import load_model_config
from ..completions import VLLMCompletions, find_model
from ..errors import GeometryError
from ..jobs import Servers
from ..jobs.tokens import load_tokenizer

__all__ = ["Addresses", "hide_progress_bars", "open_embedded", "open_servers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Addresses:
    """Where a running vLLM and LMCache are.

    Attributes:
        engine_url: vLLM's.
        cache_url: LMCache's ``--port``.
        http_url: LMCache's ``--http-port``.
        model: the model's name in vLLM's API.
        model_path: a folder or Hub id with its configuration and tokenizer; by default what vLLM calls the
            model's root, which is also its name in LMCache.
        tokenizer: a folder or Hub id; by default the model's path.
        api_key: sent to vLLM.
    """

    engine_url: str
    cache_url: str
    http_url: str
    model: str
    model_path: str | None = None
    tokenizer: str | None = None
    api_key: str | None = field(default=None, repr=False)


@asynccontextmanager
async def open_servers(addresses: Addresses) -> AsyncIterator[tuple[Servers, str]]:
    """Connect to running servers; gives them, and the model's path.

    Raises:
        InvalidRequestError: the engine serves no such model, or there is no such tokenizer.
        LMCacheStreamError: one of them cannot be reached, or does not know the model.
    """
    served = await find_model(addresses.engine_url, addresses.model, api_key=addresses.api_key)
    path = addresses.model_path or served.root
    load = partial(load_tokenizer, addresses.tokenizer or path)
    if addresses.tokenizer is not None:
        # Who names one does not want to do without.
        load = partial(_give, await _in_thread(load))
    async with (
        connect(
            addresses.cache_url,
            addresses.http_url,
            served.root,
            model_config=addresses.model_path,
            max_model_len=served.max_model_len,
        ) as context,
        VLLMCompletions(addresses.engine_url, addresses.model, api_key=addresses.api_key) as engine,
    ):
        yield (
            Servers(
                context=context,
                engine=engine,
                model=addresses.model,
                load_tokenizer=load,
                vocab_size=_vocab_size(path),
                max_model_len=served.max_model_len,
            ),
            path,
        )


@asynccontextmanager
async def open_embedded(model: str | None, tokenizer: str | None) -> AsyncIterator[tuple[Servers, str]]:
    """Start the embedded stack with ``model``, by default the demo's; see ``open_servers``."""
    hide_progress_bars()
    from ..embedded import EmbeddedStack

    async with EmbeddedStack(model) as stack, stack.connect() as context:
        named = None if tokenizer is None else await _in_thread(partial(load_tokenizer, tokenizer))
        yield (
            Servers(
                context=context,
                engine=stack.post_completion,
                model=stack.model_name,
                load_tokenizer=partial(_give, stack.tokenizer if named is None else named),
                vocab_size=_vocab_size(stack.model_name),
                max_model_len=stack.max_model_len,
            ),
            stack.model_name,
        )


def _vocab_size(path: str) -> int | None:
    try:
        config = load_model_config(None, path)
    except GeometryError:
        # Whether KV of this model can be edited is not asked here.
        return None
    return None if config is None else config.vocab_size


def _give(tokenizer: Any) -> Any:
    return tokenizer


async def _in_thread(load: partial[Any]) -> Any:
    workers = Workers("lmcache-stream tokenizer", 1)
    try:
        return await workers.run(load)
    finally:
        workers.close()


def hide_progress_bars() -> None:
    """Keep what transformers tells while it loads a model from between a command's own lines."""
    with contextlib.suppress(ImportError):  # The stack says what is missing.
        from transformers.utils import logging

        untyped: Any = logging
        untyped.disable_progress_bar()
