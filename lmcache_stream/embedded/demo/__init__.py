"""The demo: real texts, a question to each, answered from the whole KV and from KV with a gap."""

from .documents import Document, builtin_documents
from .run import Answer, Comparison, Options, Stack, Step, run_demo

__all__ = [
    "Answer",
    "Comparison",
    "Document",
    "Options",
    "Stack",
    "Step",
    "builtin_documents",
    "run_demo",
]
