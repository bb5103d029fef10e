from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.http.access import MAX_SESSIONS, MAX_VISITORS, Sessions, Throttle

if TYPE_CHECKING:
    from tests.collector.conftest import FakeClock


DAY_S = 86_400


def test_the_sessions_of_a_token_are_bounded_and_its_oldest_ends() -> None:
    sessions = Sessions()
    oldest = sessions.open("reader")
    newest = [sessions.open("reader") for _ in range(MAX_SESSIONS)][-1]

    assert sessions.find(oldest) is None
    assert sessions.find(newest) is not None
    assert len(newest) >= 43  # 32 random bytes in base64


def test_sign_ins_of_one_token_end_no_session_of_another() -> None:
    sessions = Sessions()
    operator, other = sessions.open(), sessions.open("other")
    for _ in range(MAX_SESSIONS + 4):
        sessions.open("reader")

    assert sessions.find(operator) is not None
    assert sessions.find(other) is not None


def test_a_session_ends_on_request_and_after_a_week(clock: FakeClock) -> None:
    sessions = Sessions(monotonic_ns=clock)
    first, second = sessions.open(), sessions.open()
    sessions.end(first)
    sessions.end("never opened")

    assert sessions.find(first) is None
    clock.advance_s(7 * DAY_S - 1)
    assert sessions.find(second) is not None
    clock.advance_s(1)
    assert sessions.find(second) is None


def test_sessions_that_ended_by_age_are_forgotten(clock: FakeClock) -> None:
    sessions = Sessions(monotonic_ns=clock)
    sessions.open("revoked long ago")
    clock.advance_s(7 * DAY_S)
    sessions.open()

    assert len(sessions._opened) == 1


@pytest.fixture
def throttle(clock: FakeClock) -> Throttle:
    return Throttle(tries=3, tries_of_unknown=5, monotonic_ns=clock)


def test_after_three_failures_a_client_waits_until_the_first_is_a_minute_old(
    throttle: Throttle, clock: FakeClock
) -> None:
    for _ in range(3):
        assert throttle.wait_s("a") == 0
        throttle.failed("a")
        clock.advance_s(10)

    assert throttle.wait_s("a") == 30  # the first was 30 s ago
    assert throttle.wait_s("b") == 0
    clock.advance_s(29.5)
    assert throttle.wait_s("a") == 1
    clock.advance_s(0.5)
    assert throttle.wait_s("a") == 0


def test_a_success_clears_the_failures_of_a_client(throttle: Throttle) -> None:
    for _ in range(3):
        throttle.failed("a")
    throttle.succeeded("a")

    assert throttle.wait_s("a") == 0


def test_failures_from_many_addresses_limit_unknown_clients_only(
    throttle: Throttle,
) -> None:
    throttle.succeeded("known")
    for number in range(5):
        throttle.failed(f"unknown {number}")

    assert throttle.wait_s("another unknown") == 60
    assert throttle.wait_s("known") == 0
    for _ in range(3):
        throttle.failed("known")
    assert throttle.wait_s("known") == 60


def test_the_number_of_remembered_clients_is_bounded(throttle: Throttle) -> None:
    for number in range(MAX_VISITORS + 100):
        throttle.succeeded(f"known {number}")
        throttle.failed(f"known {number}")

    assert len(throttle._failures) == MAX_VISITORS
    assert len(throttle._known) == MAX_VISITORS
