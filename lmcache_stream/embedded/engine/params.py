"""The body of a ``/v1/completions`` request: decoded, checked, and refused as vLLM's server does."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec

from ..._checks import checked_salt
from ...errors import InvalidRequestError
from .model import CausalModel
from .problems import BadRequestError, ModelNotFoundError

__all__ = [
    "CompletionParams",
    "CompletionRequest",
    "DetokenizeRequest",
    "TokenizeRequest",
    "checked",
    "decode_body",
    "decode_completion",
    "encode_text",
    "refuse_other_model",
    "refuse_too_long",
]

T = TypeVar("T")

_DEFAULT_MAX_TOKENS = 16
_LONGEST_ID = 20
# JSON that asks for nothing.
_NOTHING = (b"null", b"false", b"[]", b"{}", b'""')
# Of vLLM's, those that the embedded engine does not have: ignored, they would give another answer.
_ABSENT = (
    *("best_of", "logprobs", "suffix", "bad_words", "prompt_logprobs", "prompt_embeds", "response_format"),
    *("structured_outputs", "truncate_prompt_tokens", "use_beam_search", "echo", "guided_json"),
    *("repetition_detection", "thinking_token_budget", "watermarking", "vllm_xargs", "logprob_token_ids"),
)


_Id = Annotated[int, msgspec.Meta(ge=0)]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class CompletionRequest(msgspec.Struct):
    """The fields that are known; others are passed over, as vLLM does."""

    model: str | None = None
    prompt: list[_Id | str | list[_Id]] | str | None = None
    max_tokens: int | None = _DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionParams:
    """A checked request, with the model's defaults where it says nothing.

    Attributes:
        prompt: token ids, within the vocabulary or not: ``unknown_token`` tells.
        unknown_token: an id that the model does not have, else None.
    """

    prompt: list[int]
    unknown_token: int | None
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]
    allowed_token_ids: list[int] | None
    seed: int | None
    stop: list[str]
    stop_token_ids: frozenset[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    skip_special_tokens: bool
    cache_salt: str


class TokenizeRequest(msgspec.Struct):
    prompt: str
    model: str | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(msgspec.Struct):
    tokens: list[_Id]
    model: str | None = None


def decode_body(body: bytes, kind: type[T]) -> T:
    """Return the request of that kind in a body.

    Raises:
        BadRequestError: no JSON object, or a wrong type.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequestError(f"The body is no valid request: {error}") from error


def decode_completion(body: bytes) -> CompletionRequest:
    """Return the request in a body.

    Raises:
        BadRequestError: no JSON object, a wrong type, or something that this engine does not have.
    """
    for name, value in decode_body(body, dict[str, msgspec.Raw]).items():
        if name in _ABSENT and bytes(value) not in _NOTHING:
            raise BadRequestError(f"`{name}` is not supported by the embedded engine", name)
    return decode_body(body, CompletionRequest)


def refuse_other_model(model: str | None, served_name: str) -> None:
    """Raise ModelNotFoundError unless ``model`` is served, or none was named."""
    if model is not None and model != served_name:
        raise ModelNotFoundError(f"The model `{model}` does not exist.", "model")


def checked(request: CompletionRequest, served_name: str, model: CausalModel) -> CompletionParams:
    """Return the parameters of ``request``; it may take long, where the prompt is a text.

    Raises:
        RequestError: it is refused.
    """
    refuse_other_model(request.model, served_name)
    if request.n != 1:
        raise BadRequestError(f"n={request.n}: the embedded engine gives one answer a request", "n")
    if request.stream_options is not None and not request.stream:
        raise BadRequestError("Stream options can only be defined when `stream=True`.", "stream_options")
    prompt = _token_ids(request, model)
    salt = _salt(request.cache_salt)
    numbers = {name: _number(request, name, model.defaults) for name in _RANGES}
    top_k = request.top_k if request.top_k is not None else int(model.defaults.get("top_k", 0))
    if top_k < -1:
        raise BadRequestError(f"top_k must be 0 or -1 (all tokens), or at least 1, got {top_k}.", "top_k")
    room = model.max_model_len - len(prompt)
    max_tokens = room if request.max_tokens is None else request.max_tokens
    if request.max_tokens is not None and max_tokens < 1:
        raise BadRequestError(f"max_tokens must be at least 1, got {max_tokens}.", "max_tokens")
    if room < 1 or max_tokens > room:
        raise BadRequestError(
            f"This model's maximum context length is {model.max_model_len} tokens. However, you requested "
            f"{request.max_tokens or 0} output tokens and your prompt contains {len(prompt)} input tokens. "
            "Please reduce the length of the input prompt or the number of requested output tokens.",
            "input_tokens",
        )
    if not 0 <= request.min_tokens <= max_tokens:
        raise BadRequestError(
            f"min_tokens must be between 0 and max_tokens={max_tokens}, got {request.min_tokens}.",
            "min_tokens",
        )
    return CompletionParams(
        prompt=prompt,
        unknown_token=next((one for one in prompt if one >= model.vocab_size), None),
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        top_k=max(0, top_k),
        logit_bias=_bias(request.logit_bias, model.vocab_size),
        allowed_token_ids=_ids(request.allowed_token_ids, "allowed_token_ids", model.vocab_size),
        seed=request.seed,
        stop=_stops(request.stop),
        stop_token_ids=frozenset(_ids(request.stop_token_ids, "stop_token_ids", model.vocab_size) or ()),
        include_stop_str_in_output=request.include_stop_str_in_output,
        ignore_eos=request.ignore_eos,
        skip_special_tokens=request.skip_special_tokens,
        cache_salt=salt,
        **numbers,
    )


