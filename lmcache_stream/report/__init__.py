"""A page, in one file, of what jobs came to."""

from .command import Report, write_report
from .html import build_page
from .rows import JobFile, Row, read_job
from .runs import Comparison, Entry, Run, compare

__all__ = [
    "Comparison",
    "Entry",
    "JobFile",
    "Report",
    "Row",
    "Run",
    "build_page",
    "compare",
    "read_job",
    "write_report",
]
