"""The shared pool: mapped, checked, written through, and never unlinked by a client."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lmcache_stream.cache.messages import ChunkMismatchError, Slot
from lmcache_stream.cache.shared_memory import SharedPool
from lmcache_stream.errors import CacheConnectError, CacheError

SIZE = 1 << 16
SHAPE = (2, 3, 4)
FOLDER = Path("/dev/shm")


@pytest.fixture
def segment() -> Iterator[Path]:
    """A segment as a server makes it; its byte i is i modulo 251."""
    path = FOLDER / f"lmcs-test-{secrets.token_hex(6)}"
    path.write_bytes(bytes(i % 251 for i in range(SIZE)))
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def pool(segment: Path) -> Iterator[SharedPool]:
    opened = SharedPool(segment.name, SIZE)
    yield opened
    opened.close()


def slot(offset: int = 4096, dtype: str = "float32", shape: tuple[int, ...] = SHAPE, length: int = 0) -> Slot:
    itemsize: int = getattr(torch, dtype).itemsize
    return Slot(offset, length or torch.Size(shape).numel() * itemsize, shape, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("offset", [0, 4096, SIZE - 96])
def test_a_chunk_is_the_bytes_of_its_slot(pool: SharedPool, segment: Path, offset: int, dtype: str) -> None:
    wanted: torch.dtype = getattr(torch, dtype)
    chunk = pool.chunk(slot(offset, dtype), SHAPE, wanted)
    assert (tuple(chunk.shape), chunk.dtype) == (SHAPE, wanted)
    assert chunk.is_contiguous()
    there = segment.read_bytes()[offset : offset + chunk.nbytes]
    assert bytes(chunk.view(torch.uint8).flatten().tolist()) == there


def test_a_chunk_is_written_through_and_nothing_beside_it(pool: SharedPool, segment: Path) -> None:
    before = segment.read_bytes()
    values = torch.randn(SHAPE)
    pool.chunk(slot(), SHAPE, torch.float32).copy_(values)
    after = segment.read_bytes()
    assert after[4096 : 4096 + 96] == values.numpy().tobytes()
    assert after[:4096] == before[:4096]
    assert after[4096 + 96 :] == before[4096 + 96 :]


def test_what_the_server_writes_is_seen(pool: SharedPool, segment: Path) -> None:
    chunk = pool.chunk(slot(), SHAPE, torch.float32)
    with segment.open("r+b") as file:
        file.seek(4096)
        file.write(bytes(96))
    assert torch.equal(chunk, torch.zeros(SHAPE))


def test_a_slot_longer_than_its_shape_gives_the_shape(pool: SharedPool) -> None:
    chunk = pool.chunk(slot(length=4096), SHAPE, torch.float32)
    assert chunk.nbytes == 96


@pytest.mark.parametrize(
    "bad",
    [
        slot(-4),
        slot(SIZE),
        slot(SIZE - 92),
        slot(4098),
        slot(length=95),
        slot(shape=(2, 3, 0)),
        Slot(0, 96, SHAPE, "float33"),
        slot(2**62),
    ],
    ids=repr,
)
def test_a_slot_that_is_not_in_the_pool_is_refused(pool: SharedPool, bad: Slot) -> None:
    with pytest.raises(CacheError):
        pool.chunk(bad, bad.shape, torch.float32)


@pytest.mark.parametrize(
    "other",
    [
        slot(shape=(2, 3, 5)),
        slot(shape=(3, 2, 4)),
        slot(shape=(24,)),
        slot(dtype="float16"),
        slot(dtype="int32"),
    ],
    ids=repr,
)
def test_a_slot_of_another_shape_or_dtype_is_told_apart(pool: SharedPool, other: Slot) -> None:
    with pytest.raises(ChunkMismatchError) as caught:
        pool.chunk(other, SHAPE, torch.float32)
    assert (caught.value.shape, caught.value.dtype) == (other.shape, other.torch_dtype)


def test_a_name_may_begin_with_the_slash_of_posix(segment: Path) -> None:
    pool = SharedPool(f"/{segment.name}", SIZE)
    assert pool.is_current(segment.name, SIZE)
    assert pool.is_current(f"/{segment.name}", SIZE)
    pool.close()


@pytest.mark.parametrize(
    "name",
    ["", "/", ".", "..", "../etc/passwd", "a/b", "/dev/shm/a", "//a/../../etc/passwd", "x/..", "a\0b"],
)
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(CacheConnectError, match="refused"):
        SharedPool(name, SIZE)


def test_a_missing_pool_says_what_to_do() -> None:
    name = f"lmcs-test-{secrets.token_hex(6)}"
    with pytest.raises(CacheConnectError, match=r"server's machine .* without --shm-name") as caught:
        SharedPool(name, SIZE)
    assert f"/dev/shm/{name}" in str(caught.value)
    assert not (FOLDER / name).exists()


def test_a_pool_that_is_a_folder_is_refused() -> None:
    path = FOLDER / f"lmcs-test-{secrets.token_hex(6)}"
    path.mkdir()
    try:
        with pytest.raises(CacheConnectError):
            SharedPool(path.name, SIZE)
    finally:
        path.rmdir()


@pytest.mark.parametrize("announced", [SIZE + 1, 2 * SIZE, 2**62, 2**70])
def test_a_pool_smaller_than_announced_is_refused(segment: Path, announced: int) -> None:
    # A page beyond the file's end would be a SIGBUS.
    with pytest.raises(CacheConnectError, match=f"{SIZE} bytes, {announced} were announced"):
        SharedPool(segment.name, announced)


def test_no_more_than_what_was_announced_is_reached(segment: Path) -> None:
    pool = SharedPool(segment.name, 4096)
    with pytest.raises(CacheError):
        pool.chunk(slot(4096), SHAPE, torch.float32)
    pool.close()


def test_a_pool_is_current_while_name_size_and_file_are_the_same(pool: SharedPool, segment: Path) -> None:
    assert pool.is_current(segment.name, SIZE)


@pytest.mark.parametrize("change", ["replaced", "removed", "shrunk", "another name", "another size"])
def test_a_pool_is_not_current_after_the_server_made_another(
    pool: SharedPool, segment: Path, change: str
) -> None:
    name, size = segment.name, SIZE
    if change == "replaced":
        segment.unlink()
        segment.write_bytes(bytes(SIZE))
    elif change == "removed":
        segment.unlink()
    elif change == "shrunk":
        os.truncate(segment, SIZE // 2)
    elif change == "another name":
        # The old server was killed: its segment is still there, and nobody's.
        name = f"{name}-2"
    else:
        size = SIZE // 2
    assert not pool.is_current(name, size)


def test_closing_unmaps_and_leaves_the_segment(pool: SharedPool, segment: Path) -> None:
    before = segment.read_bytes()
    pool.close()
    pool.close()
    assert segment.read_bytes() == before
    assert segment.name not in Path("/proc/self/maps").read_text()
    with pytest.raises(CacheConnectError, match=segment.name):
        pool.chunk(slot(), SHAPE, torch.float32)


def test_a_chunk_that_is_still_looked_at_outlives_the_closing(pool: SharedPool, segment: Path) -> None:
    chunk = pool.chunk(slot(), SHAPE, torch.float32)
    pool.close()
    chunk.fill_(7)
    assert segment.read_bytes()[4096 : 4096 + 96] == torch.full(SHAPE, 7.0).numpy().tobytes()
    del chunk
    assert segment.name not in Path("/proc/self/maps").read_text()


def test_no_descriptor_stays_open(segment: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count
    pool = SharedPool(segment.name, SIZE)
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # noqa: PTH208 - mmap keeps a duplicate
    pool.close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - a count


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_the_segment_outlives_a_client_that(how: str, segment: Path) -> None:
    """Python's own SharedMemory would have the resource tracker unlink it."""
    script = f"""
        import os, torch
        from lmcache_stream.cache.messages import Slot
        from lmcache_stream.cache.shared_memory import SharedPool
        pool = SharedPool({segment.name!r}, {SIZE})
        pool.chunk(Slot(0, 96, {SHAPE}, "float32"), {SHAPE}, torch.float32).fill_(7)
        {"os.kill(os.getpid(), 9)" if how == "is killed" else "pass"}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    assert done.returncode == (-9 if how == "is killed" else 0), done.stderr
    # The resource tracker, a process of its own, complains and unlinks when its client has ended.
    assert done.stderr == ""
    found = segment.read_bytes()
    assert found[:96] == torch.full(SHAPE, 7.0).numpy().tobytes()
    assert len(found) == SIZE