# Default, lowest, highest, and whether the lowest itself is refused.
_RANGES: dict[str, tuple[float, float, float, bool]] = {
    "temperature": (1.0, 0.0, math.inf, False),
    "top_p": (1.0, 0.0, 1.0, True),
    "min_p": (0.0, 0.0, 1.0, False),
    "repetition_penalty": (1.0, 0.0, math.inf, True),
    "presence_penalty": (0.0, -2.0, 2.0, False),
    "frequency_penalty": (0.0, -2.0, 2.0, False),
}


def _number(request: CompletionRequest, name: str, defaults: dict[str, Any]) -> float:
    usual, lowest, highest, is_open = _RANGES[name]
    given = getattr(request, name)
    value = float(defaults.get(name, usual) if given is None else given)
    if not lowest <= value <= highest or (is_open and value == lowest) or math.isinf(value):
        brackets = "(" if is_open else "["
        raise BadRequestError(f"{name} must be in {brackets}{lowest:g}, {highest:g}], got {value:g}.", name)
    return value


def _token_ids(request: CompletionRequest, model: CausalModel) -> list[int]:
    prompt: Any = request.prompt
    if isinstance(prompt, list) and any(isinstance(one, str | list) for one in prompt):
        if len(prompt) > 1:
            raise BadRequestError("prompt: the embedded engine takes one prompt a request", "prompt")
        (prompt,) = prompt
    if isinstance(prompt, str):
        prompt = encode_text(model, prompt, add_special_tokens=request.add_special_tokens)
    if not prompt:
        raise BadRequestError("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    ids: list[int] = prompt
    return ids


def encode_text(model: CausalModel, text: str, *, add_special_tokens: bool) -> list[int]:
    """Return the token ids of ``text``.

    Raises:
        BadRequestError: it must be longer than the model's limit. Found out before it is tokenized, which may
            take minutes.
    """
    refuse_too_long(model, len(text) // model.longest_token)
    return list(model.tokenizer.encode(text, add_special_tokens=add_special_tokens))


def refuse_too_long(model: CausalModel, num_tokens: int) -> None:
    """Raise BadRequestError for more tokens than the model takes."""
    if num_tokens > model.max_model_len:
        raise BadRequestError(
            f"This model's maximum context length is {model.max_model_len} tokens. However, your request has "
            f"at least {num_tokens}.",
            "input_tokens",
        )


def _salt(salt: str | None) -> str:
    if salt == "":
        raise BadRequestError("cache_salt must be a non-empty string if provided.", "cache_salt")
    try:
        return checked_salt(salt or "")
    except InvalidRequestError as error:
        raise BadRequestError(str(error), "cache_salt") from error


def _stops(stop: str | list[str] | None) -> list[str]:
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    if not all(stops):
        raise BadRequestError("stop cannot contain an empty string.", "stop")
    return stops


def _ids(ids: list[int] | None, name: str, vocab_size: int) -> list[int] | None:
    for one in ids or ():
        if not 0 <= one < vocab_size:
            raise BadRequestError(f"{name} contains {one}, which is not in the vocabulary.", name)
    if ids is not None and not ids and name == "allowed_token_ids":
        raise BadRequestError(f"{name} is not None and empty!", name)
    return ids


def _bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for name, value in (bias or {}).items():
        known = name.isdecimal() and len(name) < _LONGEST_ID and int(name) < vocab_size
        if not known or not math.isfinite(value):
            raise BadRequestError(
                f"logit_bias has {name!r}: {value}, which is no token's bias.", "logit_bias"
            )
        found[int(name)] = min(100.0, max(-100.0, value))
    return found
