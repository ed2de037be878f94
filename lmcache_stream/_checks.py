"""Checks of arguments that more than one layer makes before anything is sent."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from urllib.parse import urlsplit

from .errors import InvalidRequestError

_SALT_LIMIT = 128
_SALT_REFUSED = frozenset("@/\\\0")


def checked_token_ids(token_ids: Sequence[int], what: str = "prompt_token_ids") -> list[int]:
    """Return ``token_ids`` as a list of plain ints; arrays, tensors and numpy ints are welcome.

    Raises:
        InvalidRequestError: text, something that is not an integer, or a negative id.
    """
    if isinstance(token_ids, str | bytes):
        raise InvalidRequestError(f"{what} must be token ids, not text: run the tokenizer first")
    tolist = getattr(token_ids, "tolist", None)
    try:
        ids = [operator.index(token) for token in (tolist() if tolist else token_ids)]
    except TypeError as error:
        raise InvalidRequestError(f"{what} must be a flat sequence of integers: {error}") from error
    for position, token in enumerate(ids):
        if token < 0:
            raise InvalidRequestError(f"{what}[{position}] is {token}: token ids are not negative")
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
    return cache_salt


def checked_url(url: str, schemes: Sequence[str], what: str) -> str:
    """Return ``url`` without a trailing slash.

    Raises:
        InvalidRequestError: no scheme, one that does not fit, or no host.
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidRequestError(f"{what}={url!r} is not a URL: {error}") from error
    if parts.scheme not in schemes or not host:
        wanted = " or ".join(f"{scheme}://HOST:PORT" for scheme in schemes)
        raise InvalidRequestError(f"{what}={url!r} does not have the form {wanted}")
    return url.rstrip("/")
