"""The one way in which the server says no."""

from __future__ import annotations

from ...errors import CacheError


class RefusedError(CacheError):
    """A request that cannot be fulfilled; the protocol's answer to it is silence."""
