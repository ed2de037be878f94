"""The errors of the library: one root, then one family for each party that can be at fault."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "CacheConnectError",
    "CacheError",
    "CacheLostError",
    "CacheTimeoutError",
    "CallerError",
    "ClosedError",
    "EngineConnectError",
    "EngineError",
    "EngineStatusError",
    "EngineStreamError",
    "EngineTimeoutError",
    "GeometryError",
    "InvalidRequestError",
    "KVNotReadyError",
    "LMCacheStreamError",
    "LayoutError",
    "StoreIncompleteError",
    "StreamBusyError",
    "TruncatedStreamError",
]


class LMCacheStreamError(Exception):
    """Root of every error that the library raises on purpose."""


class CallerError(LMCacheStreamError):
    """Root of the errors that a change in the calling code or its settings mends."""


class InvalidRequestError(CallerError, ValueError):
    """An argument cannot be right; nothing was sent and nothing changed."""


class StreamBusyError(CallerError):
    """A second operation was begun on a stream while another was under way."""


class ClosedError(CallerError):
    """The object was used before it was opened or after it was closed."""


class GeometryError(CallerError):
    """The shape of the model's KV is unknown, contradictory or not supported."""


class LayoutError(CallerError):
    """The KV in the cache does not have the memory layout or RoPE that was assumed."""


class EngineError(LMCacheStreamError):
    """Root of the errors whose cause is the inference engine or the way to it.

    Attributes:
        token_ids: the ids that had arrived when the error came, in order; empty before the first.
    """

    def __init__(self, message: str, *, token_ids: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.token_ids: tuple[int, ...] = tuple(token_ids)


class EngineConnectError(EngineError):
    """The engine could not be reached, or the connection broke."""


class EngineStatusError(EngineError):
    """The engine answered with an HTTP error status.

    Attributes:
        status: the HTTP status code.
        detail: the engine's own message, as text.
        retry_after: the ``Retry-After`` header in seconds, where there was one.
    """

    def __init__(self, message: str, *, status: int, detail: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.detail = detail
        self.retry_after = retry_after


class EngineStreamError(EngineError):
    """The engine reported an error inside a stream, or sent what cannot be understood."""


class TruncatedStreamError(EngineError):
    """The stream ended without a finish reason: what arrived is not the whole answer."""


class EngineTimeoutError(EngineError, TimeoutError):
    """The engine let a deadline pass: the connection's, the first token's, or the one between two events.

    Attributes:
        connecting: no connection had come about: the engine may be down.
    """

    def __init__(self, message: str, *, token_ids: Sequence[int] = (), connecting: bool = False) -> None:
        super().__init__(message, token_ids=token_ids)
        self.connecting = connecting


class CacheError(LMCacheStreamError):
    """Root of the errors whose cause is the LMCache server or the way to it."""


class CacheConnectError(CacheError):
    """The LMCache server could not be reached, or the connection broke."""


class CacheTimeoutError(CacheError, TimeoutError):
    """The LMCache server let a deadline pass. It also answers its own errors with silence."""


class KVNotReadyError(CacheError):
    """The KV of a prompt was not in the cache, or not all of it, when the time was up.

    Attributes:
        found: tokens whose KV was found.
        wanted: tokens whose KV was waited for.
    """

    def __init__(self, message: str, *, found: int, wanted: int) -> None:
        super().__init__(message)
        self.found = found
        self.wanted = wanted


class StoreIncompleteError(CacheError):
    """Some chunks of a store are not in the cache as they were given.

    Attributes:
        stored: chunks that are in.
        wanted: chunks that should be.
    """

    def __init__(self, message: str, *, stored: int, wanted: int) -> None:
        super().__init__(message)
        self.stored = stored
        self.wanted = wanted


class CacheLostError(CacheError):
    """Edited KV was no longer in the cache when it was to be used."""
