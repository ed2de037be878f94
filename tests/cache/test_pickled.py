"""The pickle plane: chunks go through unchanged, and a pickle can do nothing but make chunks."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import tarfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmcache_stream.cache.messages import ChunkMismatchError
from lmcache_stream.cache.pickled import dump_chunks, load_chunks
from lmcache_stream.errors import CacheConnectError, CacheError

SHAPE = (2, 3, 4, 8)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BITS = {2: torch.int16, 4: torch.int32}


def chunk(dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Tensor:
    """Every bit pattern may occur: NaNs and infinities too."""
    generator = torch.Generator().manual_seed(seed)
    bits = BITS[dtype.itemsize]
    limits = torch.iinfo(bits)
    return torch.randint(limits.min, limits.max, SHAPE, generator=generator).to(bits).view(dtype)


def same(one: Tensor, other: Tensor) -> bool:
    bits = BITS[one.dtype.itemsize]
    left, right = (tensor.contiguous().view(bits) for tensor in (one, other))
    return one.dtype == other.dtype and torch.equal(left, right)


def contiguous(value: Tensor) -> Tensor:
    return value


def in_a_longer_storage(value: Tensor) -> Tensor:
    longer = torch.zeros(value.numel() + 50, dtype=value.dtype)
    view = longer[17 : 17 + value.numel()].view(value.shape)
    view.copy_(value)
    return view


def transposed(value: Tensor) -> Tensor:
    return value.transpose(1, 3).contiguous().transpose(1, 3)


def strided(value: Tensor) -> Tensor:
    wider = torch.zeros((*value.shape[:-1], 2 * value.shape[-1]), dtype=value.dtype)
    view = wider[..., 1::2]
    view.copy_(value)
    return view


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", [contiguous, in_a_longer_storage, transposed, strided])
@pytest.mark.parametrize("protocol", [3, 4, 5])
@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_what_a_server_pickles_is_read_bit_for_bit(
    dtype: torch.dtype, form: Callable[[Tensor], Tensor], protocol: int, kind: Callable[[bytes], Any]
) -> None:
    chunks = [form(chunk(dtype, seed=seed)) for seed in range(3)]
    found = load_chunks(kind(pickle.dumps(chunks, protocol)), 3, SHAPE, dtype)
    assert len(found) == 3
    for one, other in zip(found, chunks, strict=True):
        assert same(one, other)
        assert not one.requires_grad


def test_chunks_of_one_storage_are_read() -> None:
    both = torch.stack([chunk(seed=1), chunk(seed=2)])
    found = load_chunks(pickle.dumps(list(both)), 2, SHAPE, torch.float32)
    assert same(torch.stack(found), both)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_server_reads_what_is_dumped(dtype: torch.dtype) -> None:
    chunks = [chunk(dtype, seed=seed) for seed in range(3)]
    found = pickle.loads(dump_chunks(chunks))
    assert type(found) is list
    assert all(map(same, found, chunks))
    assert all(map(same, load_chunks(dump_chunks(chunks), 3, SHAPE, dtype), chunks))


def test_what_is_read_is_private() -> None:
    value = chunk()
    data = dump_chunks([value])
    (first,) = load_chunks(data, 1, SHAPE, torch.float32)
    first.zero_()
    (second,) = load_chunks(data, 1, SHAPE, torch.float32)
    assert same(second, value)


@pytest.mark.parametrize(
    "found",
    [
        chunk(torch.float16),
        chunk(torch.bfloat16),
        chunk().view(torch.int32),
        chunk().double(),
        chunk()[:1],
        chunk().view(2, 3, 8, 4),
        chunk().flatten(),
        torch.zeros(()),
        torch.zeros((0,)),
    ],
    ids=lambda found: f"{found.dtype}{list(found.shape)}",
)
def test_chunks_of_another_shape_or_dtype_are_told_apart(found: Tensor) -> None:
    with pytest.raises(ChunkMismatchError) as caught:
        load_chunks(pickle.dumps([found]), 1, SHAPE, torch.float32)
    assert (caught.value.dtype, caught.value.shape) == (found.dtype, tuple(found.shape))


@pytest.mark.parametrize(
    "found",
    [
        [],
        [chunk()],
        [chunk()] * 3,
        (chunk(), chunk()),
        {0: chunk(), 1: chunk()},
        [[chunk(), chunk()]],
        [[chunk()], [chunk()]],
        chunk(),
        None,
        2,
        "ab",
        b"ab",
        [1, 2],
        [chunk(), None],
        [chunk(), "chunk"],
        [chunk().untyped_storage().nbytes(), chunk()],
        OrderedDict(a=chunk(), b=chunk()),
    ],
    ids=lambda found: type(found).__name__,
)
def test_anything_but_a_list_of_so_many_tensors_is_refused(found: Any) -> None:
    with pytest.raises(CacheError) as caught:
        load_chunks(pickle.dumps(found), 2, SHAPE, torch.float32)
    assert not isinstance(caught.value, CacheConnectError)


# Pickles made by hand.


def body(value: Any) -> bytes:
    """The opcodes that put ``value`` on the stack."""
    return pickle.dumps(value, 3)[2:-1]


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def call(module: str, attribute: str, *arguments: bytes) -> bytes:
    return name(module, attribute) + b"(" + b"".join(arguments) + b"tR"


def listed(*items: bytes) -> bytes:
    return b"\x80\x03](" + b"".join(items) + b"e."


def legacy(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


STORAGE_BYTES = legacy(chunk().flatten()._typed_storage())  # type: ignore[no-untyped-call]


def storage(data: bytes = STORAGE_BYTES) -> bytes:
    return call("torch.storage", "_load_from_bytes", body(data))


NO_HOOKS = call("collections", "OrderedDict")


def tensor(
    *,
    stored: bytes | None = None,
    offset: Any = 0,
    size: Any = SHAPE,
    stride: Any = (96, 32, 8, 1),
    grad: bytes = b"\x89",
    hooks: bytes = NO_HOOKS,
    more: bytes = b"",
) -> bytes:
    rest = [body(offset), body(size), body(stride), grad, hooks, more]
    return call("torch._utils", "_rebuild_tensor_v2", stored or storage(), *rest)


def load(data: bytes, count: int = 1) -> list[Tensor]:
    return load_chunks(data, count, SHAPE, torch.float32)


def test_a_pickle_made_by_hand_is_read_where_nothing_is_wrong_with_it() -> None:
    (found,) = load(listed(tensor()))
    assert same(found, chunk())


MARK = "a file that is made where code of the pickle runs"
COMMAND = f"touch '{MARK}'"


class Evil:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> Any:
        return self._call


CODE = f"open({MARK!r}, 'w').close()"
CALLS = {
    "os.system": Evil(os.system, COMMAND),
    "eval": Evil(eval, CODE),
    "exec": Evil(exec, CODE),
    "getattr": Evil(getattr, "", "join"),
    "import": Evil(__import__, "antigravity"),
    "subprocess": Evil(subprocess.Popen, ["touch", MARK]),
    "open": Evil(open, MARK, "w"),
    "Path.touch": Evil(Path.touch, Path(MARK)),
    "torch.load": Evil(torch.load, MARK),
    "numpy": np.zeros(SHAPE, np.float32),
    "numpy scalar": np.float32(1),
    "a class": OrderedDict,
    "a function": torch.load,
    "a module's function by its own name": torch._utils._rebuild_tensor,
    "a parameter": torch.nn.Parameter(chunk()),
    "a dtype": torch.float32,
    "a device": torch.device("cpu"),
    "an untyped storage": chunk().untyped_storage(),
    "a set": {1},
    "a bytearray subclass's state": Evil(bytearray, 10**12),
}


def refuse(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CacheError:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CacheError) as caught:
        load(data)
    assert not isinstance(caught.value, CacheConnectError)
    assert list(tmp_path.iterdir()) == []
    return caught.value


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("what", CALLS)
def test_a_pickle_that_names_anything_else_is_refused_unrun(
    what: str, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "a parameter" and protocol < 2:
        pytest.skip("does not pickle")
    refuse(pickle.dumps([CALLS[what]], protocol), tmp_path, monkeypatch)


def test_what_was_named_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = refuse(pickle.dumps([CALLS["eval"]]), tmp_path, monkeypatch)
    assert "names builtins.eval: refused" in str(error)


def as_torchscript() -> bytes:
    class Module(torch.nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return value

    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(Module()), buffer)
    return buffer.getvalue()


def as_tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for member in ("storages", "tensors", "pickle"):
            info = tarfile.TarInfo(member)
            data = pickle.dumps(CALLS["os.system"])
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def as_zip(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


NESTED: dict[str, Callable[[], bytes]] = {
    "a call": lambda: legacy(CALLS["os.system"]),
    "a call in a zip": lambda: as_zip(CALLS["os.system"]),
    "a call as the first pickle": lambda: pickle.dumps(CALLS["os.system"]),
    "a call after the magic number": lambda: STORAGE_BYTES[:15] + pickle.dumps(CALLS["os.system"]),
    "a storage in a zip": lambda: as_zip(chunk().flatten()._typed_storage()),  # type: ignore[no-untyped-call]
    "a tensor in a zip": lambda: as_zip(chunk()),
    "TorchScript": as_torchscript,
    "a tar": as_tar,
    "a dict": lambda: legacy({"a": 1}),
    "a tensor": lambda: legacy(chunk()),
    "a number": lambda: legacy(1),
    "nothing": lambda: b"",
    "garbage": lambda: b"\x93NUMPY" + bytes(100),
    "too few elements": lambda: STORAGE_BYTES[:-1],
    "another number of elements": lambda: STORAGE_BYTES.replace(
        (192).to_bytes(8, "little"), (191).to_bytes(8, "little")
    ),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("what", NESTED)
def test_a_storage_that_is_something_else_is_refused_unrun(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(listed(tensor(stored=storage(NESTED[what]()))), tmp_path, monkeypatch)
    refuse(listed(storage(NESTED[what]())), tmp_path, monkeypatch)


# By hand: what torch would build, read beyond its memory or call later.
BAD_TENSORS = {
    "beyond its storage by size": tensor(size=(2, 3, 4, 9), stride=(96, 32, 8, 1)),
    "beyond its storage by stride": tensor(stride=(97, 32, 8, 1)),
    "beyond its storage by offset": tensor(offset=1),
    "far beyond its storage": tensor(offset=2**62),
    "beyond every integer": tensor(offset=2**70),
    "beyond by an overflow": tensor(size=(2**62, 4), stride=(4, 1)),
    "a negative stride": tensor(stride=(96, 32, 8, -1)),
    "a negative offset": tensor(offset=-1),
    "a negative size": tensor(size=(-2, -3, 4, 8)),
    "more sizes than strides": tensor(stride=(96, 32, 8)),
    "no sizes": tensor(size=None),
    "sizes that are text": tensor(size="2348"),
    "sizes that are no integers": tensor(size=(2.0, 3, 4, 8)),
    "requires_grad": tensor(grad=b"\x88"),
    "hooks": tensor(hooks=body((1,))),
    "metadata": tensor(more=body((1,))),
    "a storage that is a list": tensor(stored=body([1, 2])),
    "a storage that is a tensor": tensor(stored=tensor()),
    "too few arguments": call("torch._utils", "_rebuild_tensor_v2", storage()),
    "too many arguments": tensor(more=body(None) + body(None)),
    "no arguments": call("torch._utils", "_rebuild_tensor_v2"),
    "the function itself": name("torch._utils", "_rebuild_tensor_v2"),
    "a storage": storage(),
    "an OrderedDict": NO_HOOKS,
}


@pytest.mark.parametrize("what", BAD_TENSORS)
def test_a_tensor_that_is_not_plain_is_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(listed(BAD_TENSORS[what]), tmp_path, monkeypatch)


OTHER_OPCODES = {
    "a persistent id": b"\x80\x03](Pid\ne.",
    "a binary persistent id": b"\x80\x03](K\x01Qe.",
    "a number of the extension registry": b"\x80\x03](\x82\x01e.",
    "an old instance": b"\x80\x03](ios\nsystem\n" + body(COMMAND) + b"oe.",
    "an old object": b"\x80\x03]((" + name("os", "system") + body(COMMAND) + b"oe.",
    "a new object": b"\x80\x03](" + name("collections", "OrderedDict") + b")\x81e.",
    "an out-of-band buffer": b"\x80\x05](\x97e.",
    # BUILD sets attributes: of a tensor past every check, and of the functions themselves for all
    # pickles to come.
    "state for a tensor": listed(tensor() + b"(" + storage() + body(0) + body((2**20,)) + body((1,)) + b"tb"),
    "hooks for a tensor": listed(tensor() + b"(\x88\x89" + body({0: 1}) + b"tb"),
    "state for a storage": listed(tensor(stored=storage() + body({"dtype": 1}) + b"b")),
    "state for a function": listed(
        name("torch._utils", "_rebuild_tensor_v2")
        + body((None, {"__defaults__": (1, 1, 1, 1, 1, 1, 1)}))
        + b"b0"
        + tensor()
    ),
    "state for a class": listed(
        name("collections", "OrderedDict") + body((None, {"__init__": 1})) + b"b0" + tensor()
    ),
}


@pytest.mark.parametrize("what", OTHER_OPCODES)
def test_opcodes_that_chunks_do_not_need_are_refused(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(OTHER_OPCODES[what], tmp_path, monkeypatch)


@pytest.mark.parametrize("what", OTHER_OPCODES)
def test_after_a_refusal_chunks_are_read_as_before(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(OTHER_OPCODES[what], tmp_path, monkeypatch)
    (found,) = load(dump_chunks([chunk()]))
    assert same(found, chunk())


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\x80",
        b"\x80\x04",
        b".",
        b"\x80\x63.",
        b"\x00" * 100,
        b"\xff" * 100,
        b"garbage",
        b"\x80\x04]" * 1000,
        b"\x80\x04" + b"(" * 100_000,
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f].",
        b"\x80\x04B\xff\xff\xff\x7f.",
        b"\x80\x04h\x07.",
        b"<!DOCTYPE html>",
    ],
)
def test_garbage_is_refused(garbage: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(garbage, tmp_path, monkeypatch)


def test_a_truncated_pickle_is_refused_wherever_it_ends() -> None:
    data = pickle.dumps([torch.ones(2)])
    for length in range(len(data)):
        with pytest.raises(CacheError):
            load_chunks(data[:length], 1, (2,), torch.float32)


def test_a_pickle_with_a_changed_byte_gives_chunks_or_an_error() -> None:
    data = pickle.dumps([torch.ones(2)])
    for position in range(len(data)):
        changed = bytearray(data)
        changed[position] ^= 0x21
        try:
            (found,) = load_chunks(bytes(changed), 1, (2,), torch.float32)
        except (CacheError, ChunkMismatchError):
            continue
        assert (found.shape, found.dtype, found.device.type) == ((2,), torch.float32, "cpu")


@pytest.mark.parametrize("device", ["cuda:0", "mps:0", "xpu:1", "nowhere"])
def test_storages_of_another_device_become_tensors_of_the_cpu(device: str) -> None:
    tag = b"X" + len(device).to_bytes(4, "little") + device.encode()
    located = STORAGE_BYTES.replace(b"X\x03\x00\x00\x00cpu", tag)
    assert located != STORAGE_BYTES
    (found,) = load(listed(tensor(stored=storage(located))))
    assert found.device.type == "cpu"
    assert same(found, chunk())
