"""The policies by the names that the command line has for them."""

from __future__ import annotations

from typing import Any

from ..dropping import RKV, TOVA, KeyDiff, KNorm, RandomDrop, SnapKV, StreamingLLM
from ..dropping.policy import DropPolicy
from ..errors import InvalidRequestError

__all__ = ["NO_POLICY", "POLICIES", "make_policy"]

NO_POLICY = "none"
POLICIES: dict[str, type[DropPolicy]] = {
    "random": RandomDrop,
    "streaming-llm": StreamingLLM,
    "knorm": KNorm,
    "keydiff": KeyDiff,
    "tova": TOVA,
    "snapkv": SnapKV,
    "rkv": RKV,
}


def make_policy(name: str, **options: Any) -> DropPolicy | None:
    """Make a policy; None for ``none``.

    Args:
        name: one of ``POLICIES``, or ``none``.
        options: fields of the policy; those that are None are as usual.

    Raises:
        InvalidRequestError: options that the policy refuses, or any with ``none``.
    """
    given = {option: value for option, value in options.items() if value is not None}
    if name != NO_POLICY:
        return POLICIES[name](**given)
    if given:
        raise InvalidRequestError(f"{', '.join(given)}: there is nothing to choose without a policy")
    return None
