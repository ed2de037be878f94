"""The shared-memory data plane: the server's pool, mapped, and views of its slots."""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path

import torch

from ..errors import CacheConnectError
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
        self._path = _path_of(name)
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            try:
                found = os.fstat(descriptor)
                if found.st_size < size:
                    raise CacheConnectError(
                        f"the pool {self._path} has {found.st_size} bytes, {size} were announced"
                    )
                mapped = mmap.mmap(descriptor, size)
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
        # Tensors hold the mapping and do not keep it from being closed under them, so nothing closes
        # it: it ends with the last of them.
        self._bytes: torch.Tensor | None = torch.frombuffer(mapped, dtype=torch.uint8)

    def is_current(self, name: str, size: int) -> bool:
        """Tell whether this is the pool that a server announces: one that was restarted makes another.

        The old one may still be there under its own name, where the server was killed.
        """
        if (_path_of(name), size) != (self._path, self._size):
            return False
        try:
            found = self._path.stat()
        except OSError:
            return False
        return found.st_ino == self._inode and found.st_size >= size

    def chunk(self, slot: Slot, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a view of ``slot`` as the ``shape`` and ``dtype`` that the caller counts on.

        Raises:
            CacheConnectError: the pool was let go of.
            CacheError: the slot does not lie within the pool.
            ChunkMismatchError: the slot holds another shape or dtype.
        """
        if self._bytes is None:
            raise CacheConnectError(f"{self._path} is no longer LMCache's pool: was the server restarted?")
        slot.check(self._size)
        if slot.shape != shape or slot.torch_dtype != dtype:
            raise ChunkMismatchError(slot.torch_dtype, slot.shape, dtype, shape)
        length = math.prod(shape) * dtype.itemsize
        return self._bytes[slot.offset : slot.offset + length].view(dtype).view(shape)

    def close(self) -> None:
        """Let go of the pool; the segment is the server's and stays. Idempotent.

        A transfer that was left alone may still look at a slot; its end unmaps.
        """
        self._bytes = None


def _path_of(name: str) -> Path:
    plain = name.removeprefix("/")
    if plain in ("", ".", "..") or "/" in plain or "\0" in plain:
        raise CacheConnectError(f"LMCache named a shared-memory pool {name!r}: refused")
    return _FOLDER / plain
