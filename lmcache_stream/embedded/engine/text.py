"""From token ids to text, one at a time, with stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["Detokenizer", "StopStrings"]

# Tokens of the prompt that tell the tokenizer how the first decoded one is to be read (its leading space).
_CONTEXT = 6
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Gives the text that each token adds; the bytes of an incomplete character wait for the rest."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        # What is decoded anew with each token: some that were given out already, then those that were not.
        self._window = list(prompt[-_CONTEXT:])
        self._given = len(self._window)

    def push(self, token_id: int) -> str:
        """Return the text that is certain now."""
        self._window.append(token_id)
        now = self._decode(self._window)
        if now.endswith(_INCOMPLETE):
            return ""
        added = self._added(now)
        self._window = self._window[max(0, self._given - _CONTEXT) :]
        self._given = len(self._window)
        return added

    def flush(self) -> str:
        """Return what still waits, as it is."""
        added = self._added(self._decode(self._window))
        self._given = len(self._window)
        return added

    def _added(self, now: str) -> str:
        before = self._decode(self._window[: self._given])
        if not now.startswith(before):
            # What was given ended inside a character, which belongs to the token that completes it.
            before = before.rstrip(_INCOMPLETE)
        return now[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)
        return text


class StopStrings:
    """Finds the first stop string in a text that comes in pieces, and holds back what may begin one.

    Attributes:
        found: the stop string that was found, else None.
    """

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self.found: str | None = None
        self._stops = list(stops)
        self._keep = keep
        self._held = ""
        self._longest = max(map(len, self._stops), default=1) - 1

    def push(self, text: str, *, search: bool = True) -> str:
        """Return what of the text so far can be given out.

        Args:
            text: what comes next.
            search: whether a stop string that is there counts; else it is held back for the next search.
        """
        text = self._held + text
        if not search:
            self._held = text
            return ""
        self._held = ""
        places = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            place, self.found = min(places, key=lambda one: (one[0] + len(one[1]), one[0]))
            return text[: place + (len(self.found) if self._keep else 0)]
        cut = max(0, len(text) - self._longest)
        text, self._held = text[:cut], text[cut:]
        return text

    def flush(self) -> str:
        """Return what was held back: no stop string follows any more."""
        text, self._held = self._held, ""
        return text
