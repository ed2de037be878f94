"""The pickle data plane: a list of CPU tensors, one a chunk, and nothing else.

A pickle from the network can run any code, so the one that is read here can build a list of CPU
tensors: it can name nothing beyond the three functions that this takes, and has no more opcodes.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from ..errors import CacheError
from .messages import ChunkMismatchError


def dump_chunks(chunks: Sequence[torch.Tensor]) -> bytes:
    """Return the pickle of ``chunks`` as the server reads it."""
    return pickle.dumps(list(chunks), protocol=pickle.HIGHEST_PROTOCOL)


def load_chunks(
    data: bytes | memoryview, count: int, shape: tuple[int, ...], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return the ``count`` tensors of ``shape`` and ``dtype`` that a server pickled.

    Raises:
        ChunkMismatchError: the chunks have another shape or dtype.
        CacheError: the data is anything else.
    """
    loaded = unpickle_tensors(data)
    if len(loaded) != count:
        raise CacheError(f"a peer sent something else than the {count} chunks that were asked for")
    for chunk in loaded:
        if tuple(chunk.shape) != shape or chunk.dtype != dtype:
            raise ChunkMismatchError(chunk.dtype, tuple(chunk.shape), dtype, shape)
    return loaded


def unpickle_tensors(data: bytes | memoryview) -> list[torch.Tensor]:
    """Return the CPU tensors whose list was pickled by somebody who is not trusted.

    Raises:
        CacheError: the data is anything else.
    """
    try:
        loaded = _TensorUnpickler(io.BytesIO(data)).load()
    except CacheError:
        raise
    except Exception as error:
        raise CacheError(f"a peer sent chunks that cannot be read: {error!r}") from error
    if not isinstance(loaded, list):
        raise CacheError(f"a peer sent a {type(loaded).__name__} in place of a list of chunks")
    for chunk in loaded:
        if not isinstance(chunk, torch.Tensor):
            raise CacheError(f"a peer sent a {type(chunk).__name__} in place of a chunk")
    return loaded


# How torch begins a storage within a pickle. Its other formats (zip, TorchScript, tar) do more than
# hold numbers, in older versions of torch even with weights_only.
_STORAGE_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def _load_storage(data: bytes) -> torch.TypedStorage:
    if not data.startswith(_STORAGE_MAGIC):
        raise CacheError("a peer sent a storage in another format than torch pickles it: refused")
    loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if not isinstance(loaded, torch.TypedStorage):
        raise CacheError(f"a peer sent a {type(loaded).__name__} in place of a storage: refused")
    return loaded


def _rebuild_tensor(
    storage: Any,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: Any,
    metadata: Any = None,
) -> torch.Tensor:
    if not isinstance(storage, torch.TypedStorage) or requires_grad or hooks or metadata:
        raise CacheError("a peer sent a tensor that is not a plain CPU tensor: refused")
    if len(size) != len(stride) or min((offset, *size, *stride), default=0) < 0:
        raise CacheError("a peer sent a tensor with an impossible shape: refused")
    bytes_of = storage._untyped_storage
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and (last + 1) * storage.dtype.itemsize > bytes_of.nbytes():
        raise CacheError("a peer sent a tensor that reaches beyond its storage: refused")
    return torch.empty(0, dtype=storage.dtype).set_(bytes_of, offset, size, stride)


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch.storage", "_load_from_bytes"): _load_storage,
    ("collections", "OrderedDict"): OrderedDict,
}


# What lists of tensors are made of. Not BUILD above all, which sets attributes: of a tensor past all
# checks, and of the functions above for every pickle to come.
_OPCODES = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE),
    *(pickle.SHORT_BINBYTES, pickle.BINBYTES, pickle.BINBYTES8),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS),
    *(pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.REDUCE),
)


# Python's own unpickler, as the one in C cannot do without an opcode. It handles few of them a chunk.
class _TensorUnpickler(pickle._Unpickler):
    dispatch: ClassVar = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return _ALLOWED[module_name, global_name]
        except KeyError:
            raise CacheError(
                f"a peer sent a pickle that names {module_name}.{global_name}: refused"
            ) from None
