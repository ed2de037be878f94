from __future__ import annotations

from lmcache_stream.embedded.cache.sessions import Sessions


def test_a_request_is_known_until_it_ends() -> None:
    sessions = Sessions(4, ttl=600)
    one = sessions.get_or_create("one", 0)
    assert sessions.get_or_create("one", 5) is one
    assert len(sessions) == 1
    assert sessions.end("one") is one
    assert sessions.end("one") is None
    assert sessions.get_or_create("one", 6) is not one


def test_a_request_is_forgotten_some_time_after_its_beginning() -> None:
    sessions = Sessions(4, ttl=600)
    sessions.get_or_create("old", 0)
    sessions.get_or_create("new", 1)
    # Use does not make it younger.
    sessions.get_or_create("old", 500)
    sessions.expire(600)
    assert len(sessions) == 2
    sessions.expire(601)
    assert len(sessions) == 1
    assert sessions.end("new") is not None
