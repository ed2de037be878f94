"""The words of an error, whatever form they come in."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest

from lmcache_stream.completions.problems import hint, problem, retry_after


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no such model", "type": "NotFoundError", "code": 404}}', "no such model"),
        (b'{"object": "error", "message": "no such model", "code": 404}', "no such model"),
        (b'{"error": "no such model"}', "no such model"),
        (b'{"detail": "Not Found"}', "Not Found"),
        (b'{"detail": [{"loc": ["body", "n"]}]}', '[{"loc":["body","n"]}]'),
        (b'{"error": {"message": ""}}', '{"message":""}'),
        (b'{"code": 5}', '{"code":5}'),
        (b"upstream timed out", "upstream timed out"),
        (b"<html>\n  <h1>502</h1>\n</html>", "<html> <h1>502</h1> </html>"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"", ""),
        (b"[" * 100_000, "[" * 500 + "..."),
    ],
)
def test_the_message_of_a_body(body: bytes, message: str) -> None:
    assert problem(body) == message


def test_a_long_message_is_cut() -> None:
    assert len(problem(b"x" * 100_000)) < 600


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("5", 5.0), (" 0 ", 0.0), (None, None), ("", None), ("soon", None), ("-1", None), ("1.5", None)],
)
def test_retry_after_in_seconds(header: str | None, seconds: float | None) -> None:
    assert retry_after(header) == seconds


def test_a_retry_after_of_any_length_is_a_number_that_can_be_rounded() -> None:
    found = retry_after("9" * 400)
    assert found is not None
    assert round(found) > 10**300


def test_retry_after_as_a_date() -> None:
    later = retry_after(formatdate(time.time() + 100, usegmt=True))
    assert later is not None
    assert 95 < later <= 100
    assert retry_after(formatdate(time.time() - 100, usegmt=True)) == 0.0


@pytest.mark.parametrize("status", [301, 400, 401, 404, 422, 429, 500, 503, 599])
def test_every_status_has_advice(status: int) -> None:
    assert hint(status)
