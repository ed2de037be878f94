"""Checks of token ids, salts and URLs: what passes is what can be sent, everything else is told apart."""

from __future__ import annotations

import array
import contextlib
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_stream._checks import checked_salt, checked_token_ids, checked_url, is_loopback
from lmcache_stream.errors import CallerError, InvalidRequestError

IDS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(IDS)
def test_token_ids_of_every_kind_become_the_same_plain_ints(ids: list[int]) -> None:
    kinds: list[Any] = [
        ids,
        tuple(ids),
        array.array("q", ids),
        np.array(ids, dtype=np.int64),
        np.array(ids, dtype=np.uint32),
        list(np.array(ids, dtype=np.int32)),
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor(ids, dtype=torch.int32),
        list(torch.tensor(ids, dtype=torch.int64)),
    ]
    for given_ids in kinds:
        found = checked_token_ids(given_ids)
        assert found == ids
        assert [type(token) for token in found] == [int] * len(ids)


@given(IDS)
def test_the_given_ids_are_copied_and_left_as_they_are(ids: list[int]) -> None:
    before = list(ids)
    found = checked_token_ids(ids)
    found.append(7)
    assert ids == before


def test_a_slice_of_an_array_with_strides_is_read_in_its_own_order() -> None:
    assert checked_token_ids(np.arange(10)[::-3]) == [9, 6, 3, 0]  # type: ignore[arg-type]
    assert checked_token_ids(torch.arange(10)[::3]) == [0, 3, 6, 9]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ("1 2 3", "not text"),
        (b"123", "not text"),
        (bytearray(b"123"), "not text"),
        (["1", "2"], "integers"),
        ([1, 2.0], "integers"),
        ([1, None], "integers"),
        ([[1, 2], [3, 4]], "integers"),
        (np.array([[1, 2]]), "integers"),
        (torch.tensor([[1, 2]]), "integers"),
        (torch.tensor([1.0, 2.0]), "integers"),
        (np.array([1.0]), "integers"),
        (torch.tensor(5), "integers"),
        (5, "integers"),
        (None, "integers"),
        # A mask in the place of ids would be taken for the ids 0 and 1.
        ([True, False], "bool"),
        (torch.tensor([True, False]), "bool"),
        (np.array([True, False]), "bool"),
        ([1, np.bool_(True)], "bool"),
        # Of these the order means nothing.
        ({1, 2, 3}, "sequence"),
        ({1: 2}, "sequence"),
        ([5, -1], r"what\[1\] is -1"),
        (np.array([-3, 4], dtype=np.int8), r"what\[0\] is -3"),
        ([0, 0, 2**31], r"what\[2\] is 2147483648"),
        ([2**70], r"what\[0\] is"),
    ],
)
def test_other_token_ids_are_refused_with_the_reason(ids: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        checked_token_ids(ids, "what")
    assert str(caught.value).startswith("what")


@given(st.text(st.characters(exclude_characters="@/\\\0", exclude_categories=["Cs"]), max_size=128))
def test_a_salt_that_both_sides_take_passes_unchanged(salt: str) -> None:
    assert checked_salt(salt) is salt


@given(st.one_of(st.text(max_size=140), st.text("ab@/\\\0\ud800", max_size=5)))
def test_a_salt_passes_if_it_obeys_the_limits_and_can_be_sent(salt: str) -> None:
    surrogates = any("\ud800" <= character <= "\udfff" for character in salt)
    if len(salt) > 128 or set(salt) & set("@/\\\0") or surrogates:
        with pytest.raises(InvalidRequestError):
            checked_salt(salt)
    else:
        assert checked_salt(salt) == msgspec.msgpack.decode(msgspec.msgpack.encode(salt))


@pytest.mark.parametrize(
    ("salt", "reason"),
    [
        ("x" * 129, "129 characters"),
        ("a@b", "'@'"),
        ("a/b", "'/'"),
        ("a\\b", r"'\\\\'"),
        ("a\0b", r"'\\x00'"),
        ("a\ud800b", "surrogate"),
        (None, "must be a str, not NoneType"),
        (b"salt", "must be a str, not bytes"),
    ],
)
def test_other_salts_are_refused_with_the_reason(salt: Any, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        checked_salt(salt)


@pytest.mark.parametrize(
    ("url", "schemes"),
    [
        ("tcp://localhost:5555", ["tcp"]),
        ("tcp://127.0.0.1:1", ["tcp"]),
        ("tcp://[::1]:65535", ["tcp"]),
        ("http://cache.example:8080", ["http", "https"]),
        ("https://cache.example", ["http", "https"]),
        ("http://cache.example/behind/a/proxy", ["http", "https"]),
    ],
)
def test_a_url_passes_but_for_a_slash_at_its_end(url: str, schemes: list[str]) -> None:
    assert checked_url(url, schemes, "url") == url
    assert checked_url(f"{url}/", schemes, "url") == url


@pytest.mark.parametrize(
    ("url", "schemes"),
    [
        ("localhost:5555", ["tcp"]),
        ("127.0.0.1:5555", ["tcp"]),
        ("//localhost:5555", ["tcp"]),
        ("http://localhost:5555", ["tcp"]),
        ("tcp://localhost:5555", ["http", "https"]),
        ("tcp://:5555", ["tcp"]),
        ("tcp://", ["tcp"]),
        ("tcp://localhost", ["tcp"]),
        ("tcp://localhost:5555/path", ["tcp"]),
        ("tcp://localhost:port", ["tcp"]),
        ("tcp://localhost:70000", ["tcp"]),
        ("http://[::1", ["http"]),
        ("http:///path", ["http"]),
        ("http://a..b:80", ["http"]),
        ("http://.:80", ["http"]),
        (f"http://{'a' * 64}:80", ["http"]),
        ("http://xn--:80", ["http"]),
        ("tcp://a b:80", ["tcp"]),
        ("tcp://a\0b:80", ["tcp"]),
        ("http://a\nb:80", ["http"]),
        ("http://a:80\r\n", ["http"]),
        # What an argument's bytes become that are no UTF-8.
        ("tcp://h\udcff:80", ["tcp"]),
        ("", ["http"]),
        (None, ["http"]),
        (b"http://localhost", ["http"]),
        (8080, ["http"]),
    ],
)
def test_a_url_that_does_not_fit_is_refused_with_the_form_to_use(url: Any, schemes: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        checked_url(url, schemes, "url")
    assert str(caught.value).startswith(f"url={url!r} ")
    assert f"{schemes[0]}://HOST:PORT" in str(caught.value)


@given(st.text(max_size=30))
def test_no_text_is_a_crash(url: str) -> None:
    with contextlib.suppress(CallerError):
        checked_url(url, ["tcp", "http"], "url")


@pytest.mark.parametrize(
    ("host", "wanted"),
    [
        ("localhost", True),
        ("cache.localhost", True),
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("localhost.", True),
        # Where servers say that they listen, people connect: to this machine.
        ("0.0.0.0", True),
        ("::", True),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("fe80::1", False),
        ("localhost.example", False),
        ("notlocalhost", False),
        ("127.0.0.1.example", False),
    ],
)
def test_this_machine_is_known_by_its_names(host: str, wanted: bool) -> None:
    assert is_loopback(host) is wanted
