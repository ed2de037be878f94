"""Whether a caller's KV is what the cache can hold; pure."""

from __future__ import annotations

import torch

from ..errors import InvalidRequestError, LayoutError
from . import layouts
from .geometry import KVGeometry

__all__ = ["check_editable", "check_kv"]


def check_kv(kv: object, num_tokens: int, geometry: KVGeometry, model_name: str) -> None:
    """Raise unless ``kv`` is ``[2, L, T, D]`` of ``num_tokens`` tokens, of the geometry's dtype.

    Raises:
        InvalidRequestError: another shape or dtype.
        LayoutError: KV that cannot be stored.
    """
    if not isinstance(kv, torch.Tensor):
        raise InvalidRequestError(f"kv must be a torch.Tensor, not {type(kv).__name__}")
    if kv.is_meta or kv.layout != torch.strided:
        raise InvalidRequestError(f"kv must be a dense tensor with data, not {kv.layout} on {kv.device}")
    check_editable(geometry, model_name)
    wanted = layouts.get(geometry.layout).kv_shape(geometry, num_tokens)
    if tuple(kv.shape) != wanted:
        raise InvalidRequestError(
            f"kv has shape {list(kv.shape)}, but [planes, L, T, D] for {num_tokens} tokens of "
            f"{model_name!r} is {list(wanted)}"
        )
    if kv.dtype != geometry.dtype:
        raise InvalidRequestError(
            f"kv is {kv.dtype}, but the cache holds {geometry.dtype}: convert it with kv.to(...)"
        )


def check_editable(geometry: KVGeometry, model_name: str) -> None:
    """Raise LayoutError for what has no K and V."""
    if geometry.layout == "mla":
        raise LayoutError(
            f"{model_name!r} caches an MLA latent: it can be retrieved, but not edited like K and V"
        )
