"""Which tokens edits kept, as a strip an edit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import InvalidRequestError
from .ink import INK
from .strips import Strip

if TYPE_CHECKING:
    from .inline import InlineFigure

__all__ = ["Part", "kept_figure"]

_KEPT, _DROPPED, _EARLIER, _MARKED = "#2563eb", "#f6b48f", "#e5e7eb", "#b45309"


@dataclass(frozen=True, slots=True)
class Part:
    """A named part of a sequence: the tokens from ``start`` to before ``stop``.

    Attributes:
        is_marked: a frame is drawn around it, as around a fact that is asked for.
    """

    name: str
    start: int
    stop: int
    is_marked: bool = False


def kept_figure(strips: Sequence[Strip], parts: Sequence[Part] = ()) -> InlineFigure:
    """Draw a strip an edit over the sequence, with the names of its ``parts`` above.

    ``kept_figure(strips_of(stream.edits, "SnapKV"))``; strips of several streams make one list.

    Raises:
        InvalidRequestError: there is no strip, or matplotlib is missing.
    """
    from .inline import InlineFigure, legend_patches

    if not strips:
        raise InvalidRequestError("there is no edit to draw")
    length = max(strip.length for strip in strips)
    figure = InlineFigure(10, 1.5 + 0.5 * len(strips))
    axes = figure.plot_area()
    for row, strip in enumerate(strips):
        _draw_strip(axes, row, strip)
    _name_parts(axes, parts, length)
    axes.set_xlim(0, length)
    axes.set_ylim(len(strips) - 0.4, -0.6)
    axes.set_yticks(range(len(strips)), [strip.label for strip in strips])
    axes.set_xlabel("token, by its place in the sequence before any edit", color=INK)
    axes.tick_params(axis="y", length=0)
    legend = {"kept": _KEPT, "dropped": _DROPPED}
    if any(len(strip.present) < strip.length for strip in strips):
        legend["dropped by an earlier edit"] = _EARLIER
    figure.legend(
        handles=legend_patches(legend), loc="outside lower right", ncols=3, frameon=False, labelcolor=INK
    )
    return figure


def _draw_strip(axes: Any, row: int, strip: Strip) -> None:
    kept, present = set(strip.kept), set(strip.present)
    colours = [
        _EARLIER if index not in present else _KEPT if index in kept else _DROPPED
        for index in range(strip.length)
    ]
    for colour in dict.fromkeys(colours):
        places = [index for index, one in enumerate(colours) if one == colour]
        axes.broken_barh(list(_runs(places)), (row - 0.36, 0.72), facecolors=colour, linewidth=0)
    counts = f"{len(strip.kept)} of {strip.length} kept"
    axes.text(1.01, row, counts, transform=axes.get_yaxis_transform(), va="center", color=INK)


def _runs(indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ``(start, count)`` of each run of successive indices."""
    for _, group in itertools.groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        run = [index for _, index in group]
        yield run[0], len(run)


def _name_parts(axes: Any, parts: Sequence[Part], length: int) -> None:
    """Write the names of the parts above the strips, and frame those that are marked."""
    for part in parts:
        wide = (part.stop - part.start) / length > 0.012 * len(part.name)
        first, last = part.start == 0, part.stop >= length
        if part.is_marked:
            axes.axvspan(part.start, part.stop, fill=False, edgecolor=_MARKED, linewidth=1.2, zorder=3)
        else:
            axes.axvline(part.start, color=INK, linewidth=0.6, linestyle=":", zorder=0)
        if not (wide or part.is_marked or first or last):
            continue
        place = part.start if first else part.stop if last else (part.start + part.stop) / 2
        align = "left" if first else "right" if last else "center"
        colour = _MARKED if part.is_marked else INK
        axes.text(place, -0.66, part.name, ha=align, va="bottom", fontsize="small", color=colour)
