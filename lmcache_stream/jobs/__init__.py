"""Jobs: a file of prompts, each through prefill, edit and decoding, into a file of answers."""

from .job import Job
from .output import Output, OutputState
from .plan import Counts, Plan, Servers
from .prompts import PromptRow
from .source import Source

__all__ = [
    "Counts",
    "Job",
    "Output",
    "OutputState",
    "Plan",
    "PromptRow",
    "Servers",
    "Source",
]
