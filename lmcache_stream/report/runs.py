"""Runs, and the same row in several of them; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from .rows import JobFile, Row

__all__ = ["Comparison", "Entry", "Run", "compare"]


class _Kind(NamedTuple):
    """What the rows of a run share."""

    policy: str | None
    model: str | None
    file: int


@dataclass(frozen=True)
class Run:
    """The rows of one file with one policy and one model.

    Attributes:
        label: what tells it from the other runs.
        policy: None where nothing was dropped.
        model: None where it is not known.
        file: position of its file among those given.
        rows: a row an id, in the order of completion.
        replaced: rows that a later one with the same id took the place of.
    """

    label: str
    policy: str | None
    model: str | None
    file: int
    rows: tuple[Row, ...]
    replaced: int = 0

    @cached_property
    def good(self) -> tuple[Row, ...]:
        """The rows that came to their end."""
        return tuple(row for row in self.rows if row.is_ok)

    @property
    def failures(self) -> Mapping[str, int]:
        """How many rows failed by the class of the error, the most frequent first."""
        return dict(Counter(row.error.type for row in self.rows if row.error).most_common())

    @property
    def totals(self) -> dict[str, int]:
        """Sums over the rows; of tokens, bytes and comparisons only over those that came to their end."""
        kvs = [row.kv for row in self.good if row.kv]
        return {
            "rows": len(self.rows),
            "failed": len(self.rows) - len(self.good),
            "retried": sum(row.retries > 0 for row in self.rows),
            "retries": sum(row.retries for row in self.rows),
            "compared": sum(row.is_same is not None for row in self.good),
            "same": sum(row.is_same is True for row in self.good),
            "prompt_tokens": sum(row.prompt_tokens or 0 for row in self.good),
            "output_tokens": sum((row.metrics and row.metrics.output_tokens) or 0 for row in self.good),
            "tokens_before": sum(kv.tokens_before for kv in kvs),
            "tokens_after": sum(kv.tokens_after for kv in kvs),
            "recomputed_tokens": sum(kv.recomputed_tokens for kv in kvs),
            "bytes_before": sum(kv.bytes_before for kv in kvs),
            "bytes_after": sum(kv.bytes_after for kv in kvs),
        }


@dataclass(frozen=True, slots=True)
class Entry:
    """One id: its row in each run, None where the run has none."""

    id: str | int
    rows: tuple[Row | None, ...]

    @property
    def line(self) -> int | None:
        """Its line in the file of prompts, as the first of its rows that knows says."""
        return next((row.line for row in self.rows if row and row.line is not None), None)


@dataclass(frozen=True)
class Comparison:
    """The runs of all files, and their rows by id, ids in the order in which they first came to an end."""

    files: tuple[JobFile, ...]
    runs: tuple[Run, ...]
    entries: tuple[Entry, ...] = field(repr=False)


def compare(files: Sequence[JobFile]) -> Comparison:
    """Sort the rows of ``files`` into runs and by id."""
    found: dict[_Kind, dict[Any, Row]] = {}
    counts: Counter[_Kind] = Counter()
    for number, file in enumerate(files):
        kinds = _kinds(number, file)
        for kind, row in zip(kinds, file.rows, strict=True):
            rows = found.setdefault(kind, {})
            # A later row is a further attempt, of a job that was taken up again; it completed later.
            rows.pop(_key(row), None)
            rows[_key(row)] = row
            counts[kind] += 1
    labels = _labels(list(found), files)
    runs = tuple(
        Run(labels[kind], kind.policy, kind.model, kind.file, tuple(rows.values()), counts[kind] - len(rows))
        for kind, rows in found.items()
    )
    keys = dict.fromkeys(key for rows in found.values() for key in rows)
    entries = tuple(Entry(key[1], tuple(rows.get(key) for rows in found.values())) for key in keys)
    return Comparison(tuple(files), runs, entries)


def _key(row: Row) -> tuple[str, str | int]:
    """Return what an id is known by: 1 and "1" are two ids."""
    return type(row.id).__name__, row.id


def _kinds(number: int, file: JobFile) -> list[_Kind]:
    """Return the run of each row. A row that failed before it knew belongs to the file's only run."""
    policy = _only(row.policy for row in file.rows)
    model = _only(row.model for row in file.rows)
    return [
        _Kind(
            policy if row.policy is msgspec.UNSET else row.policy,
            model if row.model is msgspec.UNSET or row.model is None else row.model,
            number,
        )
        for row in file.rows
    ]


def _only(values: Iterable[str | msgspec.UnsetType | None]) -> str | None:
    known = {value for value in values if value is not msgspec.UNSET}
    return known.pop() if len(known) == 1 else None


def _labels(kinds: Sequence[_Kind], files: Sequence[JobFile]) -> dict[_Kind, str]:
    """Name each run by its policy, and by model and file where policies alone do not tell them apart."""
    names = Counter(file.path.name for file in files)
    parts = [
        (
            kind.policy or "nothing dropped",
            kind.model or "unknown model",
            path.name if names[path.name] == 1 else str(path),
        )
        for kind in kinds
        for path in (files[kind.file].path,)
    ]
    for shown in ((0,), (0, 2), (0, 1), (0, 1, 2)):
        labels = [" · ".join(part[index] for index in shown) for part in parts]
        if len(set(labels)) == len(labels):
            break
    return dict(zip(kinds, labels, strict=True))
