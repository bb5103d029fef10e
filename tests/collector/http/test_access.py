from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.collector.http.access import MAX_SESSIONS, Sessions

if TYPE_CHECKING:
    from tests.collector.conftest import FakeClock

DAY_S = 86_400


def test_sessions_are_bounded_and_the_oldest_ends() -> None:
    sessions = Sessions()
    oldest = sessions.open()
    newest = [sessions.open() for _ in range(MAX_SESSIONS)][-1]

    assert not sessions.is_open(oldest)
    assert sessions.is_open(newest)
    assert len(newest) >= 43  # 32 random bytes in base64


def test_a_session_ends_when_told_and_after_a_week(clock: FakeClock) -> None:
    sessions = Sessions(monotonic_ns=clock)
    first, second = sessions.open(), sessions.open()
    sessions.end(first)
    sessions.end("never opened")

    assert not sessions.is_open(first)
    clock.advance_s(7 * DAY_S - 1)
    assert sessions.is_open(second)
    clock.advance_s(1)
    assert not sessions.is_open(second)
