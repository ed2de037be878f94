"""The engine-driven clients that are registered, and when they were last heard of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...cache.geometry import KVGeometry
from ...cache.messages import Registration
from .options import CacheOptions
from .refusal import RefusedError
from .storage import ChunkLayout


@dataclass(slots=True)
class Client:
    """One registration.

    Attributes:
        registration: as it came first; a second one under the same id changes nothing.
        layout: of the chunks that it stores.
        last_seen: when it registered, moved chunks or pinged.
        has_pinged: whether it ever pinged, which makes silence count sooner.
    """

    registration: Registration
    layout: ChunkLayout
    last_seen: float
    has_pinged: bool = False


class Clients:
    """Registrations by instance id, and the engines that keep their KV on a device.

    Attributes:
        announced: the models of such engines.
    """

    def __init__(self, options: CacheOptions, announced: Mapping[str, KVGeometry]) -> None:
        self.announced = announced
        self._options = options
        self._clients: dict[int, Client] = {}

    def all(self) -> dict[int, Client]:
        return dict(self._clients)

    def knows(self, model_name: str, world_size: int) -> bool:
        """Tell whether any client has registered that model; without one, lookups find nothing."""
        announced = self.announced.get(model_name)
        if announced is not None and announced.world_size == world_size:
            return True
        return any(
            (client.registration.model_name, client.registration.world_size) == (model_name, world_size)
            for client in self._clients.values()
        )

    def register(self, registration: Registration, now: float) -> None:
        """Take a client in, or note that it is still there.

        Raises:
            RefusedError: an unknown dtype, or chunks without tokens.
        """
        known = self._clients.get(registration.instance_id)
        if known is not None:
            known.last_seen = now
            return
        self._clients[registration.instance_id] = Client(registration, self._layout(registration), now)

    def _layout(self, registration: Registration) -> ChunkLayout:
        dtype = getattr(torch, registration.dtype_str, None)
        if not isinstance(dtype, torch.dtype):
            raise RefusedError(f"a dtype {registration.dtype_str!r} that torch does not know")
        # Clients from before this field was there have a slot for each token.
        slots: int | None = registration.num_physical_slots
        tokens = self._options.chunk_size if slots is None else slots
        if tokens < 1:
            raise RefusedError(f"chunks of {tokens} slots")
        plane = (registration.num_layers, tokens, registration.hidden_dim_size)
        return ChunkLayout(plane if registration.use_mla else (2, *plane), dtype)

    def unregister(self, instance_id: int) -> bool:
        return self._clients.pop(instance_id, None) is not None

    def of_transfer(self, instance_id: int, now: float) -> Client:
        """Return the client that moves chunks.

        Raises:
            RefusedError: it is not registered.
        """
        client = self._clients.get(instance_id)
        if client is None:
            raise RefusedError(f"no client {instance_id} is registered")
        client.last_seen = now
        return client

    def ping(self, instance_id: int, now: float) -> None:
        client = self._clients.get(instance_id)
        if client is not None:
            client.last_seen = now
            client.has_pinged = True

    def reap(self, now: float) -> list[int]:
        """Forget the clients that are silent for too long and return their ids."""
        options = self._options
        silent = [
            instance_id
            for instance_id, client in self._clients.items()
            if now - client.last_seen
            > (options.reap_timeout if client.has_pinged else options.registration_grace)
        ]
        for instance_id in silent:
            del self._clients[instance_id]
        return silent
