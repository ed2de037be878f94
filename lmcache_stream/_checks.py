"""Checks of arguments that more than one layer makes before anything is sent."""

from __future__ import annotations

import ipaddress
import math
import operator
from collections.abc import Mapping, Sequence, Set
from urllib.parse import urlsplit

from .errors import InvalidRequestError

# LMCache and vLLM keep ids as 32-bit integers.
_TOKEN_LIMIT = 2**31
_SALT_LIMIT = 128
_SALT_REFUSED = frozenset("@/\\\0")


def checked_token_ids(token_ids: Sequence[int], what: str = "prompt_token_ids") -> list[int]:
    """Return ``token_ids`` as a list of plain ints; arrays, tensors and numpy ints are welcome.

    Raises:
        InvalidRequestError: text, a set, something that is not an integer (a bool is none), or an id
            that is negative or too large.
    """
    if isinstance(token_ids, str | bytes | bytearray):
        raise InvalidRequestError(f"{what} must be token ids, not text: run the tokenizer first")
    tolist = getattr(token_ids, "tolist", None)
    try:
        if isinstance(token_ids, Set | Mapping):
            raise TypeError(f"a {type(token_ids).__name__} is no sequence")
        given = list(tolist() if tolist else token_ids)
        if bool in set(map(type, given)):
            raise TypeError("a bool is no token id: is this a mask?")
        ids = list(map(operator.index, given))
    except TypeError as error:
        raise InvalidRequestError(f"{what} must be a flat sequence of integers: {error}") from error
    for position, token in enumerate(ids):
        if not 0 <= token < _TOKEN_LIMIT:
            raise InvalidRequestError(f"{what}[{position}] is {token}: no token id is negative or so large")
    return ids


def checked_salt(cache_salt: str) -> str:
    """Return ``cache_salt`` if engine and cache both take it; "" means none.

    Raises:
        InvalidRequestError: too long, or a character that LMCache refuses (it does so by silence).
    """
    if not isinstance(cache_salt, str):
        raise InvalidRequestError(f"cache_salt must be a str, not {type(cache_salt).__name__}")
    if len(cache_salt) > _SALT_LIMIT:
        raise InvalidRequestError(
            f"cache_salt has {len(cache_salt)} characters; at most {_SALT_LIMIT} are allowed"
        )
    refused = sorted(_SALT_REFUSED.intersection(cache_salt))
    if refused:
        raise InvalidRequestError(f"cache_salt holds {refused}: '@', '/', '\\' and NUL are refused")
    if any("\ud800" <= character <= "\udfff" for character in cache_salt):
        raise InvalidRequestError("cache_salt holds a lone surrogate, which UTF-8 cannot carry")
    return cache_salt


def checked_url(url: str, schemes: Sequence[str], what: str) -> str:
    """Return ``url`` without a trailing slash.

    Raises:
        InvalidRequestError: no scheme, one that does not fit, or no host; with ``tcp``, no port.
    """
    wanted = " or ".join(f"{scheme}://HOST:PORT" for scheme in schemes)
    reason = ""
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        host, port = parts.hostname, parts.port
        fits = parts.scheme in schemes and bool(host) and url.isprintable() and " " not in url
        # An error of this codec is what a host name with an empty or a long label comes to further on.
        (host or "").encode("idna").decode("idna")
        if parts.scheme == "tcp":
            fits = fits and bool(port) and parts.path in ("", "/")
    except ValueError as error:
        fits, reason = False, f": {error}"
    if not fits:
        raise InvalidRequestError(f"{what}={url!r} does not have the form {wanted}{reason}")
    return url.rstrip("/")


def is_loopback(host: str) -> bool:
    """Tell whether ``host`` is this machine, where a proxy of the environment has no business."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        # With a dot behind it a name is complete.
        name = host.removesuffix(".")
        return name == "localhost" or name.endswith(".localhost")
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    # Connecting to 0.0.0.0, where a server says it listens, leads to this machine too.
    return address.is_loopback or address.is_unspecified


def checked_seconds(value: float, what: str) -> float:
    """Return ``value``, a time of zero or more seconds.

    Raises:
        InvalidRequestError: anything else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InvalidRequestError(f"{what} must be a number of seconds, zero or more, not {value!r}")
    return value
