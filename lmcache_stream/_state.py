"""The state of a stream: which tokens come next, which of them have edited KV; pure."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["EditReport", "StreamState", "forked_salt"]

# Leaves room for "~" and 22 random characters within the 128 that engine and cache take.
_SALT_STEM = 90


def forked_salt(cache_salt: str) -> str:
    """Return a fresh salt: edited KV is not the true KV of its tokens and must be found by nobody else."""
    return f"{cache_salt[:_SALT_STEM]}~{secrets.token_urlsafe(16)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EditReport:
    """What one edit did.

    Attributes:
        tokens_before: tokens of the prefix that was edited.
        tokens_after: tokens that the edit left.
        recomputed_tokens: of these, tokens beyond the last whole chunk: their edited KV is not stored,
            the engine computes it anew in the next pass.
        bytes_before: bytes of the prefix's KV.
        bytes_after: bytes of the KV that was stored.
        cache_salt: the salt that it is stored under.
        seconds: time that the edit took, from the call to the confirmation by the cache.
        kept_indices: which tokens were kept, counted in the sequence as it was before any edit (the prompt,
            then decoded and added tokens); None where a function or ``update_kv`` made the edit. From there
            on the count begins anew with what it made.
        layout_spread: what the check of KV layout and RoPE measured on this context, nearly 0 where they are
            right (relative spread of layer 0's un-rotated keys of equal tokens); None where it was not made.
    """

    tokens_before: int
    tokens_after: int
    recomputed_tokens: int
    bytes_before: int
    bytes_after: int
    cache_salt: str
    seconds: float
    kept_indices: tuple[int, ...] | None = field(default=None, repr=False)
    layout_spread: float | None = None


@dataclass(slots=True)
class StreamState:
    """What a stream knows; every method changes it at once or not at all.

    Attributes:
        tokens: the sequence whose head has stored KV; the next prompt starts with it.
        cache_salt: the salt of engine and cache for the next operation.
        suffix: tokens behind it that have no stored KV and were not sent yet.
        decoded: every id that was generated and given out.
        text: the pieces of their text.
        done: whether the last pass ended because the model was finished.
        edited: leading tokens whose KV is edited and so must be found in the cache.
        fingerprint: of the edited KV, a row a chunk, to tell it from plain KV of the same tokens.
        unconfirmed: whether a pass on edited KV ended before the engine said that it had used it.
        lost: why the edited KV can no longer be used, once it cannot.
        sent: length of the last prompt, None before the first and after an edit.
        retrieved: tokens of the last retrieved prefix, None after a pass or an edit.
        edits: one report an edit, in order.
        origins: where each of ``tokens`` was in the sequence before any edit.
        suffix_origins: the same of ``suffix``.
    """

    tokens: list[int]
    cache_salt: str
    suffix: list[int] = field(default_factory=list)
    decoded: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    done: bool = False
    edited: int = 0
    fingerprint: torch.Tensor | None = None
    unconfirmed: bool = False
    lost: str = ""
    sent: int | None = None
    retrieved: int | None = None
    edits: list[EditReport] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    suffix_origins: list[int] = field(default_factory=list)
    _counted: int = 0

    def __post_init__(self) -> None:
        self.origins = self._fresh(len(self.tokens))

    def _fresh(self, count: int) -> list[int]:
        first, self._counted = self._counted, self._counted + count
        return list(range(first, self._counted))

    def prompt(self, suffix_tokens: Sequence[int]) -> list[int]:
        """Return what the next pass sends."""
        return [*self.tokens, *self.suffix, *suffix_tokens]

    def cacheable(self, chunk_size: int) -> int:
        """Return how many leading tokens an engine has offloaded when it is through: whole chunks of
        the last prompt, since decoded tokens are not offloaded."""
        length = len(self.tokens) if self.sent is None else self.sent
        return length // chunk_size * chunk_size

    def take(self, suffix_tokens: Sequence[int]) -> None:
        """The engine has taken the prompt: all of it is behind us now."""
        self.tokens += [*self.suffix, *suffix_tokens]
        self.origins += [*self.suffix_origins, *self._fresh(len(suffix_tokens))]
        self.suffix, self.suffix_origins = [], []
        self.sent = len(self.tokens)
        self.retrieved = None
        self.done = False

    def append(self, token_id: int, text: str) -> None:
        """One id goes out to the caller."""
        self.tokens.append(token_id)
        self.origins += self._fresh(1)
        self.decoded.append(token_id)
        self.text.append(text)

    def tail(self) -> list[int]:
        """Return what follows the prefix of the last retrieve or edit, which an edit must not lose."""
        if self.retrieved is not None:
            return self.tokens[self.retrieved :]
        return self.tokens[self.edited :] if self.edited else []

    def replace(
        self,
        tokens: Sequence[int],
        suffix: Sequence[int],
        cache_salt: str,
        report: EditReport,
        fingerprint: torch.Tensor,
        origins: Sequence[int] | None = None,
    ) -> None:
        """Edited KV of ``tokens`` is stored under ``cache_salt``.

        ``origins`` are those of ``tokens`` and ``suffix`` together; without them the count begins anew.
        """
        if origins is None:
            self._counted = 0
            origins = self._fresh(len(tokens) + len(suffix))
        self.origins, self.suffix_origins = list(origins[: len(tokens)]), list(origins[len(tokens) :])
        self.tokens, self.suffix = list(tokens), list(suffix)
        self.cache_salt = cache_salt
        self.edited = len(self.tokens)
        self.fingerprint, self.unconfirmed = fingerprint, False
        self.lost = ""
        self.done = False
        self.sent = self.retrieved = None
        self.edits.append(report)
