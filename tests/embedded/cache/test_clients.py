from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from lmcache_stream.cache.geometry import KVGeometry
from lmcache_stream.cache.messages import Registration
from lmcache_stream.embedded.cache.clients import Clients
from lmcache_stream.embedded.cache.options import CacheOptions
from lmcache_stream.embedded.cache.refusal import RefusedError

OPTIONS = CacheOptions(chunk_size=8, reap_timeout=120, registration_grace=3600)
REGISTRATION = Registration(
    instance_id=1,
    model_name="model",
    world_size=1,
    block_size=4,
    num_layers=3,
    hidden_dim_size=16,
    dtype_str="float16",
    use_mla=False,
    num_physical_slots=8,
)


def registration(**changes: Any) -> Registration:
    return msgspec.structs.replace(REGISTRATION, **changes)


@pytest.fixture
def clients() -> Clients:
    return Clients(OPTIONS, {})


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({}, (2, 3, 8, 16)),
        ({"use_mla": True}, (3, 8, 16)),
        ({"num_physical_slots": 4}, (2, 3, 4, 16)),
        ({"num_physical_slots": None}, (2, 3, 8, 16)),
    ],
)
def test_the_shape_of_a_clients_chunks(
    clients: Clients, changes: dict[str, Any], shape: tuple[int, ...]
) -> None:
    clients.register(registration(**changes), 0)
    layout = clients.of_transfer(1, 0).layout
    assert (layout.shape, layout.dtype) == (shape, torch.float16)


@pytest.mark.parametrize(
    "changes", [{"dtype_str": "float"[::-1]}, {"dtype_str": "Tensor"}, {"num_physical_slots": 0}]
)
def test_a_registration_that_cannot_be_is_refused(clients: Clients, changes: dict[str, Any]) -> None:
    with pytest.raises(RefusedError):
        clients.register(registration(**changes), 0)
    assert not clients.all()


def test_only_registered_clients_move_chunks(clients: Clients) -> None:
    with pytest.raises(RefusedError):
        clients.of_transfer(1, 0)
    clients.register(registration(), 0)
    clients.of_transfer(1, 0)
    assert clients.unregister(1)
    assert not clients.unregister(1)
    with pytest.raises(RefusedError):
        clients.of_transfer(1, 0)


def test_a_model_is_known_by_name_and_workers() -> None:
    shape = KVGeometry(
        num_layers=1, num_kv_heads=1, head_size=8, dtype=torch.float16, layout="two-plane", block_size=4
    )
    clients = Clients(OPTIONS, {"announced": shape})
    clients.register(registration(), 0)
    assert clients.knows("model", 1)
    assert clients.knows("announced", 1)
    for name, world_size in (("model", 2), ("announced", 2), ("mode", 1)):
        assert not clients.knows(name, world_size)


@pytest.mark.parametrize(
    ("deeds", "silent_for"),
    [
        ([], 3600),
        (["ping"], 120),
        (["ping", "move"], 120),
        (["ping", "register"], 120),
        (["move"], 3600),
        (["register"], 3600),
    ],
)
def test_a_silent_client_is_forgotten_sooner_once_it_has_pinged(
    clients: Clients, deeds: list[str], silent_for: int
) -> None:
    clients.register(registration(), 0)
    now = 0.0
    for deed in deeds:
        now += 100
        if deed == "ping":
            clients.ping(1, now)
        elif deed == "move":
            clients.of_transfer(1, now)
        else:
            clients.register(registration(), now)
    assert clients.reap(now + silent_for) == []
    assert clients.reap(now + silent_for + 1) == [1]
    assert not clients.all()


def test_a_ping_of_nobody_makes_nobody(clients: Clients) -> None:
    clients.ping(5, 0)
    assert not clients.all()
