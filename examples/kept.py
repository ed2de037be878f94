"""What edits kept of a sequence: as coloured text for a terminal, and as a picture."""

from __future__ import annotations

import io
import itertools
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from prompts import Part

import lmcache_stream as lms

__all__ = ["Picture", "Strip", "draw", "kept_text", "strips_of", "takes_colour"]

_KEPT, _DROPPED, _EARLIER = "#2563eb", "#f6b48f", "#e5e7eb"
_INK, _PAPER, _FACT = "#1f2937", "#ffffff", "#b45309"
# Terminals: green; faint and struck out.
_KEPT_CODE, _DROPPED_CODE, _RESET = "\x1b[32m", "\x1b[2;9m", "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Strip:
    """One edit, counted in the sequence as it was before any edit.

    Attributes:
        label: its name in the picture.
        length: tokens that the edit and those before it had seen.
        present: of these, tokens that the edit found.
        kept: of these, tokens that it left.
    """

    label: str
    length: int
    present: tuple[int, ...]
    kept: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.label}: {len(self.kept)} of {self.length} tokens kept"


def strips_of(edits: Sequence[lms.EditReport], label: str) -> list[Strip]:
    """Return a strip for each of ``stream.edits``; of several edits each gets its number.

    Raises:
        ValueError: a function made an edit: what it kept cannot be known.
    """
    strips: list[Strip] = []
    length = 0
    left: tuple[int, ...] = ()
    for number, report in enumerate(edits, 1):
        if report.kept_indices is None:
            raise ValueError(f"edit {number} was made by a function and not by a policy")
        # An edit finds what the last one left, and the tokens that the cache has got since.
        fresh = report.tokens_before - len(left)
        present = (*left, *range(length, length + fresh))
        length, left = length + fresh, report.kept_indices
        name = label if len(edits) == 1 else f"{label} {number}"
        strips.append(Strip(name, length, present, left))
    return strips


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ``(start, count)`` of each run of successive indices."""
    for _, group in itertools.groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        run = [index for _, index in group]
        yield run[0], len(run)


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


@dataclass(frozen=True, slots=True)
class Picture:
    """A PNG; a notebook shows it where it is a cell's last value."""

    png: bytes
    width: int

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        return self.png, {"width": self.width}

    def save(self, path: Path) -> None:
        """Write it to a file."""
        path.write_bytes(self.png)


def draw(strips: Sequence[Strip], parts: Sequence[Part] = ()) -> Picture:
    """Draw a strip an edit over the sequence, with the names of its ``parts`` above.

    Paper and ink are the picture's own, so that it can be read on light and dark pages alike.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise SystemExit("a picture needs `pip install 'lmcache-stream[examples]'`") from None
    length = max(strip.length for strip in strips)
    figure = Figure(figsize=(10, 1.5 + 0.5 * len(strips)), dpi=160, facecolor=_PAPER, layout="constrained")
    axes = figure.add_subplot(facecolor=_PAPER)
    for row, strip in enumerate(strips):
        kept, present = set(strip.kept), set(strip.present)
        found = (_KEPT if index in kept else _DROPPED for index in range(strip.length))
        colours = [
            colour if index in present else _EARLIER
            for index, colour in zip(range(length), found, strict=False)
        ]
        for colour in dict.fromkeys(colours):
            places = [index for index, one in enumerate(colours) if one == colour]
            axes.broken_barh(list(_runs(places)), (row - 0.36, 0.72), facecolors=colour, linewidth=0)
        counts = f"{len(strip.kept)} of {strip.length} kept"
        axes.text(1.01, row, counts, transform=axes.get_yaxis_transform(), va="center", color=_INK)
    _name_parts(axes, parts, length, len(strips))
    axes.set_xlim(0, length)
    axes.set_ylim(len(strips) - 0.4, -0.6)
    axes.set_yticks(range(len(strips)), [strip.label for strip in strips])
    axes.set_xlabel("token, by its place in the sequence before any edit", color=_INK)
    axes.tick_params(colors=_INK, length=0)
    axes.tick_params(axis="x", length=3)
    axes.spines[:].set_visible(False)
    legend = {"kept": _KEPT, "dropped": _DROPPED}
    if any(len(strip.present) < strip.length for strip in strips):
        legend["dropped by an earlier edit"] = _EARLIER
    patches = [Patch(color=colour, label=name) for name, colour in legend.items()]
    figure.legend(handles=patches, loc="outside lower right", ncols=3, frameon=False, labelcolor=_INK)
    file = io.BytesIO()
    figure.savefig(file, format="png", facecolor=_PAPER)
    return Picture(file.getvalue(), round(figure.get_figwidth() * 90))


def _name_parts(axes: Any, parts: Sequence[Part], length: int, rows: int) -> None:
    """Write the names of the parts above the strips, and frame the fact that is asked for."""
    for part in parts:
        is_fact = part.name == "fact"
        wide = (part.stop - part.start) / length > 0.012 * len(part.name)
        first, last = part.start == 0, part.stop >= length
        if is_fact:
            axes.axvspan(part.start, part.stop, fill=False, edgecolor=_FACT, linewidth=1.2, zorder=3)
        else:
            axes.axvline(part.start, color=_INK, linewidth=0.6, linestyle=":", zorder=0)
        if not (wide or is_fact or first or last):
            continue
        place = part.start if first else part.stop if last else (part.start + part.stop) / 2
        align = "left" if first else "right" if last else "center"
        colour = _FACT if is_fact else _INK
        axes.text(place, -0.66, part.name, ha=align, va="bottom", fontsize="small", color=colour)
