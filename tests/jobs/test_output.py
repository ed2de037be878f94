"""The output: whole rows alone, one job at a time, and nothing of others' is touched."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

import lmcache_stream as lms
from lmcache_stream.jobs.output import Output

from .rows import POLICY, open_files, row

ROWS = [row("a"), row(2), row("ü三")]


def opened(path: Path, *, resume: bool = True, retry_failed: bool = False) -> Output:
    output = Output(path, resume=resume)
    try:
        output.open()
        if retry_failed:
            output.take_failed_out()
    except BaseException:
        output.close()
        raise
    return output


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "out.jsonl"
    assert open_files(tmp_path) == []


def test_rows_are_appended_and_found_again(path: Path) -> None:
    output = opened(path, resume=False)
    for line in ROWS:
        output.append(line)
        # Each is there at once.
        assert path.read_bytes().endswith(line)
    output.close()
    output = opened(path)
    assert (output.state.rows, output.state.cut) == (3, 0)
    output.append(row("later"))
    assert list(output.done_ids()) == ["a", 2, "ü三"]
    output.close()
    assert path.read_bytes() == b"".join([*ROWS, row("later")])


def test_a_row_that_was_cut_anywhere_is_taken_away(path: Path) -> None:
    whole, last = b"".join(ROWS[:2]), ROWS[2]
    for length in range(len(last)):
        path.write_bytes(whole + last[:length])
        output = opened(path)
        # All but its end is a whole row.
        is_whole = length == len(last) - 1
        assert (output.state.rows, output.state.cut) == ((3, 0) if is_whole else (2, length))
        output.append(row("next"))
        output.close()
        kept = whole + (last if is_whole else b"")
        assert path.read_bytes() == kept + row("next")


@pytest.mark.parametrize(
    "content",
    [
        b"my notes\n",
        b"my notes",
        b'{"id": "a", "prompt": "x"}\n',
        ROWS[0] + b"\n" + ROWS[1],
        ROWS[0] + b"my notes",
        b'{"other": 1',
        ROWS[0] + b'{"id":"b",\xff}\n' + ROWS[1],
    ],
)
def test_what_is_no_jobs_output_is_left_as_it_is(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    for resume in (False, True):
        with pytest.raises(lms.InvalidRequestError, match="name another file with --output"):
            opened(path, resume=resume)
    assert path.read_bytes() == content


def test_an_output_with_rows_is_not_written_over(path: Path) -> None:
    path.write_bytes(ROWS[0])
    with pytest.raises(lms.InvalidRequestError, match="--resume goes on with a job"):
        opened(path, resume=False)
    assert path.read_bytes() == ROWS[0]
    path.write_bytes(b"")
    opened(path, resume=False).close()


def test_two_jobs_do_not_write_to_one_file(path: Path) -> None:
    first = opened(path)
    with pytest.raises(lms.InvalidRequestError, match="another job writes to"):
        opened(path)
    first.close()
    opened(path).close()


def test_failed_rows_are_taken_out_all_at_once(path: Path) -> None:
    lines = [row("a", failed=True), ROWS[0], ROWS[2], row("b", failed=True)]
    path.write_bytes(b"".join(lines))
    path.chmod(0o640)
    output = opened(path, retry_failed=True)
    assert (output.state.rows, output.state.retried, output.state.failed) == (2, 2, 0)
    assert output.state.last is not None
    assert output.state.last.id == "ü三"
    # The new file is locked as the old one was.
    with pytest.raises(lms.InvalidRequestError, match="another job writes to"):
        opened(path)
    output.append(row("b"))
    assert list(output.done_ids()) == ["a", "ü三"]
    output.close()
    assert path.read_bytes() == ROWS[0] + ROWS[2] + row("b")
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(path.parent.iterdir()) == [path]


def test_failed_rows_stay_where_they_cannot_be_taken_out(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = row("a", failed=True) + ROWS[0]
    path.write_bytes(content)

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="no"):
        opened(path, retry_failed=True)
    assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_a_job_that_waited_at_the_door_does_not_write_to_a_file_that_is_gone(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(ROWS[0])
    lock = fcntl.flock
    calls: list[int] = []

    def replaced_meanwhile(file: int, how: int) -> None:
        if not calls:
            other = path.with_name("other")
            other.write_bytes(ROWS[1])
            other.replace(path)
        calls.append(file)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", replaced_meanwhile)
    output = opened(path)
    output.append(ROWS[2])
    output.close()
    assert len(calls) == 2
    assert path.read_bytes() == ROWS[1] + ROWS[2]


def test_a_link_stays_a_link(path: Path) -> None:
    path.write_bytes(row("a", failed=True) + ROWS[1])
    link = path.with_name("link.jsonl")
    link.symlink_to(path)
    opened(link, retry_failed=True).close()
    assert link.is_symlink()
    assert path.read_bytes() == ROWS[1]


def test_what_is_no_regular_file_is_refused(path: Path) -> None:
    os.mkfifo(path)
    for target in (path, Path("/dev/null")):
        with pytest.raises(lms.InvalidRequestError, match="no regular file"):
            opened(target)


def test_a_row_that_is_changed_behind_a_job_is_told(path: Path) -> None:
    path.write_bytes(row("a", failed=True) + ROWS[1])
    output = opened(path)
    with path.open("r+b") as file:
        file.write(b"[")
    with pytest.raises(lms.InvalidRequestError, match="a row was changed while a job had it open"):
        list(output.done_ids())
    with pytest.raises(lms.InvalidRequestError, match="a row was changed while a job had it open"):
        output.take_failed_out()
    output.close()
    assert path.read_bytes().endswith(ROWS[1])
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("retry_failed", [False, True])
def test_a_row_that_cannot_be_written_leaves_nothing(path: Path, retry_failed: bool) -> None:
    path.write_bytes(ROWS[0] + row("b", failed=True) if retry_failed else ROWS[0])
    output = opened(path, retry_failed=retry_failed)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(ROWS[0]) + 20, limits[1]))
    try:
        # A part of it fits, as on a disk that is nearly full.
        with pytest.raises(OSError, match="a row could not be written"):
            output.append(ROWS[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == ROWS[0]
    output.append(ROWS[2])
    output.close()
    assert path.read_bytes() == ROWS[0] + ROWS[2]


@pytest.mark.parametrize(
    ("policy", "model", "words"),
    [
        ("SnapKV(ratio=0.5)", "m", r"of the policy KeyDiff\(ratio=0.5, .*\), this job's would be of SnapKV"),
        (None, "m", "would be of none"),
        (POLICY, "n", "of the model m, this job's would be of n"),
    ],
)
def test_rows_of_two_kinds_do_not_come_together(
    path: Path, policy: str | None, model: str, words: str
) -> None:
    path.write_bytes(ROWS[0])
    output = opened(path)
    with pytest.raises(lms.InvalidRequestError, match=words):
        output.check(policy=policy, model=model)
    output.check(policy=POLICY, model="m")
    output.close()
