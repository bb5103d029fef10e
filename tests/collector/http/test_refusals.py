from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.http.refusals import MAX_LOGGED, Refusal, Refusals

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.collector.conftest import FakeClock


class Listener:
    def __init__(self) -> None:
        self.heard: list[dict[str, object]] = []

    def __call__(self, event: str, fields: Mapping[str, object]) -> None:
        self.heard.append({"event": event, **fields})


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def refusals(listener: Listener, clock: FakeClock) -> Refusals:
    return Refusals(listener, monotonic_ns=clock)


def test_the_first_of_a_minute_is_told_and_all_are_counted(
    refusals: Refusals, listener: Listener, clock: FakeClock
) -> None:
    for _ in range(1000):
        refusals.note(Refusal.NO_TOKEN, client="10.0.0.7", path="/v1/spans", status=401)
    refusals.note(Refusal.NO_TOKEN, client="10.0.0.8", status=401)
    refusals.note(Refusal.SLOW_BODY, client="10.0.0.7")

    assert refusals.counts == {Refusal.NO_TOKEN: 1001, Refusal.SLOW_BODY: 1}
    told = {"event": "refused", "reason": "no-token", "visitor": "10.0.0.7", "status": 401}
    assert listener.heard == [
        {**told, "path": "/v1/spans"},
        {**told, "visitor": "10.0.0.8"},
        {"event": "refused", "reason": "slow-body", "visitor": "10.0.0.7"},
    ]
    # A minute later the next one says how many were not told.
    clock.advance_s(60)
    refusals.note(Refusal.NO_TOKEN, client="10.0.0.7", status=401)
    assert listener.heard[-1] == {**told, "more_since_last": 999}


def test_a_long_path_is_cut(refusals: Refusals, listener: Listener) -> None:
    refusals.note(Refusal.NO_TOKEN, client="a", path="/" + "x" * 30_000)

    assert len(str(listener.heard[0]["path"])) == 200


def test_it_remembers_so_many_visitors_and_no_more(refusals: Refusals) -> None:
    for number in range(MAX_LOGGED + 500):
        refusals.note(Refusal.NO_TOKEN, client=str(number))

    assert len(refusals._logged) == MAX_LOGGED
