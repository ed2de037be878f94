"""Finding out what is wrong between this library, an engine and its cache."""

from .chart import Deadlines, Targets
from .results import Result, Status
from .run import examine

__all__ = ["Deadlines", "Result", "Status", "Targets", "examine"]
