"""What a client may ask, and what it is told when that cannot be answered; pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import msgspec

import lmcache_stream as lms
from lmcache_stream.dropping import KeyDiff, SnapKV, StreamingLLM

__all__ = ["MAX_BODY", "AnswerRequest", "DropPolicy", "Problem", "always_kept"]

MAX_BODY = 1 << 20
"""Bytes of the largest request."""

_RETRY_AFTER = 2

DropPolicy = SnapKV | KeyDiff | StreamingLLM
_POLICIES: dict[str, type[DropPolicy]] = {"snapkv": SnapKV, "keydiff": KeyDiff, "streaming-llm": StreamingLLM}


class Problem(Exception):  # noqa: N818 - what is sent, under the name that RFC 9457 has for it
    """Why there is no answer, or no whole one.

    Attributes:
        status: of HTTP, where the answer has not begun.
        kind: the name of the error.
        outcome: under which the metrics count it.
        retry_after: seconds after which to try again, where that may help.
    """

    def __init__(
        self, status: int, kind: str, message: str, *, outcome: str, retry_after: int | None = None
    ) -> None:
        super().__init__(" ".join(message.split()))
        self.status = status
        self.kind = kind
        self.outcome = outcome
        self.retry_after = retry_after

    @classmethod
    def refused(cls, status: int, message: str) -> Self:
        """Return that of a request that is the client's to mend."""
        return cls(status, "InvalidRequestError", message, outcome="refused")

    @classmethod
    def too_large(cls) -> Self:
        """Return that of a request beyond ``MAX_BODY``."""
        return cls.refused(413, f"the request is larger than {MAX_BODY} bytes: send a shorter document")

    @classmethod
    def busy(cls, waiting: int) -> Self:
        """Return that of a full queue."""
        message = f"{waiting} requests are waiting already: try again later"
        return cls(429, "TooManyRequestsError", message, outcome="busy", retry_after=_RETRY_AFTER)

    @classmethod
    def stopping(cls) -> Self:
        """Return that of a server that is being stopped."""
        message = "this server is being stopped: ask another one, or try again later"
        return cls(503, "ServerStoppingError", message, outcome="stopped", retry_after=_RETRY_AFTER)

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Return that of an error that ended an answer."""
        kind, message = type(error).__name__, str(error)
        match error:
            case lms.EngineStatusError(status=429 | 503):
                wished = round(error.retry_after or _RETRY_AFTER)
                return cls(503, kind, message, outcome="failed", retry_after=wished)
            case lms.EngineStatusError(status=400 | 413 | 422):
                # Mostly a document that is longer than the model can read.
                return cls(error.status, kind, error.detail, outcome="refused")
            case lms.InvalidRequestError():
                return cls(422, kind, message, outcome="refused")
            case lms.EngineConnectError() | lms.EngineTimeoutError() | lms.CacheError():
                return cls(503, kind, message, outcome="failed", retry_after=_RETRY_AFTER)
            case lms.EngineError():
                return cls(502, kind, message, outcome="failed")
            case lms.LMCacheStreamError():
                return cls(500, kind, message, outcome="failed")
        # Of an error that nobody foresaw the log says more, and the client need not know it.
        return cls(500, "InternalError", "the server failed: see its log", outcome="failed")

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the HTTP answer."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}

    @property
    def data(self) -> dict[str, str]:
        """What an ``error`` event says."""
        return {"type": self.kind, "message": str(self)}

    @property
    def body(self) -> bytes:
        """The JSON of the HTTP answer."""
        return msgspec.json.encode({"error": self.data})


class AnswerRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/answers``.

    Attributes:
        document: what to read.
        question: what to find in it.
        policy: how to choose the tokens whose KV is dropped; ``none`` drops nothing.
        ratio: the share of tokens to drop.
        max_tokens: tokens of the answer at most.
    """

    document: str
    question: str
    policy: Literal["snapkv", "keydiff", "streaming-llm", "none"] = "keydiff"
    ratio: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.5
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64

    def __post_init__(self) -> None:
        for name in ("document", "question"):
            if not getattr(self, name).strip():
                raise ValueError(f"`{name}` is empty")

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Read a body.

        Raises:
            Problem: 400 where it is no JSON, 413 where it is too large, 422 where it is no such request.
        """
        if len(body) > MAX_BODY:
            raise Problem.too_large()
        try:
            return msgspec.json.decode(body, type=cls)
        except msgspec.ValidationError as error:
            raise Problem.refused(422, str(error)) from None
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise Problem.refused(400, f"the body must be JSON: {error}") from None

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """Return its JSON schema."""
        (schema,), components = msgspec.json.schema_components([cls], ref_template="{name}")
        found: dict[str, Any] = components[schema["$ref"]]
        return found

    def drop_policy(self, chunk_size: int) -> DropPolicy | None:
        """Return what chooses the tokens; None where none are dropped."""
        if self.policy == "none":
            return None
        sinks, window = always_kept(chunk_size)
        return _POLICIES[self.policy](ratio=self.ratio, sinks=sinks, window=window)


def always_kept(chunk_size: int) -> tuple[int, int]:
    """Return how many tokens of beginning and end are always kept: together they fit into one chunk, which
    is the least that an edit leaves."""
    sinks = min(4, chunk_size // 2)
    return sinks, min(32, chunk_size - sinks)
