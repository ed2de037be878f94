"""The output of a job, read: one JSON object a line, times in seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ..errors import InvalidRequestError

__all__ = ["KV", "Baseline", "Broken", "Failure", "JobFile", "Metrics", "Row", "parse_job", "read_job"]


# A row beyond these is no job's, and no figure of a report could be computed from it.
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class KV(msgspec.Struct, frozen=True):
    """What the edit did to a row's KV."""

    tokens_before: _Count
    tokens_after: _Count
    bytes_before: _Count = 0
    bytes_after: _Count = 0
    seconds: _Seconds | None = None
    recomputed_tokens: _Count = 0


class Metrics(msgspec.Struct, frozen=True):
    """Figures of a row; those of the decoding pass where nothing else is said."""

    ttft: _Seconds | None = None
    tpot: _Seconds | None = None
    e2e_latency: _Seconds | None = None
    itl: tuple[_Seconds, ...] | None = None
    input_tokens: _Count | None = None
    output_tokens: _Count | None = None
    cached_tokens: _Count | None = None
    prefill_ttft: _Seconds | None = None
    edit_time: _Seconds | None = None
    queue_time: _Seconds | None = None
    seconds: _Seconds | None = None
    attempts: _Count | None = None


class Failure(msgspec.Struct, frozen=True):
    """The error that ended a row."""

    type: str
    message: str = ""
    phase: str | None = None


class Baseline(msgspec.Struct, frozen=True):
    """The answer to the same prompt from its whole KV."""

    text: str
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    ttft: _Seconds | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a job's output.

    Attributes:
        id: the row's, from the file of prompts.
        error: what ended it; None where it came to its end. No other file has this key, so it is demanded.
        policy: None where nothing was dropped; UNSET in a row that failed before it was known.
        pieces: the prompt as runs of text and whether they were kept; None where it is not known.
        extra: further keys of the row of the prompts' file.
    """

    id: str | int
    error: Failure | None
    line: int | None = None
    policy: str | msgspec.UnsetType | None = msgspec.UNSET
    model: str | msgspec.UnsetType | None = msgspec.UNSET
    prompt_tokens: _Count | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    finish_reason: str | None = None
    kv: KV | None = None
    pieces: tuple[tuple[str, bool], ...] | None = None
    metrics: Metrics | None = None
    baseline: Baseline | None = None
    extra: dict[str, Any] | None = None

    @property
    def is_ok(self) -> bool:
        """Whether the row came to its end."""
        return self.error is None

    @property
    def is_same(self) -> bool | None:
        """Whether the answer is the baseline's; None where there is nothing to compare."""
        if self.baseline is None or not self.is_ok or self.text is None:
            return None
        return self.text == self.baseline.text

    @property
    def retries(self) -> int:
        """Attempts beyond the first of each phase that was begun: prefill, edit, decoding."""
        metrics = self.metrics
        if metrics is None or metrics.attempts is None:
            return 0
        phase = self.error.phase if self.error else None
        if phase == "prefill":
            begun = 1
        elif phase == "edit":
            begun = 2
        else:
            begun = 3 if isinstance(self.policy, str) else 1 + (metrics.prefill_ttft is not None)
        return max(0, metrics.attempts - begun)


@dataclass(frozen=True, slots=True)
class Broken:
    """A line that is no row: its number, from 1, and why."""

    line: int
    reason: str


@dataclass(frozen=True, slots=True)
class JobFile:
    """The output of one job.

    Attributes:
        path: as it was given.
        modified: when the file was last written, in seconds since 1970.
        rows: in the order of the file, which is that of their completion.
        broken: lines that are no rows.
    """

    path: Path
    modified: float
    rows: tuple[Row, ...]
    broken: tuple[Broken, ...] = ()


_DECODER = msgspec.json.Decoder(Row)


def read_job(path: Path) -> JobFile:
    """Read a job's output.

    Raises:
        InvalidRequestError: the file cannot be read, or none of its lines is a row of a job.
    """
    try:
        with path.open("rb") as file:
            modified = path.stat().st_mtime
            rows, broken = parse_job(file)
    except OSError as error:
        raise InvalidRequestError(f"{path}: {error.strerror or error}") from error
    if not rows:
        why = f"line {broken[0].line}: {broken[0].reason}" if broken else "it is empty"
        raise InvalidRequestError(f"{path} is not the output of `lmcache-stream run`: {why}")
    return JobFile(path, modified, tuple(rows), tuple(broken))


def parse_job(lines: Iterable[bytes]) -> tuple[list[Row], list[Broken]]:
    """Return the rows of ``lines``, and the lines that are none: half written, or of something else."""
    rows: list[Row] = []
    broken: list[Broken] = []
    for number, line in enumerate(lines, 1):
        text = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip()
        if not text:
            continue
        try:
            rows.append(_DECODER.decode(text))
        # A UnicodeDecodeError is a ValueError, as msgspec's own errors are.
        except ValueError as error:
            broken.append(Broken(number, str(error)))
        except RecursionError:
            broken.append(Broken(number, "JSON is nested too deeply"))
    return rows, broken
