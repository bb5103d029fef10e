from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.analysis.readers.bytedance.reader import read_bytedance
from rankscope.analysis.readers.tracer.reader import read_traced
from rankscope.analysis.replay.critical_path import critical_path, operation_slack
from rankscope.analysis.replay.replayer import Replayer
from rankscope.analysis.trace.errors import EmptyRunError
from rankscope.tracer.topology import Layout
from tests.analysis.breakdown.test_starved import CHAIN
from tests.support.analysis.bytedance_cluster import ByteDanceCluster
from tests.support.analysis.cluster import MS, gpt_cluster, source_of

if TYPE_CHECKING:
    from rankscope.analysis.replay.model import ReplayModel

# Rank 2 computes 100 and transfers 10 with rank 1, which arrived at 10. Then rank 1 computes 20
# and transfers 10 with rank 0, which arrived at 20: 140 in all.
WORK = [20.0, 10.0, 100.0, 10.0, 10.0, 20.0, 10.0, 10.0]


def chain() -> ReplayModel:
    return replace(CHAIN, operations=replace(CHAIN.operations, duration_ns=np.array(WORK)))


def traced_model(num_steps: int = 2, slow_ns: int = 15 * MS) -> ReplayModel:
    cluster = gpt_cluster(
        Layout(dp=2, tp=2, pp=2),
        num_steps=num_steps,
        forward_ns=lambda rank, step, mb: slow_ns if rank == 5 else 10 * MS + step + mb,
    )
    source = source_of(cluster)
    return read_traced(source.info, source.span_table, source.step_table).model


def bytedance_model() -> ReplayModel:
    source = (
        ByteDanceCluster(2, 3, 4, lambda dp, stage, *_: (4 + (dp == 1) * (stage == 1)) * MS)
        .run([3, 7])
        .source()
    )
    return read_bytedance(source.info, source.span_table).model


def test_critical_path_goes_through_the_last_member_to_arrive() -> None:
    path = critical_path(chain())

    rows = zip(path.rank, path.start_ns, path.end_ns, strict=True)
    # Rank 1 passes on the delay of rank 2. The last transfer ends at once on ranks 0 and 1.
    assert [tuple(map(int, row)) for row in rows] == [
        (2, 0, 100),
        (1, 100, 110),
        (1, 110, 130),
        (0, 130, 140),
    ]


def test_slack_is_the_delay_that_an_operation_may_have() -> None:
    # Rank 0 may take 110 longer before its transfer at 130, rank 1 90 before its own at 100. Rank
    # 2's member of that first transfer may last until the step's end.
    assert operation_slack(chain()).slack_ns.tolist() == [110, 90, 0, 0, 30, 0, 0, 0]


def test_operation_that_no_closing_operation_follows_has_infinite_slack() -> None:
    model = chain()
    closes = np.array([False] * 6 + [True] * 2)
    model = replace(model, operations=replace(model.operations, closes_step=closes))

    assert operation_slack(model).slack_ns.tolist() == [110, 90, 0, 0, np.inf, 0, 0, 0]


def test_unknown_step_raises() -> None:
    with pytest.raises(EmptyRunError, match="step 7 is not part of the replay"):
        critical_path(chain(), [7])


@pytest.mark.parametrize("model", [traced_model(), bytedance_model()], ids=["traced", "bytedance"])
def test_path_covers_every_step_of_the_full_replay_without_gaps(model: ReplayModel) -> None:
    path = critical_path(model)
    times = Replayer(model).full_recorded()

    assert path.step_ns.tolist() == times.tolist()
    for step, whole in zip(path.steps, times, strict=True):
        rows = np.flatnonzero(path.step == step)
        assert path.start_ns[rows[0]] == 0
        assert path.end_ns[rows[-1]] == whole
        assert all(path.end_ns[a] == path.start_ns[b] for a, b in pairwise(rows))


@pytest.mark.parametrize("model", [traced_model(), bytedance_model()], ids=["traced", "bytedance"])
def test_operations_on_the_path_have_no_slack_and_none_has_negative_slack(
    model: ReplayModel,
) -> None:
    found = operation_slack(model)
    path = critical_path(model)

    assert (found.slack_ns >= 0).all()
    on_path = np.isin(found.rows, path.operation)
    ends_on_it = on_path & (model.operations.duration_ns[found.rows] > 0)
    assert (found.slack_ns[ends_on_it] == 0).all()


def test_path_of_one_step_is_that_of_the_whole_run() -> None:
    model = traced_model()
    whole, one = critical_path(model), critical_path(model, [1])

    assert one.operation.tolist() == whole.operation[whole.step == 1].tolist()


def test_path_goes_through_the_slow_rank() -> None:
    model = traced_model()
    path = critical_path(model)

    by_rank = np.bincount(
        path.rank[path.kind < 2], weights=(path.end_ns - path.start_ns)[path.kind < 2]
    )
    assert by_rank.argmax() == 5


@pytest.mark.slow
@given(st.integers(0, 10_000), st.floats(0.0, 2.0))
@settings(max_examples=40, deadline=None)
def test_delay_moves_the_end_of_the_step_by_what_exceeds_the_slack(pick: int, share: float) -> None:
    model = traced_model(num_steps=1)
    found = operation_slack(model)
    before = Replayer(model).full_recorded()[0]
    index = pick % len(found.rows)
    delay_ns = float(np.rint(share * (found.slack_ns[index] + MS)))
    duration = model.operations.duration_ns.copy()
    duration[found.rows[index]] += delay_ns
    later = replace(model, operations=replace(model.operations, duration_ns=duration))

    moved = Replayer(later).full_recorded()[0] - before

    assert moved == max(delay_ns - found.slack_ns[index], 0.0)
