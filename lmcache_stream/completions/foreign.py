"""aiohttp's exceptions: which there are, and what to do about each."""

from __future__ import annotations

import asyncio
import errno

import aiohttp

from .endpoint import Proxy

__all__ = ["FOREIGN", "advice", "said"]

FOREIGN = (aiohttp.ClientError, OSError, asyncio.TimeoutError)
"""What aiohttp raises where a connection fails."""


def said(error: BaseException) -> str:
    """Return the error's text, or its name where it has none."""
    return str(error) or type(error).__name__


def advice(error: BaseException, proxy: Proxy | None) -> str:
    """Return what to do about a connection that did not come about, or broke before an answer."""
    if isinstance(error, aiohttp.ClientProxyConnectionError | aiohttp.ClientHttpProxyError):
        return (
            f"the environment names the proxy {proxy.shown if proxy else None}: check it, or add the host to "
            "NO_PROXY"
        )
    if isinstance(error, aiohttp.ClientConnectorDNSError | aiohttp.InvalidURL):
        return "check the host name in base_url="
    if isinstance(error, aiohttp.ClientSSLError):
        return "check whether the server speaks TLS there and has a valid certificate"
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return "every stream needs a file descriptor: raise the limit (ulimit -n), or open fewer"
    if isinstance(error, aiohttp.ClientResponseError):
        return "that is no HTTP server: is base_url= the address of vLLM's API?"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "start the engine (vllm serve) or mend base_url="
    return "the engine closed the connection before it answered: see its log"
