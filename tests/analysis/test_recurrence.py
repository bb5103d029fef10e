from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.recurrence import (
    Follows,
    PlacedFinding,
    Placement,
    Recurrence,
    find_recurrence,
    name_hosts,
)
from rankscope.analysis.report.report import Finding, RankPlacements, epoch_of
from tests.support.analysis.exit_builders import run_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.analysis.trace.tables import RankInfo

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


UNKNOWN = replace(finding("first", "abcd", 1), placements=(Placement(host="", dp=1, pp=0, tp=0),))
OF_TWO = replace(finding("first", "abcd", 1), sizes=(2, 1, 1), num_hosts=2)
THROTTLED = finding("second", "adcb", 3, cause="clock-throttle")


@pytest.mark.parametrize(
    ("now", "hosts", "earlier", "what"),
    [
        pytest.param(finding("second", "abcd", 1), "abcd", ("abcd", 1), None, id="nothing moved"),
        # Two ranks of host b, one slow in each run: it may be the host or each device.
        pytest.param(finding("second", "abbc", 2), "abbc", ("abbc", 1), None, id="another rank"),
        pytest.param(THROTTLED, "adcb", ("abcd", 1), Follows.HOST, id="a clock is slow compute"),
    ],
)
def test_a_finding_recurs(
    now: PlacedFinding, hosts: str, earlier: tuple[str, int], what: Follows | None
) -> None:
    found = recurrence(now, hosts, [finding("first", *earlier)])

    assert found is not None
    assert found.what is what
    assert what or found.evidence == (
        "unknown: host b was also named in run first (epoch 0), but nothing has moved since,"
        " so host and position cannot be distinguished"
    )


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


@pytest.mark.parametrize(
    ("now", "hosts", "history"),
    [
        (finding("second", "adcb", 3), "adcb", []),
        (finding("second", "adcb", 3), "adcb", [finding("first", "abcd", 0)]),
        (finding("second", "adcb", 3), "adcb", [finding("first", "abcd", 1, cause="host-stall")]),
        # The same epoch proves nothing, nor does a finding of most hosts or of unknown ones.
        (finding("first", "abcd", 1), "abcd", [finding("first", "abcd", 1)]),
        (finding("second", "adcb", 0, 1, 3), "adcb", [finding("first", "abcd", 1)]),
        (finding("second", "adcb", 1), "adcb", [UNKNOWN]),
        # A job on host a alone, whose ranks have other positions than before.
        (finding("second", "aaaa", 3), "aaaa", [finding("first", "aaaa", 1)]),
        (finding("third", "abcd", 1), "abcd", [finding("first", "aaaa", 1)]),
        # Host b is dp 1 of two, and dp 1 or dp 3 of four: neither has moved, and neither stayed.
        (finding("second", "adcb", 1), "adcb", [OF_TWO]),
        (finding("second", "abcd", 1), "abcd", [OF_TWO]),
        (finding("second", "adcb", 3), "adcb", [OF_TWO]),
        *(
            (
                finding("second", "adcb", 3, cause=of_job),
                "adcb",
                [finding("first", "abcd", 1, cause=of_job)],
            )
            for of_job in ("stage-imbalance", "gc-pause", "checkpoint", "healthy")
        ),
    ],
)
def test_a_finding_does_not_recur(
    now: PlacedFinding, hosts: str, history: list[PlacedFinding]
) -> None:
    assert recurrence(now, hosts, history) is None


def _on_host(info: RankInfo, host: str) -> RankInfo:
    return replace(info, host=host, local_rank=0)


def test_a_crash_is_on_the_host_of_its_epoch() -> None:
    # Step 13 was repeated after the restart, on other hosts.
    two = run_of(4, num_epochs=2)
    epochs = tuple(
        replace(epoch, ranks=tuple(map(_on_host, epoch.ranks, hosts)))
        for epoch, hosts in zip(two.epochs, ("abcd", "abde"), strict=True)
    )
    run = replace(two, epochs=epochs)
    moved = tuple(
        RankPlacements(
            epochs=(epoch,),
            steps=steps,
            of_rank={info.rank: (info.host, 0) for info in run.epochs[epoch].ranks},
        )
        for epoch, steps in ((0, (5, 9)), (1, (10, 15)))
    )
    crash = Finding(
        cause="crash", ranks=(2,), steps=(13, 13), confidence=0.9, evidence="killed", epoch=0
    )

    assert name_hosts(crash, moved, run).hosts == ("c",)
    assert name_hosts(crash, moved[1:], run).hosts == ("c",)
    assert name_hosts(replace(crash, epoch=None), moved, run).hosts == ("d",)
    assert epoch_of(crash, moved, newest=1) == 0
