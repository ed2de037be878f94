"""The memory of the chunks: a segment that clients of this machine can map, or private bytes."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import secrets
from pathlib import Path

import torch

from ...cache.messages import Slot
from ...errors import CacheError

logger = logging.getLogger(__name__)

_FOLDER = Path("/dev/shm")
# Clients of LMCache count on its beginning. The rest tells these segments from LMCache's own.
_PREFIX = "lmcache_l1_pool_embedded_"


class Pool:
    """``size`` bytes, of which the system gives pages as they are written.

    Attributes:
        name: of the segment under /dev/shm; empty for private bytes.
        size: bytes.
    """

    def __init__(self, size: int, *, shared: bool) -> None:
        """Make the memory.

        Raises:
            CacheError: there is no room for it.
        """
        self.size = size
        self._descriptor = -1
        self.name = ""
        try:
            mapped = self._map_shared() if shared else mmap.mmap(-1, size)
        except (OSError, OverflowError, ValueError) as error:
            self._unlink()
            where = str(_FOLDER) if shared else "memory"
            raise CacheError(
                f"no pool of {size} bytes in {where}: {error}. Take a smaller one, or none in shared memory"
            ) from error
        self._bytes: torch.Tensor | None = torch.frombuffer(mapped, dtype=torch.uint8)

    def _map_shared(self) -> mmap.mmap:
        _remove_ownerless()
        free = os.statvfs(_FOLDER)
        if self.size > free.f_bavail * free.f_frsize:
            raise OSError(f"only {free.f_bavail * free.f_frsize} bytes are free")
        self._make_segment()
        os.ftruncate(self._descriptor, self.size)
        return mmap.mmap(self._descriptor, self.size)

    def _make_segment(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        while True:
            self.name = f"{_PREFIX}{secrets.token_hex(8)}"
            self._descriptor = os.open(_FOLDER / self.name, flags, 0o600)
            # Held for as long as this process lives, however it ends.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if os.fstat(self._descriptor).st_nlink:
                return
            # Another process took it for ownerless before it was locked.
            self._unlink()

    def back(self, offset: int, length: int) -> bool:
        """Get memory for a range before somebody writes into it; False where there is none.

        A page that cannot be had when it is written ends the process that writes it.
        """
        if self._descriptor < 0:
            return True
        try:
            os.posix_fallocate(self._descriptor, offset, length)
        except OSError as error:
            logger.warning("no memory for %d bytes of the pool: %s", length, error)
            return False
        return True

    def view(self, slot: Slot) -> torch.Tensor:
        """Return the chunk in ``slot``, whose memory it shares.

        Raises:
            CacheError: the pool is closed.
        """
        if self._bytes is None:
            raise CacheError("the pool is closed")
        taken = self._bytes[slot.offset : slot.offset + slot.length]
        return taken.view(slot.torch_dtype).view(slot.shape)

    def close(self) -> None:
        """Unlink the segment; what somebody still looks at stays mapped. Idempotent."""
        self._bytes = None
        self._unlink()

    def _unlink(self) -> None:
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)
        if self.name:
            with contextlib.suppress(FileNotFoundError):
                (_FOLDER / self.name).unlink()


def _remove_ownerless() -> None:
    """Unlink the segments of processes that were killed, e.g. with a notebook's kernel."""
    for path in _FOLDER.glob(f"{_PREFIX}*"):
        # Another user's, or one that goes at this moment.
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                logger.info("the segment %s had no process any more", path)
            finally:
                os.close(descriptor)
