"""What a stream of a batch goes through; one call of the stream each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .._checks import checked_seconds
from .._editing import KVEdit, Queries, check_edit
from ..errors import InvalidRequestError
from ..stream import AsyncLMCacheStream

__all__ = ["Edit", "Pass", "Phase", "decode", "prefill"]

_LONGEST = 80


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass in the engine.

    Attributes:
        name: ``prefill`` or ``decode``.
        params: sampling parameters under the engine's names.
    """

    name: str
    params: Mapping[str, Any]

    def described(self) -> tuple[str, str]:
        """Return a key and a text for the report."""
        return f"{self.name}_params", _shortened(repr(dict(self.params)))


@dataclass(frozen=True, slots=True)
class Edit:
    """An edit; see ``AsyncLMCacheStream.modify_kv``.

    Raises:
        InvalidRequestError: it can be right for no stream.
    """

    name: ClassVar[str] = "edit"

    fn: KVEdit
    timeout: float = 30.0
    poll_interval: float = 0.2
    min_tokens: int | None = None
    queries: Queries | None = None

    def __post_init__(self) -> None:
        check_edit(self.fn, self.queries)
        checked_seconds(self.timeout, "timeout")
        if checked_seconds(self.poll_interval, "poll_interval") == 0:
            raise InvalidRequestError("poll_interval must be positive")

    def described(self) -> tuple[str, str]:
        """Return a key and a text for the report."""
        return self.name, _shortened(getattr(self.fn, "__qualname__", None) or repr(self.fn))

    async def apply(self, stream: AsyncLMCacheStream) -> None:
        """Edit the KV of ``stream``."""
        await stream.modify_kv(
            self.fn, self.timeout, self.poll_interval, min_tokens=self.min_tokens, queries=self.queries
        )


Phase = Pass | Edit


def decode(sampling_params: Mapping[str, Any]) -> Pass:
    """Return a pass with ``sampling_params``.

    Raises:
        InvalidRequestError: they are no mapping.
    """
    if not isinstance(sampling_params, Mapping):
        raise InvalidRequestError(f"sampling_params must be a mapping, not {type(sampling_params).__name__}")
    return Pass("decode", dict(sampling_params))


def prefill(sampling_params: Mapping[str, Any]) -> Pass:
    """Return a pass that decodes one token, whatever ``sampling_params`` say."""
    params = {**decode(sampling_params).params, "max_tokens": 1}
    # vLLM refuses a least number of tokens above the greatest.
    if isinstance(params.get("min_tokens"), int):
        params["min_tokens"] = min(1, params["min_tokens"])
    return Pass("prefill", params)


def _shortened(text: str) -> str:
    # keep() names every index, of which there can be thousands.
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
