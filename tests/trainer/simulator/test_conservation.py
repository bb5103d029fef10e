"""Properties of every run, for any layout, noise and faults."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.tracer.span import hash_group
from rankscope.trainer.faults.spec import parse_simulated_faults
from rankscope.trainer.simulator.scenario import RankOrder, Scenario, Sends, TpDetail
from rankscope.trainer.simulator.simulation import simulate
from tests.support.paths import ROOT
from tests.support.trainer.recorded import record

if TYPE_CHECKING:
    from rankscope.trainer.simulator.tables import StepTables

FAULTS = (
    "none",
    "slow-compute:rank=0,factor=1.5,steps=1",
    "gc-pause:ms=20,probability=0.1",
    "gc-pause:ms=20,probability=0.1,spans=no",
    "host-stall:host=0,ms=3",
    "data-stall:ms=30,spans=no",
    "checkpoint:every=2,ms=50",
    "sequence-imbalance:spread=0.4",
)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    pp = draw(st.integers(1, 3))
    vpp = draw(st.integers(1, 2)) if pp > 1 else 1
    return Scenario(
        dp=draw(st.integers(1, 3)),
        pp=pp,
        tp=draw(st.integers(1, 2)),
        cp=draw(st.integers(1, 2)),
        vpp=vpp,
        num_microbatches=pp * draw(st.integers(1, 2)),
        num_layers=pp * vpp,
        num_steps=2,
        tp_detail=draw(st.sampled_from(TpDetail)),
        overlap=draw(st.booleans()),
        sends=draw(st.sampled_from(Sends)) if vpp == 1 else Sends.BACKGROUND,
        rank_order=draw(st.sampled_from(RankOrder)),
        ranks_per_host=draw(st.integers(1, 4)),
        faults=parse_simulated_faults(draw(st.sets(st.sampled_from(FAULTS), max_size=3))),
        seed=draw(st.integers(0, 1000)),
    )


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(scenarios())
def test_every_communication_has_all_members_and_ends_after_the_arrival(
    scenario: Scenario,
) -> None:
    recorded = record(scenario)
    members = {group.group_id: group.members for group in recorded.simulation.groups}
    spans = recorded.spans
    comms = spans.rows((spans["group_id"] > 0) & (spans["kind"] != "wait"))
    instances = defaultdict(list)
    for row in range(len(comms)):
        key = tuple(int(comms[name][row]) for name in ("group_id", "src_rank", "dst_rank", "seq"))
        instances[key].append(row)

    for (group_id, src, dst, _), rows in instances.items():
        ranks = sorted(comms["rank"][rows].tolist())
        assert ranks == (sorted(members[group_id]) if src < 0 else sorted((src, dst)))
        true_start = comms["start_ns"][rows]
        error_ns = scenario.noise.clock_error_ns + 1
        assert comms.end_ns[rows].min() >= true_start.max() - error_ns
    for group in recorded.simulation.groups:
        assert group.group_id == hash_group(group.name, group.members)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(scenarios())
def test_every_wait_is_within_its_communication(scenario: Scenario) -> None:
    spans = record(scenario).spans
    comm_end = {
        _instance(spans.values, row): int(spans.end_ns[row])
        for row in np.flatnonzero((spans["group_id"] > 0) & (spans["kind"] != "wait")).tolist()
    }
    for row in np.flatnonzero(spans["kind"] == "wait").tolist():
        end = comm_end[_instance(spans.values, row)]
        # A wait for an operation that has ended takes no time.
        assert spans.end_ns[row] == end or spans["duration_ns"][row] == 0
    assert (spans["duration_ns"] >= 0).all()
    assert (spans["launch_ns"] <= spans["start_ns"]).all()


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(scenarios())
def test_work_of_a_rank_never_overlaps_and_steps_follow_each_other(
    scenario: Scenario,
) -> None:
    recorded = record(scenario)
    for rank in range(scenario.world_size):
        steps = recorded.steps.where(rank=rank)
        assert steps["step"].tolist() == [0, 1]
        assert steps["end_ns"][0] == steps["start_ns"][1]
        own = recorded.spans.rows(
            (recorded.spans["rank"] == rank)
            & np.isin(
                recorded.spans["kind"],
                ["forward", "backward", "optimizer", "data", "gc", "checkpoint"],
            )
        )
        assert (own["start_ns"][1:] >= own.end_ns[:-1]).all()
        assert own["start_ns"][0] >= steps["start_ns"][0]
        assert own.end_ns[-1] <= steps["end_ns"][-1]


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(scenarios())
def test_equal_scenarios_give_equal_bytes(scenario: Scenario) -> None:
    simulation = simulate(scenario)

    first, again = list(simulation.tables()), list(simulation.tables())
    other = list(simulate(scenario).tables())

    assert _all_equal(first, again)
    assert _all_equal(first, other)


def test_another_seed_gives_other_times() -> None:
    first, other = record(Scenario(num_steps=1, seed=1)), record(Scenario(num_steps=1, seed=2))

    assert (first.spans["duration_ns"] != other.spans["duration_ns"]).any()


def test_a_fault_does_not_change_the_noise() -> None:
    # Rank 0 is slow in step 1: step 0 is the same with and without the fault.
    without = record(Scenario(num_steps=2))
    slow = record(
        Scenario(
            num_steps=2, faults=parse_simulated_faults(["slow-compute:rank=0,factor=2,steps=1"])
        )
    )

    for column in ("start_ns", "duration_ns"):
        expected = without.spans.where(step=0)[column]
        assert (slow.spans.where(step=0)[column] == expected).all()
    healthy = without.spans.where(step=1, rank=1, kind="forward")["duration_ns"]
    assert (slow.spans.where(step=1, rank=1, kind="forward")["duration_ns"] == healthy).all()


def test_the_columns_are_those_of_the_store() -> None:
    root = ROOT / "collector" / "store" / "migrations"
    sql = "\n".join(path.read_text() for path in sorted(root.glob("*.sql")))
    tables = next(simulate(Scenario(num_steps=1)).tables())

    for name in ("spans", "steps", "microbatches", "samples", "events"):
        body = re.search(rf"CREATE TABLE IF NOT EXISTS {name} \((.*?)\n\) ENGINE", sql, re.DOTALL)
        assert body is not None
        columns = [line.split()[0] for line in body.group(1).strip().splitlines()]
        assert getattr(tables, name).column_names == columns


@pytest.mark.parametrize("order", list(RankOrder))
def test_spans_come_by_rank_and_time(order: RankOrder) -> None:
    recorded = record(Scenario(dp=3, pp=2, tp=2, num_steps=1, rank_order=order, overlap=True))
    rank, start = recorded.spans["rank"], recorded.spans["start_ns"]

    assert (np.diff(rank) >= 0).all()
    assert (np.diff(start)[np.diff(rank) == 0] >= 0).all()


def test_two_thousand_ranks_are_practical() -> None:
    scenario = Scenario(dp=32, pp=8, tp=8, num_microbatches=16, num_steps=1)

    tables = next(simulate(scenario).tables())

    # 16 x (forward, backward) + data, optimizer, 3 collectives with a wait each, and for each of
    # two times 7 borders between stages and 16 micro-batches a send, a receive and a wait.
    assert tables.spans.num_rows == 2048 * (32 + 2 + 6) + 2 * 7 * 16 * 256 * 3
    assert tables.steps.num_rows == 2048


def _instance(values: dict[str, np.ndarray], row: int) -> tuple[int, ...]:
    return tuple(
        int(values[name][row]) for name in ("rank", "group_id", "src_rank", "dst_rank", "seq")
    )


def _all_equal(left: list[StepTables], right: list[StepTables]) -> bool:
    names = ("spans", "steps", "microbatches", "samples", "events")
    return len(left) == len(right) and all(
        getattr(one, name).equals(getattr(two, name))
        for one, two in zip(left, right, strict=True)
        for name in names
    )
