from __future__ import annotations

import numpy as np
import pytest

from analysis.bytedance_reading import read_bytedance
from analysis.operation_times import operation_times
from analysis.program import compile_program
from analysis.step_graph import graph_of_steps, replayed_times
from analysis.traced import read_traced
from tests.analysis.bytedance_cluster import ByteDanceCluster
from tests.analysis.cluster import MS, gpt_cluster, source_of
from tracer.topology import Layout

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
