from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from rankscope.collector.clock.probe import ProbeReply, parse_reply
from rankscope.collector.clock.reference import ReferenceClock
from rankscope.collector.errors import ClockReplyError
from rankscope.tracer.span import UnixNs

if TYPE_CHECKING:
    from tests.collector.conftest import FakeClock

S = 1_000_000_000
GOOD = {"reference_id": "ab12", "received_ns": 5, "replied_ns": 7}


def test_a_reply_has_the_times_of_receipt_and_reply_by_the_reference(clock: FakeClock) -> None:
    reference = ReferenceClock(
        unix_minus_monotonic_ns=600 * S, monotonic_ns=clock, reference_id="r"
    )

    received_ns = reference.now_ns()
    clock.advance_s(0.001)
    reply = reference.answer(received_ns)

    start_ns = 10**12 + 600 * S
    assert reply == ProbeReply(
        reference_id="r", received_ns=UnixNs(start_ns), replied_ns=UnixNs(start_ns + 1_000_000)
    )


def test_a_reference_starts_at_unix_time_with_a_name_of_its_own() -> None:
    first, second = ReferenceClock.start(), ReferenceClock.start()

    assert abs(first.now_ns() - time.time_ns()) < S
    assert first.reference_id != second.reference_id


@pytest.mark.parametrize("by_s", [-3_600, 86_400, 1])
def test_setting_the_wall_clock_does_not_change_the_reference(
    monkeypatch: pytest.MonkeyPatch, by_s: int
) -> None:
    # GIVEN a reference that started at a Unix time
    wall_ns = [1_700_000_000 * S]
    monkeypatch.setattr(time, "time_ns", lambda: wall_ns[0])
    began_ns = time.monotonic_ns()
    reference = ReferenceClock.start()
    before_ns = reference.now_ns()
    assert 0 <= before_ns - wall_ns[0] < S
    # WHEN the wall clock is set
    wall_ns[0] += by_s * S

    # THEN the difference of two readings is that of the monotonic clock
    assert 0 <= reference.now_ns() - before_ns <= time.monotonic_ns() - began_ns


def test_a_reply_can_be_sent_as_json() -> None:
    reply = ProbeReply(
        reference_id="r", received_ns=UnixNs(2**60), replied_ns=UnixNs(2**60 + 3), pause_ns=5
    )

    assert parse_reply(json.loads(json.dumps(asdict(reply)))) == reply


def test_a_reply_without_a_pause_means_no_pause() -> None:
    assert parse_reply(GOOD).pause_ns == 0


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ([], "not a JSON object"),
        (None, "not a JSON object"),
        ({**GOOD, "reference_id": ""}, "reference_id"),
        ({**GOOD, "reference_id": "x" * 65}, "reference_id"),
        ({**GOOD, "reference_id": 7}, "reference_id"),
        ({**GOOD, "received_ns": 5.0}, "received_ns is not a time"),
        ({**GOOD, "pause_ns": -1}, "pause_ns is not a time"),
        ({**GOOD, "pause_ns": None}, "pause_ns is not a time"),
        ({**GOOD, "received_ns": True}, "received_ns is not a time"),
        ({**GOOD, "received_ns": -1}, "received_ns is not a time"),
        ({**GOOD, "replied_ns": 2**62}, "replied_ns is not a time"),
        ({**GOOD, "replied_ns": "7"}, "replied_ns is not a time"),
        ({"reference_id": "r", "received_ns": 5}, "replied_ns is not a time"),
        ({**GOOD, "replied_ns": 4}, "replied_ns is before received_ns"),
    ],
)
def test_a_document_of_another_form_is_an_error(document: Any, reason: str) -> None:  # noqa: ANN401 -- any JSON value
    with pytest.raises(ClockReplyError, match=reason):
        parse_reply(document)
