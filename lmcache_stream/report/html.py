"""The page: one HTML file that needs nothing beside it; pure but for the package's own files."""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from importlib import resources
from string import Template
from typing import Any

from .data import page_data
from .runs import Comparison

__all__ = ["build_page", "embedded_json"]

# In this order they are one script.
_SCRIPTS = (
    "dom.js", "figures.js", "axes.js", "histogram.js", "job.js", "charts.js", "overview.js", "answers.js",
    "prompt.js", "detail.js", "highlight.js", "selection.js", "item.js", "list.js", "main.js",
)  # fmt: skip

# Nothing ends the element that holds the data, nor begins a comment in it; JSON has these only in strings.
_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def build_page(comparison: Comparison) -> str:
    """Return the page. Whatever the rows' texts hold, it is text in the page.

    The page forbids itself, by a content security policy, every request and every script but its own.
    """
    style = _own("style.css")
    script = "(() => {\n'use strict';\n" + "\n".join(map(_own, _SCRIPTS)) + "\n})();\n"
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_source_hash(style)}'; "
        f"script-src '{_source_hash(script)}'; base-uri 'none'; form-action 'none'"
    )
    return Template(_own("page.html")).substitute(
        policy=escape(policy),
        title=escape(_title(comparison)),
        style=style,
        script=script,
        data=embedded_json(page_data(comparison)),
    )


def embedded_json(data: Any) -> str:
    """Return ``data`` as JSON that can stand in a ``script`` element of any HTML page."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).translate(_ESCAPES)


def _title(comparison: Comparison) -> str:
    first, *others = comparison.runs
    return f"{first.label}, compared with {len(others)} more" if others else first.label


def _own(name: str) -> str:
    return resources.files(__package__).joinpath("page", name).read_text(encoding="utf-8")


def _source_hash(source: str) -> str:
    """Return the source expression that allows an element with just this content."""
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
