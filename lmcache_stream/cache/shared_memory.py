"""The shared-memory data plane: the server's pool, mapped, and views of its slots."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from pathlib import Path

import torch

from ..errors import CacheConnectError, ClosedError
from .messages import ChunkMismatchError, Slot

_FOLDER = Path("/dev/shm")


class SharedPool:
    """The pool of a server on this machine, mapped for reading and writing.

    Opened as a file and not by ``multiprocessing.shared_memory``, whose resource tracker would unlink
    the server's pool when this process exits.
    """

    def __init__(self, name: str, size: int) -> None:
        """Map the first ``size`` bytes of the pool ``name``.

        Raises:
            CacheConnectError: it is not here, or smaller than the server said.
        """
        self._path = _FOLDER / name.lstrip("/")
        if self._path.parent != _FOLDER:
            raise CacheConnectError(f"LMCache named a shared-memory pool {name!r}: refused")
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            try:
                found = os.fstat(descriptor)
                if found.st_size < size:
                    raise CacheConnectError(
                        f"the pool {self._path} has {found.st_size} bytes, {size} were announced"
                    )
                self._map: mmap.mmap | None = mmap.mmap(descriptor, size)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise CacheConnectError(
                f"LMCache keeps its KV in shared memory, but {self._path} cannot be opened here "
                f"({error.strerror}): run on the server's machine and as its user, or start the "
                "server without --shm-name"
            ) from error
        self._size = size
        self._inode = found.st_ino
        self._bytes: torch.Tensor | None = torch.frombuffer(self._map, dtype=torch.uint8)

    def is_current(self) -> bool:
        """Tell whether the name still leads to what is mapped: a restarted server makes a new pool."""
        try:
            return self._path.stat().st_ino == self._inode
        except OSError:
            return False

    def chunk(self, slot: Slot, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a view of ``slot`` as the ``shape`` and ``dtype`` that the caller counts on.

        Raises:
            CacheError: the slot does not lie within the pool.
            ChunkMismatchError: the slot holds another shape or dtype.
        """
        if self._bytes is None:
            raise ClosedError(f"the shared-memory pool {self._path} is closed")
        slot.check(self._size)
        if slot.shape != shape or slot.torch_dtype != dtype:
            raise ChunkMismatchError(slot.torch_dtype, slot.shape, dtype, shape)
        length = math.prod(shape) * dtype.itemsize
        return self._bytes[slot.offset : slot.offset + length].view(dtype).view(shape)

    def close(self) -> None:
        """Unmap the pool; the segment is the server's and stays. Idempotent."""
        self._bytes = None
        mapped, self._map = self._map, None
        if mapped is not None:
            # A transfer that was left alone still looks at a slot; its end unmaps.
            with contextlib.suppress(BufferError):
                mapped.close()
