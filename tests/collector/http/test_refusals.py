from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.http.refusals import MAX_LOGGED, Refusal, Refusals

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.collector.conftest import FakeClock


class EventLog:
    def __init__(self) -> None:
        self.events: list[dict[str, object]] = []

    def __call__(self, event: str, fields: Mapping[str, object]) -> None:
        self.events.append({"event": event, **fields})


@pytest.fixture
def event_log() -> EventLog:
    return EventLog()


@pytest.fixture
def refusals(event_log: EventLog, clock: FakeClock) -> Refusals:
    return Refusals(event_log, monotonic_ns=clock)


def test_one_refusal_per_minute_is_logged_and_all_are_counted(
    refusals: Refusals, event_log: EventLog, clock: FakeClock
) -> None:
    for _ in range(1000):
        refusals.record(Refusal.NO_TOKEN, client="10.0.0.7", path="/v1/spans", status=401)
    refusals.record(Refusal.NO_TOKEN, client="10.0.0.8", status=401)
    refusals.record(Refusal.BODY_TOO_LARGE, client="10.0.0.7")

    assert refusals.counts == {Refusal.NO_TOKEN: 1001, Refusal.BODY_TOO_LARGE: 1}
    line = {"event": "refused", "reason": "no-token", "visitor": "10.0.0.7", "status": 401}
    assert event_log.events == [
        {**line, "path": "/v1/spans"},
        {**line, "visitor": "10.0.0.8"},
        {"event": "refused", "reason": "body-too-large", "visitor": "10.0.0.7"},
    ]
    # A minute later, the next line has the number of those that were not logged.
    clock.advance_s(60)
    refusals.record(Refusal.NO_TOKEN, client="10.0.0.7", status=401)
    assert event_log.events[-1] == {**line, "more_since_last": 999}


def test_a_long_path_is_cut(refusals: Refusals, event_log: EventLog) -> None:
    refusals.record(Refusal.NO_TOKEN, client="a", path="/" + "x" * 30_000)

    assert len(str(event_log.events[0]["path"])) == 200


def test_the_number_of_remembered_clients_is_bounded(refusals: Refusals) -> None:
    for number in range(MAX_LOGGED + 500):
        refusals.record(Refusal.NO_TOKEN, client=str(number))

    assert len(refusals._logged) == MAX_LOGGED
