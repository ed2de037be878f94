from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lmcache_stream.cache.messages import Slot
from lmcache_stream.cache.shared_memory import SharedPool
from lmcache_stream.embedded.cache.pool import Pool
from lmcache_stream.errors import CacheError

SIZE = 1 << 16
SLOT = Slot(4096, 32, (2, 4), "float32")


def test_a_shared_pool_is_what_a_client_maps() -> None:
    pool = Pool(SIZE, shared=True)
    try:
        assert (Path("/dev/shm") / pool.name).stat().st_size == SIZE
        assert (Path("/dev/shm") / pool.name).stat().st_mode & 0o077 == 0
        client = SharedPool(pool.name, pool.size)
        client.chunk(SLOT, SLOT.shape, torch.float32).fill_(3)
        assert pool.view(SLOT).tolist() == [[3.0] * 4] * 2
        client.close()
    finally:
        pool.close()
    assert not (Path("/dev/shm") / pool.name).exists()
    pool.close()


def test_two_pools_have_two_names() -> None:
    pools = [Pool(SIZE, shared=True) for _ in range(2)]
    for pool in pools:
        pool.close()
    assert pools[0].name != pools[1].name


OWNER = f"""
import sys
from lmcache_stream.embedded.cache.pool import Pool
pool = Pool({SIZE}, shared=True)
print(pool.name, flush=True)
sys.stdin.read()
"""


def test_the_segment_of_a_killed_process_goes_with_the_next_pool() -> None:
    foreign = Path(f"/dev/shm/lmcache_l1_pool_{os.getpid()}_of_a_real_server")
    foreign.write_bytes(b"x")
    command = [sys.executable, "-c", OWNER]
    try:
        with (
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as living,
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killed,
        ):
            assert living.stdout is not None
            assert killed.stdout is not None
            kept, lost = (Path("/dev/shm") / of.readline().strip() for of in (living.stdout, killed.stdout))
            killed.kill()
            killed.wait()
            assert lost.exists()
            pool = Pool(SIZE, shared=True)
            try:
                assert (kept.exists(), lost.exists(), foreign.exists()) == (True, False, True)
                other = Pool(SIZE, shared=True)
                other.close()
                assert (Path("/dev/shm") / pool.name).exists()
            finally:
                pool.close()
                living.kill()
                living.wait()
                kept.unlink()
    finally:
        foreign.unlink()


def test_a_segment_that_is_taken_for_ownerless_before_it_is_locked_is_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lock = fcntl.flock
    taken: list[Path] = []

    def late(descriptor: int, operation: int) -> None:
        if not taken:
            taken.append(Path(f"/proc/self/fd/{descriptor}").readlink())
            taken[0].unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    pool = Pool(SIZE, shared=True)
    try:
        assert taken[0].name not in ("", pool.name)
        assert (Path("/dev/shm") / pool.name).stat().st_size == SIZE
    finally:
        pool.close()


def test_a_private_pool_has_no_name() -> None:
    pool = Pool(SIZE, shared=False)
    assert pool.name == ""
    pool.view(SLOT).fill_(2)
    assert pool.view(SLOT).sum() == 16
    pool.close()


def test_what_is_looked_at_stays_after_closing() -> None:
    pool = Pool(SIZE, shared=True)
    view = pool.view(SLOT)
    pool.close()
    view.fill_(1)
    with pytest.raises(CacheError, match="closed"):
        pool.view(SLOT)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("size", [1 << 55, 1 << 70])
def test_a_pool_that_there_is_no_room_for(size: int, shared: bool) -> None:
    before = set(Path("/dev/shm").iterdir())
    with pytest.raises(CacheError, match="no pool"):
        Pool(size, shared=shared)
    assert {path for path in set(Path("/dev/shm").iterdir()) - before if "lmcache_l1" in path.name} == set()


def test_a_segment_that_could_be_made_but_not_filled() -> None:
    free = os.statvfs("/dev/shm")
    with pytest.raises(CacheError, match="free"):
        Pool(free.f_bavail * free.f_frsize + (1 << 30), shared=True)


def test_memory_is_had_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(1 << 20, shared=True)
    try:
        path = Path("/dev/shm") / pool.name
        assert path.stat().st_blocks == 0
        assert pool.back(4096, 8192)
        assert path.stat().st_blocks * 512 == 8192
        assert path.stat().st_size == 1 << 20

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        assert not pool.back(0, 4096)
    finally:
        pool.close()
    private = Pool(4096, shared=False)
    assert private.back(0, 4096)
    private.close()
