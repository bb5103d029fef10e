from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.trainer.simulator.hosts import make_clocks
from rankscope.trainer.simulator.scenario import Noise, Scenario
from rankscope.trainer.simulator.simulation import simulate
from tests.support.trainer.recorded import record

HOUR_NS = 3_600_000_000_000


@settings(deadline=None)  # cores are shared
@given(
    seed=st.integers(0, 10_000), bound_ns=st.integers(0, 10**6), at_ns=st.integers(0, 100 * HOUR_NS)
)
def test_two_clocks_never_differ_by_more_than_the_bound(
    seed: int, bound_ns: int, at_ns: int
) -> None:
    scenario = Scenario(dp=8, ranks_per_host=2, seed=seed, noise=Noise(clock_error_ns=bound_ns))
    hosts = np.arange(scenario.num_hosts, dtype=np.int32)

    read = make_clocks(scenario).read_ns(np.full(len(hosts), at_ns), hosts)

    assert np.ptp(read) <= bound_ns + 1


def test_a_clock_never_runs_backwards_and_its_drift_is_below_a_millionth() -> None:
    scenario = Scenario(dp=8, ranks_per_host=2)
    times = np.arange(0, HOUR_NS // 10, 1_000_000_007)
    for host in range(scenario.num_hosts):
        read = make_clocks(scenario).read_ns(times, np.full(len(times), host, dtype=np.int32))
        drift = np.abs(np.diff(read) / np.diff(times) - 1)
        assert drift.max() < 1e-6
        assert np.ptp(read - times) > 1_000


def test_clock_errors_change_recorded_times_only() -> None:
    true = Scenario(num_steps=2, ranks_per_host=1, noise=Noise(clock_error_ns=0))
    exact_clocks = record(true)
    wrong_clocks = record(replace(true, noise=Noise(clock_error_ns=200_000)))
    moved = wrong_clocks.spans["start_ns"] - exact_clocks.spans["start_ns"]

    assert 50_000 < np.abs(moved).max() <= 100_000
    lasted = wrong_clocks.spans["duration_ns"] - exact_clocks.spans["duration_ns"]
    assert np.abs(lasted).max() <= 1_000


def test_each_simulation_has_its_own_clocks_with_their_bound() -> None:
    first, other = (
        simulate(Scenario(ranks_per_host=2)),
        simulate(Scenario(ranks_per_host=2, seed=1)),
    )
    rows = list(first.clock_rows())

    # Two clocks that are each off by 10 us at most differ by 20 us at most.
    assert [(row["host"], row["clock_error_ns"]) for row in rows] == [
        ("sim-00000", 10_000),
        ("sim-00001", 10_000),
    ]
    boots = {(row["host"], row["boot_id"]) for row in first.rank_rows()}
    assert boots == {(row["host"], row["boot_id"]) for row in rows}
    assert not boots & {(row["host"], row["boot_id"]) for row in other.rank_rows()}
