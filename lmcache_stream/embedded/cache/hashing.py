"""Hashes of prefixes: a chunk is named by all tokens up to its end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from .refusal import RefusedError

_DIGEST = 32
_ROOT = blake2b(b"", digest_size=_DIGEST).digest()


def next_hash(previous: bytes, tokens: Sequence[int]) -> bytes:
    """Return the hash of the prefix that ends with the chunk ``tokens`` behind ``previous``.

    Raises:
        RefusedError: a token id that does not fit 32 bits.
    """
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise RefusedError(f"token ids that do not fit 32 bits: {error}") from error
    return blake2b(previous + packed.tobytes(), digest_size=_DIGEST).digest()


class PrefixHashes:
    """The hashes of one sequence's whole chunks, computed as far as they were asked for.

    Those that are computed stay, though the tokens be replaced.
    """

    def __init__(self, chunk_size: int, tokens: Sequence[int] = ()) -> None:
        self.tokens = tokens
        self._chunk_size = chunk_size
        self._known: list[bytes] = []

    def all(self) -> list[bytes]:
        """Return the hashes of all whole chunks of the tokens."""
        return self.between(0, len(self.tokens) - len(self.tokens) % self._chunk_size)

    def between(self, start: int, end: int) -> list[bytes]:
        """Return the hashes of the chunks in ``[start, end)``, both in tokens.

        Raises:
            RefusedError: not whole chunks, or beyond the tokens.
        """
        size = self._chunk_size
        if start % size or end % size or end > len(self.tokens):
            raise RefusedError(
                f"tokens {start} to {end} of {len(self.tokens)} are not whole chunks of {size}"
            )
        while len(self._known) < end // size:
            done = len(self._known) * size
            previous = self._known[-1] if self._known else _ROOT
            self._known.append(next_hash(previous, self.tokens[done : done + size]))
        return self._known[start // size : end // size]
