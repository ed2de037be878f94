"""What one request says: sampling parameters that fit the contract, and the body made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ..errors import InvalidRequestError

__all__ = ["checked_sampling_params", "request_body", "request_headers", "stop_strings"]

_OWNED = {
    "prompt": "the prompt is the stream's own tokens",
    "model": "give it to VLLMCompletions(model=...)",
    "stream": "every pass is streamed",
    "cache_salt": "the stream's salt keeps edited KV apart",
    "return_token_ids": "it is always asked for",
    "stream_options": "usage is always asked for",
}


def _given(value: object) -> bool:
    return value is not None


def _more_than_one(value: object) -> bool:
    return value is not None and (isinstance(value, bool) or value != 1)


# Name, what makes a value of it refused, and why.
_REFUSED: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    ("n", _more_than_one, "a stream has one answer: open a stream for each"),
    ("echo", bool, "the prompt would be counted as decoded tokens"),
    ("suffix", bool, "text after the answer is no part of the stored tokens: use suffix_tokens"),
    ("use_beam_search", bool, "beam search cannot be streamed, nor does it follow one cached prefix"),
    ("prompt_logprobs", _given, "the engine then drops cached KV and computes the prompt anew"),
    ("prompt_embeds", _given, "the cache knows prompts by their token ids"),
    ("truncate_prompt_tokens", _given, "the prompt would no longer be the tokens that were edited"),
)


def checked_sampling_params(sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of ``sampling_params`` if a pass on stored tokens can use them.

    Raises:
        InvalidRequestError: one breaks the contract of a pass, or the edit of its KV.
    """
    if not isinstance(sampling_params, Mapping):
        raise InvalidRequestError(f"sampling_params must be a mapping, not {type(sampling_params).__name__}")
    params = dict(sampling_params)
    for name, value in params.items():
        if not isinstance(name, str):
            raise InvalidRequestError(f"sampling_params: the name {name!r} is not a str")
        if name in _OWNED:
            raise InvalidRequestError(f"sampling_params[{name!r}] is not yours: {_OWNED[name]}")
        if _has_odd_number(value):
            raise InvalidRequestError(f"sampling_params[{name!r}]={value!r}: JSON has no such number")
    stop = params.get("stop")
    each = stop if isinstance(stop, list | tuple) else () if stop is None else (stop,)
    if not all(isinstance(one, str) for one in each):
        raise InvalidRequestError(f"sampling_params['stop']={stop!r}: it must be a str, or a list of them")
    for name, refuses, why in _REFUSED:
        if name in params and refuses(params[name]):
            raise InvalidRequestError(f"sampling_params[{name!r}]={params[name]!r}: {why}")
    return params


def _has_odd_number(value: object) -> bool:
    """Whether NaN or an infinity is in ``value``, which the encoder would write as null."""
    if isinstance(value, Mapping):
        return any(map(_has_odd_number, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_odd_number, value))
    return isinstance(value, float) and not math.isfinite(value)


def stop_strings(sampling_params: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the stop strings among ``sampling_params``."""
    stop = sampling_params.get("stop") or ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def request_body(
    model: str, prompt: Sequence[int], sampling_params: Mapping[str, Any], cache_salt: str
) -> bytes:
    """Return the JSON of a streamed ``/v1/completions`` request; an empty salt is left out.

    Raises:
        InvalidRequestError: a value that JSON cannot hold.
    """
    body = {
        "model": model,
        "prompt": prompt,
        **sampling_params,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if cache_salt:
        body["cache_salt"] = cache_salt
    try:
        return msgspec.json.encode(body)
    except (TypeError, OverflowError, ValueError) as error:
        raise InvalidRequestError(f"the request cannot be put in JSON: {error}") from error


def request_headers(api_key: str | None, headers: Mapping[str, str] | None) -> dict[str, str]:
    """Return the headers of every request; ``headers`` win over the usual ones.

    Raises:
        InvalidRequestError: a header that HTTP cannot hold, or two logins.
    """
    usual = {
        "Accept": "text/event-stream",
        # A proxy that compresses holds events back until it has enough of them.
        "Accept-Encoding": "identity",
        "Content-Type": "application/json",
    }
    given = dict(headers or {})
    named = {name.lower() for name in given}
    if api_key is not None:
        if "authorization" in named:
            raise InvalidRequestError("api_key= and headers['Authorization'] are both given: use one")
        given["Authorization"] = f"Bearer {api_key}"
    for name, value in given.items():
        if not isinstance(value, str) or set("\r\n\0").intersection(name + value):
            raise InvalidRequestError(f"headers[{name!r}]: the value must be a str of one line")
    return {name: value for name, value in usual.items() if name.lower() not in named} | given
