"""All checks, in the order of a person who looks for the fault."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from . import cache_http, cache_zmq, engine, model, round_trip
from .chart import Chart, Deadlines
from .results import Finding

__all__ = ["CHECKS", "Check"]

# Beside the questions that a check asks: what they take to be sent, and a look at who listens.
_MARGIN = 5.0


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        group: what is examined.
        name: the check within the group.
        run: makes it; what it raises of the library's errors is a failure.
        needs: checks, as ``group/name``, without whose success it cannot be made.
        seconds: how long it may take.
    """

    group: str
    name: str
    run: Callable[[Chart], Awaitable[Finding]]
    needs: Sequence[str] = ()
    seconds: Callable[[Deadlines], float] = lambda limits: 3 * limits.answer + _MARGIN

    @property
    def path(self) -> str:
        """Its name for ``needs``."""
        return f"{self.group}/{self.name}"


def _pass(limits: Deadlines) -> float:
    return limits.completion + _MARGIN


def _offload(limits: Deadlines) -> float:
    # Before it is waited for, a client connects.
    return limits.offload + 3 * limits.answer + _MARGIN


def _transfer(limits: Deadlines) -> float:
    return 2 * limits.transfer + 2 * limits.answer + _MARGIN


ENGINE, HTTP, ZMQ, MODEL, TRIP = "engine", "cache HTTP", "cache ZeroMQ", "model", "round trip"

CHECKS: tuple[Check, ...] = (
    Check(ENGINE, "reachable", engine.reachable),
    Check(ENGINE, "API", engine.api, [f"{ENGINE}/reachable"]),
    Check(ENGINE, "model", engine.model, [f"{ENGINE}/API"]),
    Check(ENGINE, "token ids", engine.token_ids, [f"{ENGINE}/model"], _pass),
    Check(ENGINE, "cached tokens", engine.cached_tokens, [f"{ENGINE}/token ids"]),
    Check(HTTP, "reachable", cache_http.reachable),
    Check(HTTP, "status", cache_http.status, [f"{HTTP}/reachable"]),
    Check(HTTP, "transfer mode", cache_http.mode, [f"{HTTP}/status"]),
    Check(HTTP, "memory", cache_http.memory, [f"{HTTP}/status"]),
    Check(ZMQ, "reachable", cache_zmq.reachable),
    Check(ZMQ, "registration", cache_zmq.registration, [f"{ZMQ}/reachable", f"{HTTP}/transfer mode"]),
    Check(ZMQ, "same server", cache_zmq.same_server, [f"{ZMQ}/registration"]),
    Check(ZMQ, "data plane", cache_zmq.data_plane, [f"{ZMQ}/same server"]),
    Check(MODEL, "registered", model.registered, [f"{HTTP}/status"]),
    Check(MODEL, "geometry", model.geometry, [f"{MODEL}/registered", f"{ZMQ}/reachable"]),
    Check(MODEL, "RoPE", model.rope, [f"{MODEL}/geometry"]),
    Check(
        TRIP,
        "prefill",
        round_trip.prefill,
        [f"{ENGINE}/token ids", f"{ZMQ}/data plane", f"{MODEL}/geometry"],
        _pass,
    ),
    Check(TRIP, "offload", round_trip.offload, [f"{TRIP}/prefill"], _offload),
    Check(TRIP, "retrieve", round_trip.retrieve, [f"{TRIP}/offload"], _transfer),
    Check(TRIP, "layout", round_trip.layout, [f"{TRIP}/retrieve"]),
    Check(TRIP, "store", round_trip.store, [f"{TRIP}/layout"], _transfer),
    Check(TRIP, "same bytes", round_trip.same, [f"{TRIP}/store"], _transfer),
    Check(TRIP, "isolation", round_trip.isolation, [f"{TRIP}/store"]),
    Check(TRIP, "decode", round_trip.decode, [f"{TRIP}/same bytes"], _pass),
)
