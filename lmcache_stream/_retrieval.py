"""Waiting for a prompt's KV to be complete in the cache."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from ._checks import checked_seconds
from .cache.context import AsyncLMCacheContext
from .cache.lookups import PrefixLease
from .errors import InvalidRequestError, KVNotReadyError

T = TypeVar("T")
logger = logging.getLogger(__name__)

_FIRST_PAUSE = 0.005
# The least time that a lookup gets, however little is left.
_LEAST_LOOKUP = 1.0
_NOT_READY = "Does the engine run with LMCacheMPConnector on this LMCache, and was there room for it all?"
_NOT_PREFILLED = (
    "This stream ran no pass yet: unless another one prefilled the prompt, first "
    '`await stream.generate({"max_tokens": 1})`'
)


async def wait_for_prefix(
    context: AsyncLMCacheContext,
    tokens: list[int],
    cache_salt: str,
    use: Callable[[PrefixLease], Awaitable[T | None]],
    *,
    timeout: float,
    poll_interval: float,
    min_tokens: int | None,
    was_sent: bool,
) -> T:
    """Return what ``use`` makes of the KV of ``tokens`` (whole chunks), once that is there.

    It looks at once and then with growing pauses. ``use`` takes the locks on the prefix over, and returns
    None where it was gone after all.

    At the deadline at least ``min_tokens`` tokens, all by default, must be there. What the error advises goes
    by whether a pass of the stream ``was_sent``.

    Raises:
        InvalidRequestError: no whole chunk, or ``min_tokens`` or a time that cannot be.
        KVNotReadyError: the deadline passed.
    """
    wanted, size = len(tokens), context.chunk_size
    least = wanted if min_tokens is None else min_tokens
    if wanted == 0:
        raise InvalidRequestError(
            f"the prompt is shorter than one chunk of {size} tokens: LMCache keeps nothing of it"
        )
    if least > wanted or least < 1:
        raise InvalidRequestError(
            f"min_tokens={least} cannot be: the prompt has {wanted} tokens in whole chunks of {size}"
        )
    checked_seconds(timeout, "timeout")
    if checked_seconds(poll_interval, "poll_interval") == 0:
        raise InvalidRequestError("poll_interval must be positive")
    end = anyio.current_time() + timeout
    pause = min(_FIRST_PAUSE, poll_interval)
    while True:
        left = end - anyio.current_time()
        lease = await context.pin(tokens, cache_salt, deadline=max(left, _LEAST_LOOKUP))
        found = lease.chunks * size
        is_last = anyio.current_time() + pause > end
        if found == wanted or (is_last and found >= least):
            if found < wanted:
                logger.warning(
                    "after %g s LMCache has the KV of %d of %d tokens; going on with these",
                    timeout,
                    found,
                    wanted,
                )
            made = await use(lease)
            if made is not None:
                return made
            found = 0
        await context.unpin(lease)
        if is_last:
            raise KVNotReadyError(
                f"after {timeout:g} s LMCache has the KV of {found} of {wanted} tokens of this prompt "
                f"(model {context.model_name!r}). {_NOT_READY if was_sent else _NOT_PREFILLED}",
                found=found,
                wanted=wanted,
            )
        await anyio.sleep(pause)
        pause = min(2 * pause, poll_interval)
