"""Figures are matplotlib's, are shown by notebooks, and touch nothing of pyplot."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from IPython.core import formatters
from matplotlib.figure import Figure

import lmcache_stream as lms
from lmcache_stream.figures import Strip, kept_figure

PNG = b"\x89PNG"
FORMATTER: Any = formatters.DisplayFormatter

ALONE = """
import sys
from lmcache_stream.figures import Strip, kept_figure
assert "matplotlib" not in sys.modules
kept_figure([Strip("one", 4, (0, 1, 2, 3), (0,))])._repr_png_()
assert "matplotlib" in sys.modules
assert "matplotlib.pyplot" not in sys.modules
"""


def figure() -> Figure:
    return kept_figure([Strip("one", 4, (0, 1, 2, 3), (0,))])


def test_a_notebook_shows_it_without_any_setting() -> None:
    data, metadata = FORMATTER().format(figure())
    assert data["image/png"].startswith(PNG)
    # The picture has more pixels than it is wide, for dense screens.
    assert metadata["image/png"]["width"] == 900
    width = int.from_bytes(data["image/png"][16:20], "big")
    assert width == 1600


def test_matplotlib_is_imported_for_a_figure_and_pyplot_never() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lmcache_stream.figures.inline", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(lms.InvalidRequestError, match=r"pip install 'lmcache-stream\[report\]'"):
        figure()
