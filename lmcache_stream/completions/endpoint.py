"""Where an engine listens, and the way there."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from .._checks import checked_url, is_loopback
from ..errors import InvalidRequestError

__all__ = ["Endpoint", "Proxy"]


@dataclass(frozen=True, slots=True)
class Proxy:
    """An HTTP proxy.

    Attributes:
        url: its address, with the login that it may need.
        shown: its address without.
    """

    url: str = field(repr=False)
    shown: str


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The addresses of one engine.

    Attributes:
        root: the server's own address, without ``/v1``.
        host: host name or address in it.
    """

    root: str
    host: str

    @classmethod
    def of(cls, base_url: str) -> Endpoint:
        """Make one of ``base_url``, which may end in ``/v1`` or not.

        Raises:
            InvalidRequestError: not an HTTP address, or one with parts that have no place in it.
        """
        url = checked_url(base_url, ("http", "https"), "base_url")
        parts = urlsplit(url)
        if parts.username is not None or parts.password is not None:
            raise InvalidRequestError("base_url holds credentials: use api_key= or headers=")
        if parts.query or parts.fragment:
            raise InvalidRequestError(f"base_url={base_url!r} has a query or a fragment")
        root = url.removesuffix("/completions").removesuffix("/v1").rstrip("/")
        return cls(root=root, host=parts.hostname or "")

    @property
    def completions(self) -> str:
        """Address of the completions API."""
        return f"{self.root}/v1/completions"

    @property
    def detokenize(self) -> str:
        """Address of vLLM's detokenizer, which is not below ``/v1``."""
        return f"{self.root}/detokenize"

    def proxy(self) -> Proxy | None:
        """Return the proxy that the environment names for it; none is used on this machine.

        Raises:
            InvalidRequestError: it is not an HTTP proxy.
        """
        if is_loopback(self.host) or proxy_bypass(self.host):
            return None
        scheme = urlsplit(self.root).scheme
        address = getproxies().get(scheme)
        if not address:
            return None
        url = address if "://" in address else f"http://{address}"
        parts = urlsplit(url)
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequestError(
                f"{scheme.upper()}_PROXY={shown}: only HTTP proxies can be used; "
                f"add {self.host} to NO_PROXY to go without"
            )
        return Proxy(url, shown)
