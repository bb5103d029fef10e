from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.arrays.grouping import NO_GROUP
from rankscope.analysis.readers.bytedance.format import CODE
from rankscope.analysis.readers.bytedance.graph import build_model, read_trace
from rankscope.analysis.readers.bytedance.reader import read_bytedance
from rankscope.analysis.readers.tracer.reader import read_traced
from rankscope.analysis.replay.program import Program, compile_program
from rankscope.analysis.replay.replayer import Replayer
from rankscope.analysis.replay.step_graph import build_step_graph, replayed_times
from rankscope.analysis.trace.errors import AnalysisError
from rankscope.tracer.topology import Layout
from tests.support.analysis.bytedance_cluster import ByteDanceCluster
from tests.support.analysis.cluster import MS, gpt_cluster, source_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rankscope.analysis.replay.model import ReplayModel

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
    "traced": read_traced(TRACED.info, TRACED.span_table, TRACED.step_table).model,
    "bytedance": read_bytedance(BYTEDANCE.info, BYTEDANCE.span_table).model,
}


def noisy_model(*, dp: int, pp: int, uneven: bool = False) -> ReplayModel:
    rng = np.random.default_rng(1)

    def compute_ns(dp: int, stage: int, step: int, mb: int, forward: bool) -> float:  # noqa: FBT001
        return MS * (10 if forward else 20) * float(rng.uniform(0.8, 1.2))

    cluster = ByteDanceCluster(dp, pp, 4, compute_ns).run([3, 5, 6])
    if uneven:  # one replica of one step misses an operation, so its structure differs
        cluster.rows.remove(next(r for r in cluster.rows if r[:4] == (1, 0, 5, "gc")))
    source = cluster.source()
    return build_model(read_trace(source.info, source.span_table))


def compared(model: ReplayModel) -> Program:
    return compile_program(model.operations, compare_replicas=True)


def alone(
    program: Program, duration_ns: NDArray[np.float64], model: ReplayModel
) -> NDArray[np.float64]:
    """Return the step times with each whole replica put back, shape (replicas, steps)."""
    whole = np.ones(len(duration_ns), dtype=np.uint32)
    times: NDArray[np.float64]
    (times,) = program.isolated_step_times(duration_ns, model.ideal_ns, whole, 1)
    return times


def test_replicas_of_equal_structure_are_found() -> None:
    even, uneven = noisy_model(dp=3, pp=2), noisy_model(dp=3, pp=2, uneven=True)

    assert compared(even).has_equal_replicas.tolist() == [True, True, True]
    assert compared(uneven).has_equal_replicas.tolist() == [True, False, True]


@pytest.mark.parametrize("uneven", [False, True])
def test_step_without_operations_takes_no_time(uneven: bool) -> None:  # noqa: FBT001
    model = noisy_model(dp=2, pp=2, uneven=uneven)
    steps = (*model.operations.steps, model.operations.steps[-1] + 1)
    operations = replace(model.operations, steps=steps)
    program = compile_program(operations, compare_replicas=True)
    duration_ns = model.operations.duration_ns

    isolated = alone(program, duration_ns, model)

    assert isolated.shape == (2, 4)
    assert isolated[:, -1].tolist() == [0.0, 0.0]
    assert (isolated[:, :-1] > 0).all()
    assert program.step_times(duration_ns)[-1] == 0.0


@pytest.mark.parametrize("uneven", [False, True])
def test_isolated_replica_is_exact(uneven: bool) -> None:  # noqa: FBT001
    model = noisy_model(dp=4, pp=3, uneven=uneven)
    operations = model.operations
    program = compared(model)

    found = alone(program, operations.duration_ns, model)

    for dp in range(4):
        put_back = np.where(model.dp == dp, operations.duration_ns, model.ideal_ns)
        assert found[dp] == pytest.approx(program.step_times(put_back), rel=1e-12)


@pytest.mark.parametrize(("src", "dst"), [(0, -1), (-1, 0)])
def test_operations_that_wait_for_another_step_are_refused(src: int, dst: int) -> None:
    operations = noisy_model(dp=2, pp=2).operations
    rows = np.arange(len(operations), dtype=np.int32)
    edges = {"src": rows[[src]], "dst": rows[[dst]]}

    with pytest.raises(AnalysisError, match="another step"):
        compile_program(replace(operations, src=edges["src"], dst=edges["dst"]))


def test_operations_that_wait_for_a_missing_one_are_refused() -> None:
    operations = noisy_model(dp=2, pp=2).operations

    with pytest.raises(AnalysisError, match="there is not"):
        compile_program(replace(operations, src=operations.src + len(operations)))


def test_single_replica_is_put_back_as_a_whole() -> None:
    model = noisy_model(dp=1, pp=2)
    operations = model.operations
    program = compared(model)

    found = alone(program, operations.duration_ns, model)

    # One of the three steps is faster than ideal. An ideal replica next to it would hide that.
    assert (found[0] < program.step_times(model.ideal_ns)).any()
    assert found[0].tolist() == program.step_times(operations.duration_ns).tolist()


def test_member_without_predecessors_arrives_at_the_start_of_the_step() -> None:
    # The first receive of stage 1 is paired with a send whose clock is half a minute behind.
    model = noisy_model(dp=1, pp=2)
    operations = model.operations
    forward = (operations.label // 2 == CODE["forward-compute"]) & (model.stage == 0)
    first = np.flatnonzero(forward)[::4]
    durations = operations.duration_ns.copy()
    durations[first] -= 30_000 * MS

    times = compile_program(operations).step_times(durations)

    usual = compile_program(operations).step_times(operations.duration_ns)
    assert (times > 0).all()
    assert (usual - times < 40 * MS).all()


@pytest.mark.parametrize("name", sorted(MODELS))
def test_times_of_the_whole_run_equal_those_of_each_step_alone(name: str) -> None:
    model = MODELS[name]
    operations = model.operations
    gap = operations.gap_ns + np.arange(len(operations)) % 7

    program, graph = compile_program(operations), build_step_graph(model)
    together = program.operation_times(operations.duration_ns, gap, steps=slice(None))
    alone, _ = replayed_times(graph, operations.duration_ns, gap)

    assert graph.rows.tolist() == list(range(len(operations)))
    for column in ("start_ns", "gate_ns", "end_ns"):
        assert getattr(together, column).tolist() == getattr(alone, column).tolist()


def test_gaps_of_members_are_replayed_after_a_replay_without_them() -> None:
    # GIVEN a replay of a run whose members have no gaps
    model = MODELS["traced"]
    replayer = Replayer(model)
    before = replayer.full_recorded()

    # WHEN each member of a group is replayed 1 s late
    late = np.where(model.operations.group == NO_GROUP, 0.0, 1e9)

    # THEN the steps take longer
    assert (replayer.full_with(model.operations.duration_ns, late) >= before + 1e9).all()
