"""The prompt's text that vLLM may put before the first text it decoded, told from that text.

Where a prompt ends inside a UTF-8 character, vLLM's incremental detokenizer gives the whole prompt
again together with the first token that completes a character (vllm#48853; seen with 0.32.0). Its
stop strings are then looked for in the prompt as well. The token ids are right all the same.

What the prompt's text is, only the engine can say. It is asked (``/detokenize``) where a repetition
is possible at all, which the length of the first text tells for nearly every pass.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

from .choices import ChoiceDecoder

__all__ = ["UNFINISHED", "RepeatedPrompt", "generated_text", "may_repeat", "split_text"]

logger = logging.getLogger(__name__)

UNFINISHED = "\ufffd"
"""What a decoder puts for the bytes of a character that is not complete."""

# More characters than these have not been decoded from so many tokens, but for runs of one character.
_LONG = 16
_LONG_PER_TOKEN = 8
# Tokens by which the character that a prompt ends in is complete.
_FIRST = 4
# Characters of the prompt's end that tell where it ends in a text.
_ALIKE = 8
_TRIES = 8


def may_repeat(text: str, ids: int, prompt_length: int) -> bool:
    """Whether ``text`` is longer than that of ``ids`` tokens, and may hold that of the prompt too.

    A character takes at most four tokens, and up to half of a prompt is taken to be special tokens,
    which have no text. A prompt of a few words is let pass: to ask each time would cost more.
    """
    return len(text) > _LONG + _LONG_PER_TOKEN * ids and 8 * len(text) >= prompt_length


def split_text(before: str, after: str) -> tuple[str, str]:
    """Return the prompt's own text and what decoded ids added to it.

    Args:
        before: text of the prompt, which may end inside a character.
        after: text of the prompt and the ids. A character that they complete is theirs.
    """
    same = 0
    for old, new in zip(before, after, strict=False):
        if old != new:
            break
        same += 1
    return after[:same], after[same:]


def generated_text(streamed: str, own: str, generated: str, *, held_back: bool) -> str | None:
    """Return the part of the text ``streamed`` so far that does not repeat the prompt.

    Args:
        streamed: all text of the pass so far, without the text of special tokens.
        own: text of the prompt up to the character that it ends in, with special tokens.
        generated: text of the ids decoded so far, with special tokens.
        held_back: whether the engine may hold text back, as it does for stop strings.

    Returns:
        None where it cannot be told: only the beginning of the prompt may have come so far.
    """
    if generated.startswith(streamed):
        return streamed
    if streamed.startswith(own):
        return streamed[len(own) :]
    if own.startswith(streamed):
        return None
    if not held_back and streamed.endswith(generated):
        return generated
    # Special tokens are in the way: the prompt ends where the text in front is most like its end.
    lengths = [n for n in range(len(generated) + 1) if streamed.endswith(generated[:n])]
    alike = {n: _common_end(streamed[: len(streamed) - n], own) for n in lengths}
    best = max(lengths, key=lambda n: (alike[n], n))
    return generated[:best] if alike[best] >= _ALIKE else None


def _common_end(one: str, other: str) -> int:
    same = 0
    for left, right in zip(reversed(one), reversed(other), strict=False):
        if left != right:
            break
        same += 1
    return same


class RepeatedPrompt:
    """Takes the prompt's text out of the first texts of one pass.

    Attributes:
        watching: whether the next text may still hold some of the prompt.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        stop: Sequence[str],
        detokenize: Callable[[Sequence[int]], Awaitable[str | None]],
    ) -> None:
        self.watching = True
        self._prompt = prompt
        # As many characters as the longest stop string has may come later than their tokens.
        self._held_back = max(map(len, stop), default=0)
        self._detokenize = detokenize
        self._streamed = ""
        self._before: str | None = None
        self._tries = 0

    async def mend(self, text: str, choices: ChoiceDecoder) -> str:
        """Return what of ``text``, which ``choices`` has just given, was generated.

        Raises:
            EngineStreamError: a stop string in the prompt ended the pass.
        """
        self._streamed += text
        stopped = choices.stop_reason if isinstance(choices.stop_reason, str) else None
        if self._before is None:
            ids = len(choices.token_ids)
            possible = may_repeat(self._streamed, ids, len(self._prompt))
            possible = possible or (stopped is not None and ids <= _FIRST)
            if not possible or not await self._prompt_is_unfinished():
                self.watching = False
                return text
        assert self._before is not None
        after = await self._detokenize([*self._prompt, *choices.token_ids])
        if after is None:
            self.watching = False
            return text
        own, decoded = split_text(self._before, after)
        if stopped is not None and stopped not in decoded:
            raise choices.error(
                f"the engine stopped at {stopped!r}, which it found in the prompt, because that ends "
                "inside a character (vllm#48853): send no stop string that the prompt holds"
            )
        generated = generated_text(self._streamed, own, decoded, held_back=self._held_back > 0)
        self._tries += 1
        self.watching = generated is None and self._tries < _TRIES + self._held_back
        if generated is None and not self.watching:
            logger.warning(
                "the engine repeated the prompt's text (vllm#48853), and the first %d tokens' own "
                "text cannot be told from it: it is left out; the token ids are right",
                len(choices.token_ids),
            )
        return generated or ""

    async def _prompt_is_unfinished(self) -> bool:
        last = await self._detokenize(self._prompt[-1:])
        if last is None or not last.endswith(UNFINISHED):
            return False
        self._before = await self._detokenize(self._prompt)
        return self._before is not None and self._before.endswith(UNFINISHED)
