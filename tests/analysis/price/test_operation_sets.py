from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rankscope.analysis.analyze import read_operations
from rankscope.analysis.price.operation_sets import (
    compare_culprits,
    planned_pauses,
    price_part,
    price_rebalanced_stage,
    recoverable_of,
    slowdown_by_host,
    slowdown_by_rank,
    slowdown_by_tp,
    slowdown_of,
)
from rankscope.analysis.price.selection import EmptyPartError
from rankscope.analysis.replay.what_if import Replayer, what_if
from rankscope.analysis.trace.tables import GroupInfo
from rankscope.tracer.span import SpanKind
from rankscope.tracer.topology import Layout
from tests.analysis.readers.tracer.test_reader import PAIR, spans_of, steps_of
from tests.support.analysis.bytedance_cluster import ByteDanceCluster
from tests.support.analysis.cluster import MS, Cluster, gpt_cluster, source_of

if TYPE_CHECKING:
    from rankscope.analysis.replay.model import ReplayModel
    from rankscope.analysis.trace.tables import RunInfo


def replayed(cluster: Cluster) -> tuple[RunInfo, Replayer]:
    source = source_of(cluster)
    reading = read_operations(source.info, source.span_table, source.step_table)
    return source.info, Replayer(reading.model)


def slow_rank(rank: int = 5) -> tuple[RunInfo, Replayer]:
    return replayed(
        gpt_cluster(
            Layout(dp=2, tp=2, pp=2),
            num_steps=2,
            forward_ns=lambda at, *_: (16 if at == rank else 10) * MS,
        )
    )


def test_one_slow_rank_costs_all_that_was_lost() -> None:
    _, replayer = slow_rank()

    price = price_part(replayer, replayer.model.rank == 5)

    # All others are faster than the mean, so a healthy rank 5 leaves the run below ideal.
    assert price.recoverable_ratio is not None
    assert price.recoverable_ratio >= 1.0
    assert price.slowdown == slowdown_of(replayer, replayer.model.rank == 5)
    assert price.recoverable_ratio == recoverable_of(replayer, replayer.model.rank == 5)
    assert (price.step_ns < price.recorded_step_ns).all()


def test_the_slow_rank_stands_out_wherever_one_looks() -> None:
    run, replayer = slow_rank()

    by_rank = slowdown_by_rank(run, replayer)
    by_tp = slowdown_by_tp(run, replayer)

    assert sorted(by_rank) == list(range(8))
    assert max(by_rank, key=lambda rank: by_rank[rank] or 0) == 5
    assert max(by_tp, key=lambda tp: by_tp[tp] or 0) == 1
    for rank in (0, 3, 5):
        exact = slowdown_of(replayer, replayer.model.rank == rank)
        assert by_rank[rank] == pytest.approx(exact)


def test_hosts_are_told_apart_where_they_have_names() -> None:
    run, replayer = slow_rank()
    assert slowdown_by_host(run, replayer) == {}
    epoch = run.epochs[0]
    ranks = tuple(replace(info, host=f"node{info.rank // 4}") for info in epoch.ranks)
    named = replace(run, epochs=(replace(epoch, ranks=ranks),))

    found = slowdown_by_host(named, replayer)

    assert list(found) == ["node0", "node1"]
    assert found["node1"] == slowdown_of(replayer, replayer.model.rank >= 4)


def test_rebalancing_moves_work_and_loses_none() -> None:
    # Stage 1 computes 14 where stage 0 computes 10: both 12 then, so nobody waits but for the
    # pipeline: 4 + 1 micro-batches of 2 blocks, forward 24 and backward 48, take 360 ms.
    _, replayer = replayed(
        gpt_cluster(Layout(pp=2), num_steps=1, forward_ns=lambda rank, *_: (10, 14)[rank] * MS)
    )
    _, even = replayed(gpt_cluster(Layout(pp=2), num_steps=1, forward_ns=lambda *_: 12 * MS))

    price = price_rebalanced_stage(replayer, 1)

    assert price.step_ns.tolist() == pytest.approx(even.full_recorded().tolist())
    assert price.recoverable_ratio == pytest.approx(1.0)


