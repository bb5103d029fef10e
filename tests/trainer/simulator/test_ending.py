"""Crash and hang: the end of a run, its exit events and open spans."""

from __future__ import annotations

import json

import numpy as np

from rankscope.tracer.span import SpanFlag
from rankscope.trainer.simulator.scenario import Scenario
from tests.support.trainer.recorded import MS, exact, record

SECOND = 1_000_000_000
SIZES = {"dp": 2, "pp": 2, "num_steps": 5, "num_microbatches": 4}


def test_the_first_exit_is_that_of_the_crashed_rank_with_its_reason() -> None:
    recorded = record(exact("crash:rank=2,step=3,kind=cuda-oom", **SIZES))
    events = recorded.events
    order = events["rank"][np.argsort(events["at_ns"], kind="stable")].tolist()
    said = [json.loads(data)["exception"]["type"] for data in events["data"]]

    assert order[0] == 2
    assert sorted(order) == [0, 1, 2, 3]
    assert said[0] == "torch.OutOfMemoryError"
    assert set(said[1:]) == {"torch.distributed.DistBackendError"}
    later = np.sort(events["at_ns"])[1:] - events["at_ns"].min()
    assert (later >= 1 * SECOND).all()
    assert (later <= 10 * SECOND).all()


def test_a_crash_ends_the_run_in_its_step() -> None:
    recorded = record(exact("crash:rank=2,step=3", **SIZES))
    simulation = recorded.simulation
    rows = list(simulation.rank_rows())
    first_exit_ns = recorded.events["at_ns"].min()

    assert sorted(set(recorded.steps["step"].tolist())) == [0, 1, 2]
    assert recorded.spans["step"].max() == 3
    assert {row["exit_state"] for row in rows} == {"failed"}
    assert min(row["exit_ns"] for row in rows) == rows[2]["exit_ns"] == first_exit_ns
    assert simulation.run_row(created_ns=0)["state"] == "failed"
    of_rank = recorded.spans.where(rank=2)
    assert of_rank.end_ns.max() == first_exit_ns
    left = of_rank.where(step=3).rows(of_rank.where(step=3)["flags"] & int(SpanFlag.ERROR) > 0)
    assert left["kind"].tolist() == ["forward"]
    assert left["duration_ns"].tolist() == [5 * MS]


def test_a_hanging_rank_has_no_open_span_and_the_others_are_blocked_in_one() -> None:
    recorded = record(exact("hang:rank=2,step=3", **SIZES))
    spans = recorded.spans
    standing = spans.rows(spans["flags"] & int(SpanFlag.OPEN) > 0)

    assert sorted(set(standing["rank"].tolist())) == [0, 1, 3]
    assert (standing["group_id"] > 0).all()
    # The rank before it waits for its gradient, its data-parallel partners in the reduction.
    blocked = standing.where(kind="wait")
    assert dict(zip(blocked["rank"].tolist(), blocked["name"].tolist(), strict=True)) == {
        0: "wait recv", 1: "wait reduce_scatter_tensor", 3: "wait reduce_scatter_tensor",
    }  # fmt: skip
    silent = spans.where(rank=2)
    assert standing.end_ns.max() - silent.end_ns.max() == 60 * SECOND


def test_a_hanging_job_has_not_ended() -> None:
    recorded = record(exact("hang:rank=2,step=3", **SIZES))
    simulation = recorded.simulation

    assert not len(recorded.events)
    assert {row["exit_state"] for row in simulation.rank_rows()} == {"running"}
    assert simulation.run_row(created_ns=0)["state"] == "running"
    assert simulation.run_row(created_ns=0)["ended_ns"] is None
    assert simulation.labels[0].steps == (3, 3)


def test_a_healthy_job_ends_with_its_last_step() -> None:
    recorded = record(exact(**SIZES))
    row = recorded.simulation.run_row(created_ns=0)

    assert row["state"] == "ended"
    assert row["ended_ns"] == recorded.steps["end_ns"].max()
    assert {one["exit_ns"] for one in recorded.simulation.rank_rows()} == {row["ended_ns"]}


def test_spans_of_a_stopped_step_end_before_ranks_were_last_seen() -> None:
    for cause in ("crash", "hang"):
        scenario = exact(f"{cause}:rank=1,step=1", **(SIZES | {"tp": 2, "overlap": True}))
        noisy = Scenario(**{name: getattr(scenario, name) for name in (
            "dp", "pp", "tp", "num_steps", "num_microbatches", "overlap", "faults")})  # fmt: skip
        spans = record(noisy).spans

        assert (spans["duration_ns"] >= 0).all()
        assert np.ptp(spans["start_ns"]) < 100 * SECOND
