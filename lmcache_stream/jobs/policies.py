"""The policies by the names that the command line has for them."""

from __future__ import annotations

from typing import Any

from ..dropping import (
    RKV,
    TOVA,
    KeyDiff,
    KNorm,
    Policy,
    RandomDrop,
    SnapKV,
    StreamingLLM,
    ValueDiff,
    WholeChunks,
)
from ..dropping.policy import DropPolicy
from ..errors import InvalidRequestError

__all__ = ["NO_POLICY", "POLICIES", "make_policy"]

NO_POLICY = "none"
POLICIES: dict[str, type[DropPolicy]] = {
    "random": RandomDrop,
    "streaming-llm": StreamingLLM,
    "knorm": KNorm,
    "keydiff": KeyDiff,
    "valuediff": ValueDiff,
    "tova": TOVA,
    "snapkv": SnapKV,
    "rkv": RKV,
}


def make_policy(name: str, *, run: int | None = None, **options: Any) -> Policy | None:
    """Make a policy; None for ``none``.

    Args:
        name: one of ``POLICIES``, or ``none``.
        run: tokens that are kept or dropped together; see ``WholeChunks``.
        options: fields of the policy; those that are None are as usual.

    Raises:
        InvalidRequestError: options that the policy refuses, or any with ``none``.
    """
    given = {option: value for option, value in options.items() if value is not None}
    if name != NO_POLICY:
        policy = POLICIES[name](**given)
        return policy if run is None else WholeChunks(policy, run)
    if run is not None:
        given["run"] = run
    if given:
        shown = ", ".join(f"--{option}" for option in given)
        raise InvalidRequestError(f"{shown}: --policy {NO_POLICY} drops nothing, there is nothing to choose")
    return None
