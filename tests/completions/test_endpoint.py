"""Addresses of an engine, and when the environment's proxy leads there."""

from __future__ import annotations

import pytest

from lmcache_stream.completions.endpoint import Endpoint
from lmcache_stream.errors import InvalidRequestError

PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize(
    ("base_url", "root"),
    [
        ("http://engine:8000", "http://engine:8000"),
        ("http://engine:8000/", "http://engine:8000"),
        ("http://engine:8000/v1", "http://engine:8000"),
        ("http://engine:8000/v1/", "http://engine:8000"),
        ("http://engine:8000/v1/completions", "http://engine:8000"),
        ("https://host/llm/v1", "https://host/llm"),
        ("http://host/v10", "http://host/v10"),
        ("http://[::1]:8000/v1", "http://[::1]:8000"),
    ],
)
def test_with_or_without_v1(base_url: str, root: str) -> None:
    endpoint = Endpoint.of(base_url)
    assert endpoint.completions == f"{root}/v1/completions"
    assert endpoint.detokenize == f"{root}/detokenize"


@pytest.mark.parametrize(
    "base_url",
    [
        "engine:8000",
        "tcp://engine:8000",
        "http://",
        "http://u:p@engine",
        "http://e?x=1",
        "http://e#x",
        "http://e:x",
    ],
)
def test_what_is_no_address_is_refused(base_url: str) -> None:
    with pytest.raises(InvalidRequestError, match="base_url"):
        Endpoint.of(base_url)


def test_a_password_is_not_repeated() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Endpoint.of("http://user:secret@engine")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("localhost", True),
        ("vllm.localhost", True),
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("[::1]", True),
        ("0.0.0.0", True),
        ("engine", False),
        ("10.0.0.1", False),
        ("localhost.example.com", False),
    ],
)
def test_proxies_lead_to_other_machines_only(
    monkeypatch: pytest.MonkeyPatch, host: str, loopback: bool
) -> None:
    monkeypatch.setenv("http_proxy", "http://user:secret@proxy:3128")
    endpoint = Endpoint.of(f"http://{host}:8000")
    proxy = endpoint.proxy()
    assert (proxy is None) is loopback
    if proxy is not None:
        assert (proxy.url, proxy.shown) == ("http://user:secret@proxy:3128", "http://proxy:3128")
        assert "secret" not in repr(proxy)


def test_the_scheme_and_no_proxy_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "proxy:3128")
    monkeypatch.setenv("no_proxy", "inside.example.com")
    assert Endpoint.of("http://engine").proxy() is None
    assert Endpoint.of("https://inside.example.com").proxy() is None
    proxy = Endpoint.of("https://engine").proxy()
    assert proxy is not None
    assert proxy.url == "http://proxy:3128"


def test_a_proxy_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "socks5://user:secret@proxy:1080")
    with pytest.raises(InvalidRequestError, match="NO_PROXY") as caught:
        Endpoint.of("http://engine").proxy()
    assert "secret" not in str(caught.value)
