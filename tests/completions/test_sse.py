"""The decoder against cases of the standard, a literal reading of it, and every way to cut the bytes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_stream.completions.sse import ServerSentEvent as Event
from lmcache_stream.completions.sse import SSEDecoder

CASES: dict[str, tuple[bytes, list[Event]]] = {
    "one event": (b"data: a\n\n", [Event(b"a")]),
    "several in a read": (b"data: a\n\ndata: b\n\ndata: c\n\n", [Event(b"a"), Event(b"b"), Event(b"c")]),
    "CRLF": (b"data: a\r\n\r\ndata: b\r\n\r\n", [Event(b"a"), Event(b"b")]),
    "CR": (b"data: a\r\rdata: b\r\r", [Event(b"a"), Event(b"b")]),
    "mixed line ends": (b"data: a\r\n\ndata: b\n\r\ndata: c\r\r\n", [Event(b"a"), Event(b"b"), Event(b"c")]),
    "a CR inside what looks plain": (b"data: a\rdata: b\n\n", [Event(b"a\nb")]),
    "byte order mark": (b"\xef\xbb\xbfdata: a\n\n", [Event(b"a")]),
    "only one byte order mark": (b"\xef\xbb\xbf\xef\xbb\xbfdata: a\n\ndata: b\n\n", [Event(b"b")]),
    "a later byte order mark": (b"data: a\n\n\xef\xbb\xbfdata: b\n\ndata: c\n\n", [Event(b"a"), Event(b"c")]),
    "half a byte order mark": (b"\xef\xbbdata: a\n\ndata: b\n\n", [Event(b"b")]),
    "comments": (b": hello\n\ndata: a\n:\n: x\n\n", [Event(b"a")]),
    "a comment that names a field": (b":data: no\ndata: a\n\n", [Event(b"a")]),
    "two data lines": (b"data: a\ndata: b\n\n", [Event(b"a\nb")]),
    "two data lines, CRLF": (b"data: a\r\ndata: b\r\n\r\n", [Event(b"a\nb")]),
    "an empty data line between": (b"data: a\ndata:\ndata: b\n\n", [Event(b"a\n\nb")]),
    "empty data": (b"data:\n\ndata: \n\ndata\n\n", [Event(b""), Event(b""), Event(b"")]),
    "two empty data lines": (b"data\ndata\n\n", [Event(b"\n")]),
    "no space after the colon": (b"data:a\n\n", [Event(b"a")]),
    "only one space is taken": (b"data:  a \n\n", [Event(b" a ")]),
    "a tab is kept": (b"data:\ta\n\n", [Event(b"\ta")]),
    "colons in the value": (b"data: a: b\n\n", [Event(b"a: b")]),
    "unknown fields": (b"dat: a\nDATA: b\ndata : c\n\ndata: d\n\n", [Event(b"d")]),
    "retry alone": (b"retry: 3000\n\ndata: a\n\n", [Event(b"a")]),
    "blank lines": (b"\n\n\n\ndata: a\n\n\n\n", [Event(b"a")]),
    "event type": (b"event: add\ndata: a\n\ndata: b\n\n", [Event(b"a", "add"), Event(b"b")]),
    "event type without data": (b"event: add\n\ndata: a\n\n", [Event(b"a")]),
    "empty event type": (b"event: x\nevent:\ndata: a\n\n", [Event(b"a")]),
    "an id stays": (
        b"data: a\nid: 1\n\ndata: b\n\nid: 2\n\ndata: c\n\nid\ndata: d\n\n",
        [
            Event(b"a", last_event_id="1"),
            Event(b"b", last_event_id="1"),
            Event(b"c", last_event_id="2"),
            Event(b"d"),
        ],
    ),
    "an id with NUL is none": (b"id: 1\nid: 2\x003\ndata: a\n\n", [Event(b"a", last_event_id="1")]),
    "what other line ends are not": (
        "data: a\u2028b\u2029c\u0085d\x0be\x0cf\n\n".encode(),
        [Event("a\u2028b\u2029c\u0085d\x0be\x0cf".encode())],
    ),
    "bytes that are no UTF-8": (b"data: \xff\xfe\n\n", [Event(b"\xff\xfe")]),
    "a character of three bytes": ("data: 漢\n\n".encode(), [Event("漢".encode())]),
    "an event without its blank line": (b"data: a\n\ndata: b\n", [Event(b"a")]),
    "a line without its end": (b"data: a\n\ndata: b", [Event(b"a")]),
    "nothing": (b"", []),
}

by_case = pytest.mark.parametrize(("stream", "events"), CASES.values(), ids=CASES.keys())


def decode(*reads: bytes) -> list[Event]:
    decoder = SSEDecoder()
    return [event for read in reads for event in decoder.feed(read)]


@by_case
def test_in_one_read(stream: bytes, events: list[Event]) -> None:
    assert decode(stream) == events


@by_case
def test_cut_in_two_at_every_point(stream: bytes, events: list[Event]) -> None:
    for cut in range(len(stream) + 1):
        assert decode(stream[:cut], stream[cut:]) == events, cut


@by_case
def test_byte_by_byte_and_with_empty_reads_between(stream: bytes, events: list[Event]) -> None:
    reads = [read for byte in stream for read in (bytes([byte]), b"")]
    assert decode(*reads) == events


@by_case
def test_after_an_event_it_is_as_at_the_start(stream: bytes, events: list[Event]) -> None:
    if not stream.startswith(b"\xef"):
        assert decode(b"data: first\n\n", stream) == [Event(b"first"), *events]


def by_the_standard(stream: bytes) -> list[Event]:
    """Parse as section 9.2.6 says, sentence by sentence."""
    stream = stream.removeprefix(b"\xef\xbb\xbf")
    lines, line, position = [], bytearray(), 0
    while position < len(stream):
        if stream[position] in b"\r\n":
            position += 1 + (stream[position : position + 2] == b"\r\n")
            lines.append(bytes(line))
            line = bytearray()
        else:
            line.append(stream[position])
            position += 1
    events = []
    data, kind, buffered_id = bytearray(), "", ""
    for line_ in lines:
        if not line_:
            if data:
                events.append(Event(bytes(data[:-1]), kind or "message", buffered_id))
            data, kind = bytearray(), ""
            continue
        colon = line_.find(b":")
        if colon == 0:
            continue
        field, value = (line_, b"") if colon < 0 else (line_[:colon], line_[colon + 1 :])
        if value[:1] == b" ":
            value = value[1:]
        if field == b"data":
            data += value + b"\n"
        elif field == b"event":
            kind = value.decode("utf-8", "replace")
        elif field == b"id" and 0 not in value:
            buffered_id = value.decode("utf-8", "replace")
    return events


PIECES = st.sampled_from(
    [
        *(b"data", b"event", b"id", b"retry", b":", b": ", b" ", b"a", b"{}", b"\0", b"7"),
        *(b"\n", b"\r", b"\r\n", b"\n\n", b"data: x\n\n", b"data: y\n\n"),
        *("é\u2028".encode(), b"\xef\xbb\xbf"),
    ]
)


@given(st.lists(PIECES, max_size=40), st.lists(st.integers(0, 200), max_size=6))
def test_any_stream_cut_anywhere_is_what_the_standard_says(pieces: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(pieces)
    bounds = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    reads = [stream[start:end] for start, end in pairwise(bounds)]
    assert decode(*reads) == by_the_standard(stream)


@pytest.mark.parametrize(
    ("stream", "retry"),
    [
        (b"retry: 3000\n", 3000),
        (b"retry: 1\nretry: x\nretry: -5\nretry: \nretry: 1.5\n", 1),
        ("retry: ٣\n".encode(), None),
        (b"retry: " + b"9" * 5000 + b"\n", None),
        (b"data: a\n\n", None),
    ],
)
def test_the_reconnection_time_is_digits_alone(stream: bytes, retry: int | None) -> None:
    decoder = SSEDecoder()
    decoder.feed(stream)
    assert decoder.retry == retry


@pytest.mark.parametrize(
    ("stream", "inside"),
    [
        (b"", False),
        (b": keep-alive", False),
        (b": keep-alive\n\n", False),
        (b": data", False),
        (b"\r\n", False),
        (b"retry: 5\n\n", False),
        (b"event: x\n", False),
        (b"id: 5", False),
        (b"d", True),
        (b": keep-alive\n\nd", True),
        (b"data: a", True),
        (b"data: a\n", True),
        (b"data: a\n\n", False),
        (b"data: a\n\ndata: b", True),
    ],
)
def test_a_comment_is_no_beginning_of_an_event(stream: bytes, inside: bool) -> None:
    decoder = SSEDecoder()
    for byte in stream:
        decoder.feed(bytes([byte]))
    assert decoder.inside_data is inside


@pytest.mark.timeout(30)
def test_a_line_of_megabytes_in_small_reads() -> None:
    # Work that grows with the square of its length would take hours.
    stream = b"data: " + b"x" * 8_000_000 + b"\n\n"
    decoder = SSEDecoder()
    events = []
    for start in range(0, len(stream), 100):
        events += decoder.feed(stream[start : start + 100])
    assert [len(event.data) for event in events] == [8_000_000]
