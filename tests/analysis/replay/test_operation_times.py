from __future__ import annotations

import numpy as np
import pytest

from rankscope.analysis.readers.bytedance.diagnosis_inputs import read_bytedance
from rankscope.analysis.readers.tracer.reader import read_traced
from rankscope.analysis.replay.operation_times import operation_times
from rankscope.analysis.replay.operations import NO_GROUP
from rankscope.analysis.replay.program import compile_program
from rankscope.analysis.replay.step_graph import graph_of_steps, replayed_times
from rankscope.analysis.replay.what_if import Replayer
from rankscope.tracer.topology import Layout
from tests.support.analysis.bytedance_cluster import ByteDanceCluster
from tests.support.analysis.cluster import MS, gpt_cluster, source_of

CLUSTER = gpt_cluster(
    Layout(dp=2, tp=2, pp=2),
    num_steps=3,
    forward_ns=lambda rank, step, mb: (10 + rank % 3 + step + mb) * MS,
)
TRACED = source_of(CLUSTER)
BYTEDANCE = (
    ByteDanceCluster(3, 2, 4, lambda dp, stage, step, mb, _: (4 + dp + stage + step + mb) * MS)
    .run([3, 7])
    .source()
)
MODELS = {
    "traced": read_traced(
        TRACED.info, TRACED.span_table, TRACED.step_table, clock_error_ns=0
    ).model,
    "bytedance": read_bytedance(BYTEDANCE.info, BYTEDANCE.span_table).model,
}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_steps_and_replicas_together_give_what_each_step_alone_gives(name: str) -> None:
    model = MODELS[name]
    operations = model.operations
    gap = operations.gap_ns + np.arange(len(operations)) % 7

    together = operation_times(
        compile_program(operations, host_gaps=True), operations, operations.duration_ns, gap
    )
    alone = replayed_times(graph_of_steps(model), operations.duration_ns, gap)

    assert alone.rows.tolist() == list(range(len(operations)))
    for column in ("start_ns", "gate_ns", "end_ns"):
        assert getattr(together, column).tolist() == getattr(alone, column).tolist()


@pytest.mark.parametrize("name", sorted(MODELS))
def test_members_without_launch_gaps_need_no_nodes_of_their_own(name: str) -> None:
    # GIVEN gaps of operations that are in no group
    model = MODELS[name]
    operations = model.operations
    gap = np.where(operations.group == NO_GROUP, 1.0 + np.arange(len(operations)) % 7, 0.0)

    # WHEN it is replayed with and without nodes for members that come late
    lean = compile_program(operations, host_gaps=True, late_members=False)
    full = compile_program(operations, host_gaps=True)

    # THEN every time is the same
    assert not lean.has_arrivals
    assert (
        lean.step_times(operations.duration_ns, gap).tolist()
        == full.step_times(operations.duration_ns, gap).tolist()
    )
    one, other = (
        operation_times(program, operations, operations.duration_ns, gap)
        for program in (lean, full)
    )
    for column in ("start_ns", "gate_ns", "end_ns"):
        assert getattr(one, column).tolist() == getattr(other, column).tolist()


def test_gaps_of_members_are_replayed_also_when_they_come_later() -> None:
    # GIVEN a run whose members have no gaps, replayed so
    model = MODELS["traced"]
    replayer = Replayer(model)
    before = replayer.full_recorded()

    # WHEN each member of a group comes 1 s late
    late = np.where(model.operations.group == NO_GROUP, 0.0, 1e9)

    # THEN it counts
    assert (replayer.full_with(model.operations.duration_ns, late) >= before + 1e9).all()
