"""What a check finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "Result", "Status", "failed", "ok", "one_line", "warning"]


class Status(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check saw.

    Attributes:
        status: how it ended.
        seen: one line of what was seen.
        advice: one line of what to do; empty where there is nothing to do.
    """

    status: Status
    seen: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """A finding with the check that it is of.

    Attributes:
        group: what is examined, e.g. ``engine``.
        name: the check within the group.
        status: how it ended.
        seen: one line of what was seen.
        advice: one line of what to do; empty where there is nothing to do.
    """

    group: str
    name: str
    status: Status
    seen: str
    advice: str = ""

    @property
    def is_good(self) -> bool:
        """Whether checks that need this one can be made."""
        return self.status in (Status.OK, Status.WARNING)


def ok(seen: str) -> Finding:
    """Return that all is well."""
    return Finding(Status.OK, one_line(seen))


def warning(seen: str, advice: str) -> Finding:
    """Return that it works, but not as well as it could."""
    return Finding(Status.WARNING, one_line(seen), one_line(advice))


def failed(seen: str, advice: str) -> Finding:
    """Return that something is wrong."""
    return Finding(Status.FAILED, one_line(seen), one_line(advice))


def one_line(text: object) -> str:
    """Return ``text`` without line breaks and what else would leave its line."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(str(text).split()))
