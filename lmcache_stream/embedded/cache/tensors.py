"""Bytes of chunks on the pickle plane; what a worker thread does."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...cache.messages import Encoded, PrepareRetrieveReply
from ...cache.pickled import dump_chunks, unpickle_tensors
from ...errors import CacheError
from .refusal import RefusedError
from .wire import OfferedSlots


def load_tensors(data: memoryview) -> list[torch.Tensor]:
    """Return the CPU tensors that a client pickled; nothing else can come of the bytes.

    Raises:
        RefusedError: they are anything but the pickle of a list of plain tensors.
    """
    try:
        return unpickle_tensors(data)
    except CacheError as error:
        raise RefusedError(str(error)) from error


def copy_chunks(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the first of each pair into the second, of the same shape."""
    for source, target in pairs:
        target.copy_(source)


def encode_chunks(chunks: Iterable[torch.Tensor]) -> Encoded:
    """Return the reply that carries ``chunks``.

    Raises:
        CacheError: it is larger than a message can be.
    """
    # A tensor is pickled with all of its storage, and that of these is the whole pool.
    data = dump_chunks([chunk.clone() for chunk in chunks])
    return Encoded.of(PrepareRetrieveReply(True, memoryview(data), OfferedSlots()))
