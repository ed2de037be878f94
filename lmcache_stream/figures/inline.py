"""A figure that a notebook shows, and the packages that it needs."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidRequestError
from .ink import INK, PAPER

try:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
except ImportError as error:
    # This module is imported when a figure is drawn.
    raise InvalidRequestError("a figure needs matplotlib: pip install 'lmcache-stream[report]'") from error

__all__ = ["InlineFigure", "legend_patches"]

_DPI = 160
_SHOWN_DPI = 90


class InlineFigure(Figure):
    """A matplotlib figure, made without pyplot, that is shown where it is a cell's last value.

    matplotlib's own has a picture for notebooks only where pyplot was imported first.
    """

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height), dpi=_DPI, facecolor=PAPER, layout="constrained")

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        file = io.BytesIO()
        self.savefig(file, format="png")
        # Twice as many pixels as it is wide, for dense screens.
        return file.getvalue(), {"width": round(self.get_figwidth() * _SHOWN_DPI)}

    def plot_area(self, *position: int) -> Any:
        """Add axes on the figure's paper, in its ink, without a frame."""
        axes = self.add_subplot(*position, facecolor=PAPER)
        axes.tick_params(colors=INK, length=3)
        axes.spines[:].set_visible(False)
        return axes


def legend_patches(colours: Mapping[str, str]) -> list[Patch]:
    """Return what a legend shows for each name: a patch of its colour."""
    return [Patch(color=colour, label=name) for name, colour in colours.items()]
