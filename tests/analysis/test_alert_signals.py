from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rankscope.analysis.alert_rules import AlertRules, BadHostSettings, LossSettings
from rankscope.analysis.alert_signals import (
    HostRecord,
    RunSignals,
    StepLoss,
    Traffic,
    find_host_conditions,
    find_signal_conditions,
)
from rankscope.analysis.report.liveness import RankLiveness, SilentRank

if TYPE_CHECKING:
    from collections.abc import Sequence

S = 1_000_000_000


def texts(signals: RunSignals, rules: AlertRules | None = None) -> list[str]:
    return [each.text for each in find_signal_conditions(signals, rules=rules)]


def losses(values: Sequence[float | None], *, bad: Sequence[int] = ()) -> RunSignals:
    return RunSignals(
        run="job",
        losses=tuple(
            StepLoss(
                step=step, mean=value, num_ranks=4, num_bad=4 if step in bad else 0, num_infinite=0
            )
            for step, value in enumerate(values)
        ),
    )


FALLING = [4.0 - 0.02 * step for step in range(40)]


def test_a_falling_loss_gives_no_alert() -> None:
    assert texts(losses(FALLING)) == []


def test_a_loss_that_becomes_no_number_alerts_at_its_first_step() -> None:
    signals = losses([*FALLING, None, None], bad=(40, 41))

    (alert,) = find_signal_conditions(signals)

    assert alert.text == "job: the loss of 4 of 4 ranks is no number since step 40"
    assert (alert.steps, alert.is_active) == ((40, 41), True)


def test_a_loss_that_is_reported_every_ten_steps_gives_no_alert() -> None:
    values = [2.0 if step % 10 == 0 else None for step in range(40)]

    assert texts(losses(values, bad=[step for step in range(40) if step % 10])) == []


def test_a_jump_of_three_steps_alerts_and_is_over_after_it() -> None:
    assert texts(losses([*FALLING, 9.0, 9.0])) == []
    (alert,) = find_signal_conditions(losses([*FALLING, 9.0, 9.0, 8.0, 3.2]))
    assert alert.text == "job: the loss jumped from 3.41 to 9 in step 40"
    assert (alert.key, alert.steps, alert.is_active) == ("spike-40", (40, 42), False)
    off = AlertRules(loss=LossSettings(enabled=False))
    assert texts(losses([*FALLING, 9.0, 9.0, 8.0]), off) == []


def test_silent_ranks_are_one_alert_with_their_hosts() -> None:
    silent = tuple(
        SilentRank(rank=rank, host="b", state="training", step=7, age_ns=age * S)
        for rank, age in ((5, 40), (4, 35), (6, 20))
    )
    live = RankLiveness(num_ranks=8, num_recent=5, num_silent=3, silent=silent)

    (alert,) = find_signal_conditions(RunSignals(run="job", liveness=live))

    assert alert.text == "job: 3 of 8 ranks sent no heartbeat for 40.0 s: ranks 4 and 5"
    assert (alert.ranks, alert.hosts) == ((4, 5), ("b",))


def traffic(change: dict[int, float]) -> RunSignals:
    """Return the traffic of four hosts that pulsates, and changes on some in the last buckets."""
    rate = np.tile([8e9, 9e9], (4, 10))
    for host, factor in change.items():
        rate[host, -3:] *= factor
    return RunSignals(run="job", traffic=Traffic(hosts=("a", "b", "c", "d"), bytes_per_s=rate))


def test_traffic_that_stops_or_changes_on_one_host_alerts() -> None:
    assert texts(traffic({})) == []
    assert texts(traffic({2: 0.0})) == ["job: the RDMA traffic of host c has stopped"]
    (text,) = texts(traffic({1: 0.4}))
    assert text.startswith("job: the RDMA traffic of host b is 4")


def test_traffic_that_stops_on_all_hosts_is_a_checkpoint() -> None:
    assert texts(traffic(dict.fromkeys(range(4), 0.0))) == []


def test_what_is_behind_alerts_after_a_minute_or_two() -> None:
    assert texts(RunSignals(run="job", collector_lag_s=50.0, analysis_lag_s=110.0)) == []
    assert texts(RunSignals(run="job", collector_lag_s=70.0, analysis_lag_s=130.0)) == [
        "job: the newest stored step ended 70.0 s ago, though the ranks go on",
        "job: a step has waited for its analysis for 130 s",
    ]


def test_errors_and_findings_against_a_host_are_two_alerts() -> None:
    named_by = {"a": ["slow-compute"], "b": ["host-stall", "slow-compute"]}
    record = HostRecord(
        host="gpu07", errors=["no GPU", "no link", "heat", "dust"], named_by=named_by
    )
    rules = AlertRules(bad_host=BadHostSettings(num_runs=2))

    errors, offender = find_host_conditions([record], rules=rules)

    assert errors.text == (
        "the checks of host gpu07 report errors: no GPU; no link; heat; and 1 more"
    )
    assert offender.text == (
        "findings of 2 runs name host gpu07: host-stall and slow-compute in a and b"
    )
    assert {errors.hosts, offender.hosts} == {("gpu07",)}
    assert errors.key != offender.key
    assert len(find_host_conditions([record])) == 1  # two runs are not enough by default


def test_a_host_that_is_fit_since_gives_no_alert() -> None:
    named_by = {run: ["slow-compute"] for run in "abcd"}

    assert find_host_conditions([HostRecord(host="x", named_by=named_by, is_fit_since=True)]) == ()
