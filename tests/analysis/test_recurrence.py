from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.recurrence import Followed, Following, Place, Sighting, follow

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZES = (4, 1, 1)
"""Four data-parallel positions, each on a host of its own."""


def placed(hosts: str) -> tuple[Place, ...]:
    """Return where each position stands: "abcd" puts dp 0 on host a, dp 1 on host b, ..."""
    return tuple(Place(host=host, dp=dp, pp=0, tp=0) for dp, host in enumerate(hosts))


def sighting(
    run: str, hosts: str, *slow: int, epoch: int = 0, cause: str = "slow-compute"
) -> Sighting:
    """Return a finding of run ``run``, placed as ``hosts``, of the positions ``slow``."""
    return Sighting(
        run_id=run,
        epoch=epoch,
        cause=cause,
        places=tuple(placed(hosts)[dp] for dp in slow),
        sizes=SIZES,
        num_hosts=len(set(hosts)),
    )


def followed(
    now: Sighting, hosts: str, history: Sequence[Sighting], *, also: Sequence[Sighting] = ()
) -> Followed | None:
    return follow(now, history, also=also, placement=lambda: placed(hosts))


def test_a_host_that_is_slow_at_another_position_is_followed() -> None:
    # GIVEN host b slow at dp 1; WHEN it stands at dp 3 and dp 1 is host d's
    now = sighting("second", "adcb", 3)

    found = followed(now, "adcb", [sighting("first", "abcd", 1)])

    # THEN it follows the host
    assert found == Followed(
        what=Following.HOST,
        evidence="host b was told in run first (epoch 0) too, at another position:"
        " (dp 1, pp 0, tp 0) then, (dp 3, pp 0, tp 0) now",
    )


def test_a_position_that_is_slow_on_another_host_is_followed() -> None:
    now = sighting("second", "adcb", 1)

    found = followed(now, "adcb", [sighting("first", "abcd", 1)])

    assert found == Followed(
        what=Following.POSITION,
        evidence="(dp 1, pp 0, tp 0) was told in run first (epoch 0) too, on b then, on d now",
    )


def test_where_nothing_moved_neither_can_be_told() -> None:
    now = sighting("second", "abcd", 1)

    found = followed(now, "abcd", [sighting("first", "abcd", 1)])

    assert found is not None
    assert found.what is None
    assert found.evidence == (
        "cannot tell: host b was told in run first (epoch 0) too, but nothing moved in between"
        " that would tell it from its position"
    )


def test_what_was_never_told_before_follows_nothing() -> None:
    now = sighting("second", "adcb", 3)

    assert followed(now, "adcb", []) is None
    assert followed(now, "adcb", [sighting("first", "abcd", 0)]) is None
    assert followed(now, "adcb", [sighting("first", "abcd", 1, cause="host-stall")]) is None


def test_findings_of_the_same_epoch_prove_nothing() -> None:
    now = sighting("first", "abcd", 1)

    assert followed(now, "abcd", [now]) is None


def test_an_earlier_epoch_of_the_same_run_counts() -> None:
    now = sighting("run", "badc", 0, epoch=1)

    found = followed(now, "badc", [sighting("run", "abcd", 1), now])

    assert found is not None
    assert found.what is Following.HOST


def test_two_slow_hosts_that_changed_places_tell_nothing() -> None:
    """Each host was slow before and is slow now; so was each position."""
    first = [sighting("first", "abcd", 1), sighting("first", "abcd", 3)]
    now = [sighting("second", "adcb", 1), sighting("second", "adcb", 3)]

    found = followed(now[0], "adcb", first, also=now)

    assert found is not None
    assert found.what is None


def test_evidence_for_both_is_told_as_such() -> None:
    history = [sighting("first", "abcd", 1), sighting("second", "cabd", 3)]
    now = sighting("third", "acdb", 3)

    found = followed(now, "acdb", history)

    assert found == Followed(
        what=None,
        evidence="cannot tell: run first (epoch 0) had the same host at another position, run"
        " second (epoch 0) the same position on another host",
    )


def test_three_runs_are_counted_and_named() -> None:
    history = [sighting("first", "abcd", 1), sighting("second", "bacd", 0)]

    found = followed(sighting("third", "cdba", 2), "cdba", history)

    assert found is not None
    assert found.what is Following.HOST
    assert "in runs first (epoch 0) and second (epoch 0) too" in found.evidence


def test_a_throttled_clock_is_slow_compute_with_samples() -> None:
    now = sighting("second", "adcb", 3, cause="clock-throttle")

    found = followed(now, "adcb", [sighting("first", "abcd", 1)])

    assert found is not None
    assert found.what is Following.HOST


@pytest.mark.parametrize("cause", ["stage-imbalance", "gc-pause", "checkpoint", "healthy"])
def test_causes_without_a_place_follow_nothing(cause: str) -> None:
    history = [sighting("first", "abcd", 1, cause=cause)]

    assert followed(sighting("second", "adcb", 3, cause=cause), "adcb", history) is None


def test_a_finding_of_most_hosts_speaks_of_none() -> None:
    history = [sighting("first", "abcd", 1)]

    assert followed(sighting("second", "adcb", 0, 1, 3), "adcb", history) is None


def test_positions_of_another_layout_are_not_compared() -> None:
    """dp 1 of two is not dp 1 of four; but the host is the same host."""
    small = Sighting(
        run_id="first",
        epoch=0,
        cause="slow-compute",
        places=(Place(host="b", dp=1, pp=0, tp=0),),
        sizes=(2, 1, 1),
        num_hosts=2,
    )

    assert followed(sighting("second", "adcb", 1), "adcb", [small]) is None
    found = followed(sighting("second", "adcb", 3), "adcb", [small])
    assert found is not None
    assert found.what is Following.HOST


def test_another_rank_of_a_host_that_did_not_move_tells_nothing() -> None:
    """Two ranks of host b, one slow in each run: the host may be it, or each device."""
    now = sighting("second", "abbc", 2)

    found = followed(now, "abbc", [sighting("first", "abbc", 1)])

    assert found is not None
    assert found.what is None


def test_unknown_hosts_are_never_the_same_host() -> None:
    unknown = Sighting(
        run_id="first",
        epoch=0,
        cause="slow-compute",
        places=(Place(host="", dp=1, pp=0, tp=0),),
        sizes=SIZES,
        num_hosts=4,
    )

    assert followed(sighting("second", "adcb", 1), "adcb", [unknown]) is None
