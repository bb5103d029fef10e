"""Excluded hosts in a run: gone since a restart, used again, or in use until the next one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.report.report import RankPlacements
from rankscope.collector.read.hosts import HostChange, HostMark
from rankscope.sources.excluded_hosts import (
    HostPresence,
    follow_exclusions,
    format_excluded_host,
)
from tests.support.dashboard import builders

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport

SLOW_S, FAST_S = 0.46, 0.34


def placed(epoch: int, steps: range, hosts: str) -> RankPlacements:
    """Place one rank on each host, named by a letter."""
    of_rank = {rank: (host, 0) for rank, host in enumerate(hosts)}
    return RankPlacements(epochs=(epoch,), steps=tuple(steps), of_rank=of_rank)


def report(*placements: RankPlacements) -> RunReport:
    """Return a report whose steps are slow while a rank is on host b."""
    times = {
        step: (SLOW_S if any(host == "b" for host, _ in place.of_rank.values()) else FAST_S)
        + 0.001 * (step % 2)
        for place in placements
        for step in place.steps
    }
    return replace(builders.report(), placements=placements, actual_s_by_step=times)


def excluded(host: str, at_ns: int, until_ns: int | None = None) -> HostChange:
    return HostChange(
        host=host, mark=HostMark.EXCLUDED, at_ns=at_ns, is_set=True, until_ns=until_ns,
        reason="slow",
    )  # fmt: skip


FIRST, SECOND = range(10), range(10, 20)
STARTS = {0: 1_000, 1: 2_000}


def test_a_host_that_is_gone_is_compared_with_the_steps_before() -> None:
    moved = report(placed(0, FIRST, "ab"), placed(1, SECOND, "ac"))

    (gone,) = follow_exclusions(moved, [excluded("b", 1_500)], STARTS)

    assert (gone.host, gone.presence, gone.epoch) == ("b", HostPresence.GONE, 1)
    assert gone.step_times is not None
    assert gone.step_times.mean_s == pytest.approx((SLOW_S + 0.0005, FAST_S + 0.0005))
    assert gone.step_times.change.is_significant
    text = format_excluded_host(gone)
    assert "b, excluded at" in text
    assert "is gone in epoch 1: a step is" in text


def test_a_restart_on_an_excluded_host_is_a_warning() -> None:
    kept = report(
        RankPlacements(epochs=(0, 1), steps=(*FIRST, *SECOND), of_rank={0: ("b", 0), 1: ("c", 0)})
    )

    (used,) = follow_exclusions(kept, [excluded("b", 1_500)], STARTS)

    assert (used.presence, used.step_times) == (HostPresence.STILL_USED, None)
    assert format_excluded_host(used).startswith("warning: b, excluded")


@pytest.mark.parametrize("starts", [{0: 1_000}, {}])
def test_before_a_restart_nothing_is_expected(starts: dict[int, int]) -> None:
    (waiting,) = follow_exclusions(report(placed(0, FIRST, "ab")), [excluded("b", 1_500)], starts)

    assert waiting.presence is HostPresence.UNTIL_RESTART


def test_other_hosts_included_ones_and_expired_ones_are_not_reported() -> None:
    kept = report(
        RankPlacements(epochs=(0, 1), steps=(*FIRST, *SECOND), of_rank={0: ("b", 0), 1: ("c", 0)})
    )
    changes = [
        excluded("z", 1_500),
        excluded("c", 1_500),
        replace(excluded("c", 1_600), is_set=False),
        excluded("b", 1_500, until_ns=1_900),
        replace(excluded("b", 1_700), mark=HostMark.GOLDEN),
    ]

    assert follow_exclusions(kept, changes, STARTS) == ()


def test_a_host_that_left_and_came_back_is_used_again() -> None:
    back = report(placed(0, range(5), "ab"), placed(1, range(5, 10), "ac"), placed(2, SECOND, "ab"))

    (used,) = follow_exclusions(back, [excluded("b", 1_500)], {0: 1_000, 1: 2_000, 2: 3_000})

    assert (used.presence, used.epoch) == (HostPresence.STILL_USED, 2)
