"""The three addresses, and what it means when somebody else, or nobody, listens at one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from .._listener import Listener, Spoken, listener_at
from .results import Finding, failed
from .web import Answer, NoAnswer, Server, get

__all__ = ["CACHE", "CACHE_HTTP", "ENGINE", "Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """An address that a server should listen at.

    Attributes:
        option: the command's option for it.
        port: whose port that is.
        start: how the server is started.
    """

    option: str
    port: str
    start: str

    async def ask(
        self, root: str, path: str, *, deadline: float, headers: Mapping[str, str] | None = None
    ) -> Answer | Finding:
        """Return the answer to a GET of ``path``; a finding where nobody, or a wrong one, answers.

        Who is there is heard before it is asked: a request of HTTP ends the thread that an LMCache answers
        ZeroMQ in.
        """
        found = await listener_at(root, deadline=deadline)
        if found.spoken in (Spoken.NOTHING, Spoken.ZEROMQ):
            return self.vacant(root, found)
        answer = await get(f"{root}{path}", deadline=deadline, headers=headers)
        return self.vacant(root, found, answer.reason) if isinstance(answer, NoAnswer) else answer

    def vacant(self, url: str, found: Listener, said: str = "") -> Finding:
        """Return the finding for an address that nobody, or a wrong one, answers at.

        Args:
            url: the address.
            found: who is there.
            said: what came instead of an answer, where that was looked at before.
        """
        match found.spoken:
            case Spoken.NOTHING:
                return failed(
                    f"nothing listens at {url} ({found.detail})",
                    f"start {self.start}, or give its address: {self.option} is {self.port}",
                )
            case Spoken.ZEROMQ:
                address = f"tcp://{urlsplit(url).netloc}"
                return failed(
                    f"a ZeroMQ socket answers at {url}, not HTTP",
                    f"that is LMCache's --port, for --cache-url {address}; {self.option} is {self.port}",
                )
            case Spoken.TLS:
                return failed(
                    f"a server answers at {url} that wants TLS", f"give {self.option} its https:// address"
                )
            case Spoken.HTTP:
                return failed(
                    f"an HTTP server answers at {url}, but not this: {said}",
                    f"see its log; {self.option} is {self.port}",
                )
            case Spoken.SILENCE:
                return failed(
                    f"something accepts connections at {url} and says nothing",
                    f"the server hangs or is another one: see its log; {self.option} is {self.port}",
                )
            case Spoken.OTHER:
                return failed(
                    f"something answers at {url} that speaks another protocol",
                    f"give the right address: {self.option} is {self.port}",
                )

    def mistaken(self, url: str, who: Server) -> Finding:
        """Return the finding for an address at which another HTTP server answers."""
        at_home = f"that is an address for {_OPTIONS[who]}; " if who in _OPTIONS else ""
        return failed(f"{who.value} answers at {url}", f"{at_home}{self.option} is {self.port}")


_OPTIONS = {Server.LMCACHE: "--http-url", Server.ENGINE: "--engine-url"}
ENGINE = Place("--engine-url", "vLLM's --port (8000)", "vLLM (`vllm serve MODEL --port 8000 ...`)")
CACHE_HTTP = Place(
    "--http-url", "LMCache's --http-port (8080)", "LMCache (`lmcache server --http-port 8080 ...`)"
)
CACHE = Place("--cache-url", "LMCache's --port (5555)", "LMCache (`lmcache server --port 5555 ...`)")
