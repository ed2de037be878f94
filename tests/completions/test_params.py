"""Which sampling parameters are refused, and what is sent."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from lmcache_stream.completions.params import (
    checked_sampling_params,
    request_body,
    request_headers,
    stop_strings,
)
from lmcache_stream.errors import InvalidRequestError

OWNED = ["prompt", "model", "stream", "cache_salt", "return_token_ids", "stream_options"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 2),
        ("n", 0),
        ("n", True),
        ("echo", True),
        ("suffix", "x"),
        ("use_beam_search", True),
        ("prompt_logprobs", 0),
        ("prompt_logprobs", 1),
        ("prompt_logprobs", -1),
        ("prompt_embeds", "AAAA"),
        ("prompt_embeds", []),
        ("truncate_prompt_tokens", 5),
        ("truncate_prompt_tokens", -1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("logit_bias", {"5": float("nan")}),
        ("vllm_xargs", {"a": [1.0, float("-inf")]}),
        ("stop", 5),
        ("stop", ["a", None]),
        ("stop", {"a": 1}),
        *((name, value) for name in OWNED for value in (None, True)),
    ],
)
def test_what_breaks_the_contract_or_the_edit_is_refused(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(f"sampling_params[{name!r}]")) as caught:
        checked_sampling_params({"max_tokens": 4, name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"n": 1, "echo": False, "suffix": None, "use_beam_search": False},
        {"prompt_logprobs": None, "prompt_embeds": None, "truncate_prompt_tokens": None, "n": None},
        {"max_tokens": 5, "temperature": 0.0, "stop": ["a"], "logit_bias": {5: 1.5}, "seed": 3},
        {"logprobs": 0, "return_tokens_as_token_ids": True, "kv_transfer_params": {"a": 1}},
    ],
)
def test_everything_else_is_the_engines_to_judge(params: dict[str, Any]) -> None:
    checked = checked_sampling_params(params)
    assert checked == params
    assert checked is not params


@pytest.mark.parametrize("params", [[("n", 1)], None, "n=1", {1: 2}])
def test_what_is_no_mapping_of_names_is_refused(params: Any) -> None:
    with pytest.raises(InvalidRequestError):
        checked_sampling_params(params)


def test_the_body_asks_for_ids_and_usage_in_a_stream() -> None:
    body = json.loads(request_body("m", [1, 2], {"max_tokens": 3, "logit_bias": {5: 1.0}}, "salt"))
    assert body == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 3,
        "logit_bias": {"5": 1.0},
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "cache_salt": "salt",
    }


def test_an_empty_salt_is_left_out() -> None:
    assert "cache_salt" not in json.loads(request_body("m", [1], {}, ""))


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="JSON"):
        request_body("m", [1], {"stop": object()}, "")


@pytest.mark.parametrize(
    ("stop", "strings"), [(None, ()), ("", ()), ("a", ("a",)), (["a", "b"], ("a", "b")), ([], ())]
)
def test_stop_strings(stop: object, strings: tuple[str, ...]) -> None:
    assert stop_strings({"stop": stop}) == strings


def test_headers_of_every_request() -> None:
    headers = request_headers("key", {"X-Tenant": "a", "accept-encoding": "gzip"})
    assert headers == {
        "Accept": "text/event-stream",
        "Content-Type": "application/json",
        "X-Tenant": "a",
        "accept-encoding": "gzip",
        "Authorization": "Bearer key",
    }
    assert request_headers(None, None)["Accept-Encoding"] == "identity"


@pytest.mark.parametrize(
    ("api_key", "headers"),
    [
        ("key", {"authorization": "Basic x"}),
        ("a\nb", None),
        (None, {"X": "a\r\nY: b"}),
        (None, {"X\r\nY": "a"}),
        (None, {"X": 5}),
    ],
)
def test_headers_that_http_cannot_hold_are_refused(api_key: str | None, headers: Any) -> None:
    with pytest.raises(InvalidRequestError):
        request_headers(api_key, headers)
