"""The pickle data plane: a list of CPU tensors, one a chunk, and nothing else.

A pickle from the network can run any code, so the one that is read here can build a list of CPU
tensors and can name nothing beyond the three functions that this takes.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

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
    try:
        loaded = _TensorUnpickler(io.BytesIO(data)).load()
    except CacheError:
        raise
    except Exception as error:
        raise CacheError(f"LMCache sent chunks that cannot be read: {error}") from error
    if not isinstance(loaded, list) or len(loaded) != count:
        raise CacheError(f"LMCache sent something else than the {count} chunks that were asked for")
    for chunk in loaded:
        if not isinstance(chunk, torch.Tensor):
            raise CacheError(f"LMCache sent a {type(chunk).__name__} in place of a chunk")
        if tuple(chunk.shape) != shape or chunk.dtype != dtype:
            raise ChunkMismatchError(chunk.dtype, tuple(chunk.shape), dtype, shape)
    return loaded


def _load_storage(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


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
        raise CacheError("LMCache sent a tensor that is not a plain CPU tensor: refused")
    if len(size) != len(stride) or min((offset, *size, *stride), default=0) < 0:
        raise CacheError("LMCache sent a tensor with an impossible shape: refused")
    bytes_of = storage._untyped_storage
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and (last + 1) * storage.dtype.itemsize > bytes_of.nbytes():
        raise CacheError("LMCache sent a tensor that reaches beyond its storage: refused")
    return torch.empty(0, dtype=storage.dtype).set_(bytes_of, offset, size, stride)


_ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch.storage", "_load_from_bytes"): _load_storage,
    ("collections", "OrderedDict"): OrderedDict,
}


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return _ALLOWED[module_name, global_name]
        except KeyError:
            raise CacheError(
                f"LMCache sent a pickle that names {module_name}.{global_name}: refused"
            ) from None
