"""Paper and ink are the figures' own, so that they can be read on light and dark pages alike."""

from __future__ import annotations

__all__ = ["INK", "PAPER"]

INK, PAPER = "#1f2937", "#ffffff"