def test_one_stage_alone_cannot_be_rebalanced() -> None:
    _, replayer = replayed(gpt_cluster(Layout(dp=2), num_steps=1, forward_ns=lambda *_: MS))

    with pytest.raises(EmptyPartError, match="stage 0 cannot be rebalanced"):
        price_rebalanced_stage(replayer, 0)


def with_pauses() -> ReplayModel:
    """Two steps of two ranks that meet at their end: one pauses 30 in each, in turn."""
    spans, steps = [], []
    for step, begin in ((0, 0), (1, 200)):
        late = step
        for rank in (0, 1):
            paused = 30 if rank == late else 0
            rows = [
                (rank, SpanKind.FORWARD, begin, begin + 100 + paused, False, 0),
                (rank, SpanKind.OTHER, begin + 100 + paused, begin + 130, True, 0),
            ]
            if paused:
                rows.append((rank, SpanKind.GC, begin + 10, begin + 40, False, 0))
            spans.append((step, rows))
            steps.append((0, step, rank, begin, begin + 130))
    tables = [
        replace(
            spans_of(rows, step=step),
            seq=np.where(spans_of(rows).group_id > 0, step, -1).astype(np.int64),
        )
        for step, rows in spans
    ]
    first = tables[0]
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(table, name) for table in tables])
        for name in first.__dataclass_fields__
        if name not in ("names", "tracks")
    }
    info, _ = replayed(gpt_cluster(Layout(dp=2), num_steps=1, forward_ns=lambda *_: MS))
    epoch = info.epochs[0]
    groups = (GroupInfo(group_id=PAIR, kind="other", name="all", members=(0, 1)),)
    info = replace(info, epochs=(replace(epoch, groups=groups),))
    return read_operations(info, replace(first, **columns), steps_of(*steps)).model


def test_pauses_at_the_same_time_cost_once_what_they_cost_in_turn() -> None:
    replayer = Replayer(with_pauses())
    assert replayer.full_recorded().tolist() == [130, 130]

    price = planned_pauses(replayer)

    # Each rank pauses 30 in all: together once, in the first step.
    assert price.step_ns.tolist() == [130, 100]
    assert price.recoverable_ratio == pytest.approx(0.5)


def test_without_a_pause_there_is_none_to_plan() -> None:
    _, replayer = slow_rank()

    with pytest.raises(EmptyPartError, match="no gc or checkpoint pause"):
        planned_pauses(replayer)


def test_the_shortcut_and_the_exact_value_agree_on_one_slow_worker() -> None:
    source = (
        ByteDanceCluster(2, 2, 4, lambda dp, stage, *_: (9 if (dp, stage) == (1, 0) else 5) * MS)
        .run([0, 1, 2])
        .source()
    )
    reading = read_operations(source.info, source.span_table, source.step_table)

    found = compare_culprits(what_if(Replayer(reading.model)))

    assert (found.by_shortcut, found.by_exact) == ((1, 0), (1, 0))


def test_they_differ_where_two_workers_are_slow_in_one_row_and_one_column_each() -> None:
    # The worker at dp 0, stage 1 is healthy; its dp position and its stage each hold a slow one.
    slow = {(0, 0): 20, (1, 1): 20}
    source = (
        ByteDanceCluster(2, 2, 4, lambda dp, stage, *_: slow.get((dp, stage), 5) * MS)
        .run([0])
        .source()
    )
    reading = read_operations(source.info, source.span_table, source.step_table)
    result = what_if(Replayer(reading.model))

    exact = {worker: result.slowdown(times) for worker, times in result.by_worker_ns.items()}
    healthy = result.worker_slowdown(0, 1)

    assert healthy is not None
    assert healthy > 1.1
    assert exact[0, 1] is not None
    assert exact[0, 1] <= 1.0 < (exact[0, 0] or 0)
    assert compare_culprits(result).by_exact in slow
