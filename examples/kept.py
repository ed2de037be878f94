"""What edits kept of a sequence, as coloured text for a terminal."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from lmcache_stream.figures import Strip

__all__ = ["kept_text", "takes_colour"]

# Terminals: green; faint and struck out.
_KEPT_CODE, _DROPPED_CODE, _RESET = "\x1b[32m", "\x1b[2;9m", "\x1b[0m"


def takes_colour(output: TextIO = sys.stdout) -> bool:
    """Return whether to write colours: on a terminal, unless ``NO_COLOR`` is set (https://no-color.org)."""
    return output.isatty() and not os.environ.get("NO_COLOR")


def kept_text(tokenizer: Any, token_ids: Sequence[int], strip: Strip, *, colour: bool) -> str:
    """Return the text that an edit saw: what was dropped is struck out, or ``[n]`` for n tokens of it."""
    pieces = []
    kept = set(strip.kept)
    for is_kept, group in itertools.groupby(range(strip.length), lambda index: index in kept):
        ids = [token_ids[index] for index in group]
        if not colour and not is_kept:
            pieces.append(f"[{len(ids)}]")
            continue
        text = re.sub(r"\n{3,}", "\n\n", tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        code = _KEPT_CODE if is_kept else _DROPPED_CODE
        # Line by line, because pagers forget colours at the end of a line.
        lines = (f"{code}{line}{_RESET}" if colour and line else line for line in text.split("\n"))
        pieces.append("\n".join(lines))
    return "".join(pieces)
