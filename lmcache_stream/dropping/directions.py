"""How far each token's vectors point away from those of the others."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .layers import Layers

__all__ = ["unlikeness"]


def unlikeness(layers: Layers) -> Tensor:
    """Return the negative cosine to the mean of the unit vectors, averaged over heads and layers, ``[T]``.

    Args:
        layers: L layers of ``[T, H, d]``, of which one at a time is held.
    """
    scores = torch.zeros(())
    for layer in layers:
        directions = functional.normalize(layer.float(), dim=-1)
        anchor = functional.normalize(directions.mean(dim=0), dim=-1)
        scores = scores - (directions * anchor).sum(dim=-1).mean(dim=-1)
    return scores / len(layers)
