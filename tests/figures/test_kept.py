"""The strips of kept tokens, looked at as pixels."""

from __future__ import annotations

import io
from typing import Any

import matplotlib.image
import pytest
from matplotlib.figure import Figure

import lmcache_stream as lms
from lmcache_stream.figures import Part, Strip, kept_figure

KEPT, DROPPED, EARLIER, MARKED = (
    (0x25, 0x63, 0xEB), (0xF6, 0xB4, 0x8F), (0xE5, 0xE7, 0xEB), (0xB4, 0x53, 0x09),
)  # fmt: skip


def pixels(figure: Figure) -> Any:
    """The picture as ``[height, width, 3]`` of bytes."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    file.seek(0)
    return (matplotlib.image.imread(file)[..., :3] * 255).round().astype("uint8")


def test_the_pixels_of_a_strip_are_its_tokens() -> None:
    strips = [
        Strip("edit 1", 60, tuple(range(60)), tuple(range(0, 60, 2))),
        Strip("edit 2", 100, (*range(0, 60, 2), *range(60, 100)), tuple(range(70, 100))),
    ]
    image = pixels(kept_figure(strips, [Part("text", 0, 100)]))
    kept, dropped, earlier = ((image == colour).all(axis=2) for colour in (KEPT, DROPPED, EARLIER))
    coloured = kept | dropped | earlier
    # The strips are where much of a row is coloured; the legend is less.
    rows = [row for row in range(len(image)) if coloured[row].mean() > 0.3]
    upper, lower = rows[len(rows) // 4], rows[3 * len(rows) // 4]
    token = coloured[lower].sum() / 100
    assert kept[upper].sum() == pytest.approx(30 * token, rel=0.15)
    assert dropped[upper].sum() == pytest.approx(30 * token, rel=0.15)
    assert earlier[upper].sum() == 0
    assert kept[lower].sum() == pytest.approx(30 * token, rel=0.05)
    assert dropped[lower].sum() == pytest.approx(40 * token, rel=0.1)
    assert earlier[lower].sum() == pytest.approx(30 * token, rel=0.1)
    # The first of the kept tokens of the second edit is number 70.
    left = coloured[lower].argmax()
    assert kept[lower].argmax() == pytest.approx(left + 70 * token, abs=3)


@pytest.mark.parametrize("present", [60, 59])
def test_the_legend_has_what_is_in_the_picture(present: int) -> None:
    figure = kept_figure([Strip("edit", 60, tuple(range(present)), tuple(range(30)))])
    (legend,) = figure.legends
    names = ["kept", "dropped"] + ["dropped by an earlier edit"] * (present < 60)
    assert [text.get_text() for text in legend.get_texts()] == names


def test_a_marked_part_has_a_frame_where_it_lies() -> None:
    strips = [Strip("all", 100, tuple(range(100)), tuple(range(100)))]
    parts = [Part("text", 0, 60), Part("fact", 60, 70, is_marked=True), Part("question", 70, 100)]
    image = pixels(kept_figure(strips, parts))
    kept = (image == KEPT).all(axis=2)
    rows = [row for row in range(len(image)) if kept[row].mean() > 0.3]
    middle = rows[len(rows) // 2]
    columns = kept[middle].nonzero()[0]
    left, token = columns[0], (columns[-1] + 1 - columns[0]) / 100
    framed = (image[middle] == MARKED).all(axis=1).nonzero()[0]
    assert framed[0] == pytest.approx(left + 60 * token, abs=3)
    assert framed[-1] == pytest.approx(left + 70 * token, abs=3)


def test_nothing_cannot_be_drawn() -> None:
    with pytest.raises(lms.InvalidRequestError, match="there is no edit to draw"):
        kept_figure([])
