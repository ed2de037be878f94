"""What the doctor must say: which checks find fault, in which words, and what follows from that."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_stream.doctor import Deadlines, Result, Status, Targets, examine
from lmcache_stream.doctor.checks import CHECKS

DEADLINES = Deadlines(answer=2, completion=20, offload=2, transfer=10, total=60)


@dataclass(frozen=True)
class Line:
    """What a result must say."""

    seen: str
    advice: str
    status: Status = Status.FAILED


async def examined(targets: Targets, deadlines: Deadlines = DEADLINES) -> dict[str, Result]:
    """Return the results by ``group/name``; those that were reported are those that are returned."""
    reported: list[Result] = []
    results = await examine(targets, deadlines=deadlines, report=reported.append)
    assert reported == results
    for one in results:
        assert one.seen
        assert len(one.seen.splitlines()) == 1
        assert len(one.advice.splitlines()) == (one.status in ("warning", "failed"))
    return {f"{one.group}/{one.name}": one for one in results}


def check_lines(results: dict[str, Result], lines: dict[str, Line]) -> None:
    """Assert that these checks, and no others, found fault, and why each other one was not made."""
    assert list(results) == [check.path for check in CHECKS]
    found = {path for path, one in results.items() if one.status in (Status.WARNING, Status.FAILED)}
    assert found == set(lines), {path: results[path].seen for path in found}
    for path, line in lines.items():
        assert results[path].status is line.status
        assert line.seen in results[path].seen
        assert line.advice in results[path].advice
    failed = [path for path, line in lines.items() if line.status is Status.FAILED]
    roots = {f"because of {path.replace('/', ': ')}" for path in failed}
    for one in results.values():
        if one.status is Status.NOT_CHECKED:
            assert one.seen in roots
    assert bool(failed) == any(not one.is_good for one in results.values())
