"""The layer-0 self-check: does what was retrieved look like keys rotated as the config says?

In a RoPE decoder the first layer's key is a function of the token alone (biases and norms before
the rotation included) until it is rotated by its position. So un-rotated keys of equal tokens are
equal, whatever the weights; under a wrong layout, frequency, pairing or head size they are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .._checks import checked_token_ids
from ..errors import InvalidRequestError, LayoutError
from ..rope import RopeConfig, rotate_keys

__all__ = ["MAX_SPREAD", "check_layer0", "measure_spread", "repeated_rows"]

# Right keys differ by rounding alone: 0.0019 to 0.0023 on SmolLM2-135M in bfloat16, from 128 to 8,000
# tokens, and three roundings of 2^-9 bound it on any model. Wrong layouts, pairings and head sizes are
# above 0.46 there, thetas wrong by a factor of two above 0.23. Only frequencies that are wrong by less
# than the prompt can show lie between (Llama 3's scaling left out: 0.009 at 128 tokens, 0.035 at 512,
# 0.34 at 8,000); because the farthest repeats are compared, an edit of that prompt moves its keys
# wrongly by no more than this.
MAX_SPREAD = 0.01
_MAX_ROWS = 1024
_MIN_ROWS = 16
# A pair with less than this share of the average pair's energy is one that the model does not use: its
# rounding, which in float16 is absolute that far down, must not count like that of the others.
_LEAST_SHARE = 1e-6


def measure_spread(
    keys: Tensor,
    tokens: Sequence[int],
    rope: RopeConfig,
    *,
    positions: Sequence[int] | None = None,
) -> float | None:
    """Return how far un-rotated keys of equal tokens are from each other.

    The root of the mean, over the element pairs of all heads, of ``sum |k - mean|^2 / sum |k|^2``,
    the sums over tokens that occur at least twice, ``mean`` that of the token: 0 where they are
    equal, near 1 where they have nothing in common. Each pair counts alike, whatever its size:
    Qwen2.5 adds a bias to layer 0's keys that outweighs the rest by far (a norm of 605 in its 7B
    model), and in a pair that hardly turns it would hide that all others are wrong. At most 1,024
    keys are read: of each token those farthest apart, because they show a wrong frequency best.

    Args:
        keys: ``[T, D]``, the decoded keys of layer 0.
        tokens: the ``T`` token ids.
        rope: the rotation to test.
        positions: of the ``T`` tokens in their sequence; ``0 .. T - 1`` where None.

    Returns:
        The spread, infinite for keys that are not finite or all zero; None with fewer than 16 keys
        of repeated tokens.

    Raises:
        InvalidRequestError: shapes and counts do not fit.
        GeometryError: the width of the keys does not fit ``rope``.
    """
    ids = checked_token_ids(tokens, "tokens")
    if keys.dim() != 2 or len(keys) != len(ids):
        raise InvalidRequestError(f"keys of layer 0 must be [{len(ids)}, D], not {tuple(keys.shape)}")
    rows, groups = _repeats(ids)
    if len(rows) < _MIN_ROWS:
        return None
    where = torch.as_tensor(range(len(ids)) if positions is None else positions)[rows]
    still = rotate_keys(keys[rows].float(), where, torch.zeros_like(where), rope).double()
    energy = _pair_energy(still, rope)
    average = energy.mean().item()
    if not math.isfinite(average) or average == 0:
        return math.inf
    count = torch.bincount(groups).unsqueeze(1)
    mean = torch.zeros(len(count), still.shape[1], dtype=still.dtype, device=still.device)
    mean.index_add_(0, groups, still).div_(count)
    apart = _pair_energy(still - mean[groups], rope) / energy.clamp(min=_LEAST_SHARE * average)
    return math.sqrt(apart.mean().item())


def repeated_rows(tokens: Sequence[int]) -> list[int]:
    """Return, in order, the places of the tokens that ``measure_spread`` reads."""
    return sorted(_repeats(tokens)[0].tolist())


def check_layer0(
    keys: Tensor,
    tokens: Sequence[int],
    rope: RopeConfig,
    *,
    layout: str,
    others: Iterable[tuple[str, Tensor]] = (),
    positions: Sequence[int] | None = None,
) -> float | None:
    """Return the spread of the keys; raise where it says that they are not what they should be.

    Args:
        keys: ``[T, D]``, layer 0 decoded by ``layout``.
        tokens: the ``T`` token ids.
        rope: how the model should rotate.
        layout: the name of the decoding under test.
        others: names and keys of other decodings, looked at only to say what fits better.
        positions: see ``measure_spread``.

    Returns:
        The spread, or None where too few tokens repeat to tell.

    Raises:
        LayoutError: the spread is above ``MAX_SPREAD``.
    """
    spread = measure_spread(keys, tokens, rope, positions=positions)
    if spread is None or spread <= MAX_SPREAD:
        return spread
    measured = [(measure_spread(k, tokens, rope, positions=positions), name) for name, k in others]
    fitting = sorted((s, name) for s, name in measured if s is not None and s <= MAX_SPREAD)
    if fitting:
        hint = f"{fitting[0][1]} fits, with {fitting[0][0]:.4f}"
    else:
        tried = "".join(f", {name} {s:.2f}" for s, name in measured if s is not None)
        hint = (
            f"nothing else fits either{tried}: the model config (RoPE, head size) or the layout is "
            "not the engine's"
        )
    raise LayoutError(
        f"layer-0 check: decoded as {layout}, keys of equal tokens differ by {spread:.4f} "
        f"(at most {MAX_SPREAD} when layout and RoPE are right); {hint}"
    )


def _pair_energy(keys: Tensor, rope: RopeConfig) -> Tensor:
    """Return ``[heads, n]``: the sum of squares over the rows of each pair.

    An element that is not rotated stands alone.
    """
    elements = keys.square().sum(0).view(-1, rope.head_size)
    rotated, rest = elements.tensor_split([rope.rotary_dim], dim=1)
    first, second = rotated.chunk(2, dim=1) if rope.pairing == "half" else (rotated[:, ::2], rotated[:, 1::2])
    return torch.cat((first + second, rest), dim=1)


def _repeats(tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return rows of repeated tokens, at most ``_MAX_ROWS``, and each row's group.

    First the outermost two of each token, farthest apart first; what room is left goes to the rest.
    """
    places: dict[int, list[int]] = {}
    for row, token in enumerate(tokens):
        places.setdefault(token, []).append(row)
    repeated = sorted((p for p in places.values() if len(p) > 1), key=lambda p: p[0] - p[-1])
    repeated = repeated[: _MAX_ROWS // 2]
    room = _MAX_ROWS - 2 * len(repeated)
    rows: list[int] = []
    groups: list[int] = []
    for group, found in enumerate(repeated):
        inner = found[1:-1][:room]
        room -= len(inner)
        rows += (found[0], *inner, found[-1])
        groups += [group] * (len(inner) + 2)
    return torch.tensor(rows, dtype=torch.int64), torch.tensor(groups, dtype=torch.int64)
