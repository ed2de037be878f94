"""Pictures for notebooks, by matplotlib: what edits kept, and how latencies spread."""

from .kept import Part, kept_figure
from .latency import latency_figure
from .strips import Strip, strips_of

__all__ = ["Part", "Strip", "kept_figure", "latency_figure", "strips_of"]
