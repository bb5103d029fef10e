from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.recurrence import (
    Follows,
    PlacedFinding,
    Placement,
    Recurrence,
    find_recurrence,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZES = (4, 1, 1)
"""Four data-parallel positions, each on a host of its own."""


def placements(hosts: str) -> tuple[Placement, ...]:
    """Return the placement of each position: "abcd" has dp 0 on host a, dp 1 on host b, ..."""
    return tuple(Placement(host=host, dp=dp, pp=0, tp=0) for dp, host in enumerate(hosts))


def finding(
    run: str, hosts: str, *slow: int, epoch: int = 0, cause: str = "slow-compute"
) -> PlacedFinding:
    """Return a finding of run ``run`` with the given hosts, of the positions ``slow``."""
    return PlacedFinding(
        run_id=run,
        epoch=epoch,
        cause=cause,
        placements=tuple(placements(hosts)[dp] for dp in slow),
        sizes=SIZES,
        num_hosts=len(set(hosts)),
    )


def recurrence(
    now: PlacedFinding,
    hosts: str,
    history: Sequence[PlacedFinding],
    *,
    others: Sequence[PlacedFinding] = (),
) -> Recurrence | None:
    return find_recurrence(now, history, others=others, placements=lambda: placements(hosts))


def test_a_finding_follows_a_host_that_is_slow_at_another_position() -> None:
    # GIVEN host b slow at dp 1; WHEN it is at dp 3, and host d at dp 1
    now = finding("second", "adcb", 3)

    found = recurrence(now, "adcb", [finding("first", "abcd", 1)])

    # THEN it follows the host
    assert found == Recurrence(
        what=Follows.HOST,
        evidence="host b was also named in run first (epoch 0), at another position:"
        " (dp 1, pp 0, tp 0) there, (dp 3, pp 0, tp 0) here",
    )


def test_a_finding_follows_a_position_that_is_slow_on_another_host() -> None:
    now = finding("second", "adcb", 1)

    found = recurrence(now, "adcb", [finding("first", "abcd", 1)])

    assert found == Recurrence(
        what=Follows.POSITION,
        evidence="(dp 1, pp 0, tp 0) was also named in run first (epoch 0), on b there, on d here",
    )


def test_if_nothing_moved_host_and_position_cannot_be_distinguished() -> None:
    now = finding("second", "abcd", 1)

    found = recurrence(now, "abcd", [finding("first", "abcd", 1)])

    assert found is not None
    assert found.what is None
    assert found.evidence == (
        "unknown: host b was also named in run first (epoch 0), but nothing has moved since,"
        " so host and position cannot be distinguished"
    )


def test_a_new_finding_does_not_recur() -> None:
    now = finding("second", "adcb", 3)

    assert recurrence(now, "adcb", []) is None
    assert recurrence(now, "adcb", [finding("first", "abcd", 0)]) is None
    assert recurrence(now, "adcb", [finding("first", "abcd", 1, cause="host-stall")]) is None


def test_findings_of_the_same_epoch_prove_nothing() -> None:
    now = finding("first", "abcd", 1)

    assert recurrence(now, "abcd", [now]) is None


def test_an_earlier_epoch_of_the_same_run_counts() -> None:
    now = finding("run", "badc", 0, epoch=1)

    found = recurrence(now, "badc", [finding("run", "abcd", 1), now])

    assert found is not None
    assert found.what is Follows.HOST


def test_two_slow_hosts_that_changed_places_prove_nothing() -> None:
    """Each host was slow before and is slow now; so was each position."""
    first = [finding("first", "abcd", 1), finding("first", "abcd", 3)]
    now = [finding("second", "adcb", 1), finding("second", "adcb", 3)]

    found = recurrence(now[0], "adcb", first, others=now)

    assert found is not None
    assert found.what is None


def test_evidence_for_both_host_and_position_is_unknown() -> None:
    history = [finding("first", "abcd", 1), finding("second", "cabd", 3)]
    now = finding("third", "acdb", 3)

    found = recurrence(now, "acdb", history)

    assert found == Recurrence(
        what=None,
        evidence="unknown: run first (epoch 0) had the same host at another position, run"
        " second (epoch 0) the same position on another host",
    )


def test_several_earlier_runs_are_named() -> None:
    history = [finding("first", "abcd", 1), finding("second", "bacd", 0)]

    found = recurrence(finding("third", "cdba", 2), "cdba", history)

    assert found is not None
    assert found.what is Follows.HOST
    assert "in runs first (epoch 0) and second (epoch 0), at" in found.evidence


def test_a_throttled_clock_recurs_as_slow_compute() -> None:
    now = finding("second", "adcb", 3, cause="clock-throttle")

    found = recurrence(now, "adcb", [finding("first", "abcd", 1)])

    assert found is not None
    assert found.what is Follows.HOST


@pytest.mark.parametrize("cause", ["stage-imbalance", "gc-pause", "checkpoint", "healthy"])
def test_causes_that_belong_to_no_host_do_not_recur(cause: str) -> None:
    history = [finding("first", "abcd", 1, cause=cause)]

    assert recurrence(finding("second", "adcb", 3, cause=cause), "adcb", history) is None


def test_a_finding_of_most_hosts_does_not_recur() -> None:
    history = [finding("first", "abcd", 1)]

    assert recurrence(finding("second", "adcb", 0, 1, 3), "adcb", history) is None


def test_findings_of_another_layout_are_not_compared() -> None:
    """Host b is dp 1 of two, and dp 1 or dp 3 of four: neither has moved, and neither stayed."""
    small = PlacedFinding(
        run_id="first",
        epoch=0,
        cause="slow-compute",
        placements=(Placement(host="b", dp=1, pp=0, tp=0),),
        sizes=(2, 1, 1),
        num_hosts=2,
    )

    assert recurrence(finding("second", "adcb", 1), "adcb", [small]) is None
    assert recurrence(finding("second", "abcd", 1), "abcd", [small]) is None
    assert recurrence(finding("second", "adcb", 3), "adcb", [small]) is None


def test_another_rank_of_a_host_that_did_not_move_proves_nothing() -> None:
    """Two ranks of host b, one slow in each run: it may be the host or each device."""
    now = finding("second", "abbc", 2)

    found = recurrence(now, "abbc", [finding("first", "abbc", 1)])

    assert found is not None
    assert found.what is None


def test_unknown_hosts_are_never_the_same_host() -> None:
    unknown = PlacedFinding(
        run_id="first",
        epoch=0,
        cause="slow-compute",
        placements=(Placement(host="", dp=1, pp=0, tp=0),),
        sizes=SIZES,
        num_hosts=4,
    )

    assert recurrence(finding("second", "adcb", 1), "adcb", [unknown]) is None


def test_on_one_host_nothing_is_said_of_host_and_position() -> None:
    # GIVEN a job on host a alone, whose ranks have other positions than before
    now = finding("second", "aaaa", 3)

    assert recurrence(now, "aaaa", [finding("first", "aaaa", 1)]) is None
    assert recurrence(finding("third", "abcd", 1), "abcd", [finding("first", "aaaa", 1)]) is None
