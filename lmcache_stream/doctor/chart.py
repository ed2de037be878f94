"""What is examined, how long that may take, and what the checks have found so far."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from .._checks import checked_seconds, checked_url
from ..cache.context import AsyncLMCacheContext
from ..cache.messages import RegistrationReply
from ..cache.model_config import ModelConfig
from ..cache.requests import RequestClient
from ..completions import VLLMCompletions
from ..completions.endpoint import Endpoint
from ..completions.models import ServedModel
from ..completions.params import request_headers
from ..errors import InvalidRequestError
from .web import Answer

__all__ = ["Chart", "Deadlines", "ServedModel", "Targets", "known"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What is examined.

    Attributes:
        engine_url: vLLM's API, ``http://HOST:PORT``, with or without ``/v1``.
        cache_url: the ``--port`` of ``lmcache server``, ``tcp://HOST:PORT``.
        http_url: its ``--http-port``, ``http://HOST:PORT``.
        model: the name that vLLM serves the model under; None for the only one that it serves.
        model_path: folder, config.json or Hub id of the model's configuration, where that is not what vLLM
            calls the model's root; it is also a name to look for in LMCache.
        api_key: of the engine.

    Raises:
        InvalidRequestError: a URL without scheme, host or port, or a key that no header can hold.
    """

    engine_url: str = "http://localhost:8000"
    cache_url: str = "tcp://localhost:5555"
    http_url: str = "http://localhost:8080"
    model: str | None = None
    model_path: str | None = None
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "cache_url", checked_url(self.cache_url, ("tcp",), "cache_url"))
        object.__setattr__(self, "http_url", checked_url(self.http_url, ("http", "https"), "http_url"))
        engine_url = checked_url(self.engine_url, ("http", "https"), "engine_url")
        object.__setattr__(self, "engine_url", Endpoint.of(engine_url).root)
        request_headers(self.api_key, None)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a question to the engine."""
        return {**request_headers(self.api_key, None), "Accept": "application/json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Seconds that checks may take.

    Attributes:
        answer: one answer of a server to a question.
        completion: one pass of the engine; the first after its start may take half a minute.
        offload: from a pass to its KV in the cache.
        transfer: one retrieve or store.
        total: all checks; giving back what they hold comes on top.
    """

    answer: float = 5.0
    completion: float = 60.0
    offload: float = 15.0
    transfer: float = 30.0
    total: float = 180.0

    def __post_init__(self) -> None:
        for name in ("answer", "completion", "offload", "transfer", "total"):
            if checked_seconds(getattr(self, name), f"deadlines: {name}") == 0:
                raise InvalidRequestError(f"deadlines: {name} must be a positive number of seconds")


def fresh_salts() -> tuple[str, str, str]:
    """Return three cache salts that nobody has used."""
    stem = f"lmcache-stream-doctor-{secrets.token_urlsafe(12)}"
    return f"{stem}-1", f"{stem}-2", f"{stem}-3"


@dataclass(slots=True)
class Chart:
    """What the checks have found; each reads what those before it have written.

    Attributes:
        targets: what is examined.
        deadlines: how long that may take.
        possessions: what is to be closed at the end.
        salts: of the prefill, of the copy, and one under which nothing is stored.
        models: the engine's answer to ``/v1/models``.
        served: the entries of it.
        served_model: the one that is meant.
        engine: a client of the engine.
        cached_tokens: of its first pass, where it reports them.
        status_answer: the cache's answer to ``/status``.
        status: what it says.
        config: the section ``mp`` of its ``/config``.
        requests: a connection to its operations.
        chunk_size: tokens of a chunk, as the operations say.
        instance_id: under which the doctor was registered for a moment.
        reply: the answer to that.
        registered: the clients of the status meanwhile, None where it does not list them.
        cache_name: the model's name in LMCache.
        model_config: its configuration.
        prompt: of the round trip: whole chunks and one token.
        cache: a client of the cache.
        kv: the KV of the prompt's whole chunks, ``[2, L, T, D]``.
        layout_problem: what the check of layout and RoPE said of it.
    """

    targets: Targets
    deadlines: Deadlines
    possessions: AsyncExitStack
    salts: tuple[str, str, str] = field(default_factory=fresh_salts)
    models: Answer | None = None
    served: list[ServedModel] = field(default_factory=list)
    served_model: ServedModel | None = None
    engine: VLLMCompletions | None = None
    cached_tokens: int | None = None
    status_answer: Answer | None = None
    status: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    requests: RequestClient | None = None
    chunk_size: int = 0
    instance_id: int = 0
    reply: RegistrationReply | None = None
    registered: list[Any] | None = None
    cache_name: str | None = None
    model_config: ModelConfig | None = None
    prompt: list[int] = field(default_factory=list)
    cache: AsyncLMCacheContext | None = None
    kv: torch.Tensor | None = None
    layout_problem: str = ""

    @property
    def whole(self) -> list[int]:
        """The prompt's whole chunks."""
        return self.prompt[:-1]


def known(value: T | None) -> T:
    """Return what a check that came before has found: the order of the checks says that it is there."""
    assert value is not None
    return value
