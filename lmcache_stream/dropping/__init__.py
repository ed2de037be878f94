"""Which tokens of a prefix to keep. Policies know of scores and indices, not of caches."""

from .keep import Keep, keep

__all__ = ["Keep", "keep"]
