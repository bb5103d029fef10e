from __future__ import annotations

import numpy as np
import pytest

from rankscope.analysis.readers.bytedance.reader import read_bytedance
from rankscope.analysis.readers.tracer.reader import read_traced
from rankscope.analysis.replay.replayer import Replayer
from rankscope.analysis.replay.step_graph import ideal_timeline
from rankscope.tracer.topology import Layout
from tests.support.analysis.bytedance_cluster import ByteDanceCluster
from tests.support.analysis.cluster import MS, gpt_cluster, source_of


def test_ideal_step_of_a_run_with_a_slow_rank_has_equal_ranks() -> None:
    # Two dp positions with two blocks each: 10 ms on one, 30 ms on the other; backward takes twice.
    cluster = gpt_cluster(
        Layout(dp=2),
        num_steps=1,
        num_microbatches=1,
        forward_ns=lambda rank, *_: (10, 30)[rank] * MS,
    )
    source = source_of(cluster)
    reading = read_traced(source.info, source.span_table, source.step_table)

    found = ideal_timeline(reading.model, 0)

    forward = found.kinds.index("forward")
    forwards = [found.end_ns[(found.kind == forward) & (found.rank == rank)] for rank in (0, 1)]
    ideal = [found.ideal_end_ns[(found.kind == forward) & (found.rank == rank)] for rank in (0, 1)]
    assert [ends.max() for ends in forwards] == [20 * MS, 60 * MS]
    assert [ends.max() for ends in ideal] == [40 * MS, 40 * MS]
    # Recorded: rank 1's 60 + 120 ms, two transfers of half a millisecond, and the optimizer's 1 ms.
    assert (found.actual_ns, found.ideal_ns) == (182 * MS, 122 * MS)


def test_bar_of_a_communication_includes_its_wait() -> None:
    source = source_of(gpt_cluster(Layout(pp=2), num_steps=1, forward_ns=lambda *_: 10 * MS))
    reading = read_traced(source.info, source.span_table, source.step_table)

    found = ideal_timeline(reading.model, 0)

    receive = found.kinds.index("pp-recv")
    first = np.flatnonzero((found.kind == receive) & (found.rank == 1))[0]
    # Rank 1 arrives at 0; rank 0 has computed two blocks by 20 ms.
    assert found.ideal_start_ns[first] == found.start_ns[first] == 0
    assert found.ideal_gate_ns[first] == 20 * MS
    assert found.ideal_end_ns[first] == found.end_ns[first] == 20 * MS + MS // 2


@pytest.mark.parametrize("step", [3, 7])
def test_ideal_step_is_as_long_as_in_the_full_ideal_replay(step: int) -> None:
    source = (
        ByteDanceCluster(2, 2, 4, lambda dp, stage, at, *_: (4 + dp + at) * MS).run([3, 7]).source()
    )
    model = read_bytedance(source.info, source.span_table).model

    found = ideal_timeline(model, step)

    expected = Replayer(model).full_ideal()[model.operations.steps.index(step)]
    assert found.ideal_ns == pytest.approx(expected, abs=0.5)
    assert found.ideal_end_ns.max() == found.ideal_ns
    assert (found.ideal_start_ns <= found.ideal_gate_ns).all()
