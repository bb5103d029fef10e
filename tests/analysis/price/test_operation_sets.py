from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.analyze import read_operations
from rankscope.analysis.price.operation_sets import (
    EmptyPartError,
    MissingSpansError,
    Part,
    compare_culprits,
    part_slowdown,
    price_part,
    select_operations,
    slowdown_by_host,
    slowdown_by_rank,
    slowdown_by_tp,
)
from rankscope.analysis.replay.replayer import Replayer, what_if
from rankscope.tracer.topology import Coords, Layout
from tests.support.analysis.bytedance_cluster import ByteDanceCluster
from tests.support.analysis.cluster import MS, Cluster, dp_group, gpt_cluster, source_of

if TYPE_CHECKING:
    from rankscope.analysis.replay.model import Reading
    from rankscope.analysis.trace.tables import RunInfo
    from tests.support.analysis.cluster import Source


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

    # All other ranks are faster than the mean, so with a healthy rank 5 the run beats the ideal.
    assert price.recoverable_ratio is not None
    assert price.recoverable_ratio >= 1.0
    assert price.slowdown == part_slowdown(replayer, replayer.model.rank == 5)
    assert (price.step_ns < replayer.full_recorded()).all()


def test_the_slow_rank_has_the_largest_slowdown_by_rank_and_by_tp() -> None:
    run, replayer = slow_rank()

    by_rank = slowdown_by_rank(run, replayer)
    by_tp = slowdown_by_tp(run, replayer)

    assert sorted(by_rank) == list(range(8))
    assert max(by_rank, key=lambda rank: by_rank[rank] or 0) == 5
    assert max(by_tp, key=lambda tp: by_tp[tp] or 0) == 1
    for rank in (0, 3, 5):
        exact = part_slowdown(replayer, replayer.model.rank == rank)
        assert by_rank[rank] == pytest.approx(exact)


def test_hosts_with_known_names_have_a_slowdown_each() -> None:
    run, replayer = slow_rank()
    assert slowdown_by_host(run, replayer) == {}
    epoch = run.epochs[0]
    ranks = tuple(replace(info, host=f"node{info.rank // 4}") for info in epoch.ranks)
    named = replace(run, epochs=(replace(epoch, ranks=ranks),))

    found = slowdown_by_host(named, replayer)

    assert list(found) == ["node0", "node1"]
    assert found["node1"] == part_slowdown(replayer, replayer.model.rank >= 4)


def test_the_shortcut_and_the_exact_value_agree_on_one_slow_worker() -> None:
    source = (
        ByteDanceCluster(2, 2, 4, lambda dp, stage, *_: (9 if (dp, stage) == (1, 0) else 5) * MS)
        .run([0, 1, 2])
        .source()
    )
    reading = read_operations(source.info, source.span_table, source.step_table)

    found = compare_culprits(what_if(Replayer(reading.model)))

    assert (found.by_shortcut, found.by_exact) == ((1, 0), (1, 0))


def test_they_differ_if_the_dp_position_and_the_stage_of_a_healthy_worker_are_slow() -> None:
    # GIVEN a healthy worker at dp 0, stage 1, and slow ones at dp 0 and at stage 1
    slow = {(0, 0): 20, (1, 1): 20}
    source = (
        ByteDanceCluster(2, 2, 4, lambda dp, stage, *_: slow.get((dp, stage), 5) * MS)
        .run([0])
        .source()
    )
    reading = read_operations(source.info, source.span_table, source.step_table)
    result = what_if(Replayer(reading.model))

    exact = {worker: result.slowdown(times) for worker, times in result.by_worker_ns.items()}
    healthy = result.worker_slowdowns()[0, 1]

    assert healthy is not None
    assert healthy > 1.1
    assert exact[0, 1] is not None
    assert exact[0, 1] <= 1.0 < (exact[0, 0] or 0)
    assert compare_culprits(result).by_exact in slow


LAYOUT = Layout(dp=2, tp=2, pp=2)


@pytest.fixture(scope="module")
def source() -> Source:
    return source_of(gpt_cluster(LAYOUT, num_steps=3, forward_ns=lambda *_: 10 * MS))


@pytest.fixture(scope="module")
def reading(source: Source) -> Reading:
    return read_operations(source.info, source.span_table, source.step_table)


def ranks_of(part: Part, source: Source, reading: Reading) -> set[int]:
    return set(reading.model.rank[select_operations(part, source.info, reading)].tolist())


@pytest.mark.parametrize(
    ("part", "ranks"),
    [
        (Part(dp=1), {2, 3, 6, 7}),
        (Part(tp=1), {1, 3, 5, 7}),
        (Part(stage=1), {4, 5, 6, 7}),
        (Part(worker=(1, 0)), {2, 3}),
        (Part(rank=6), {6}),
        (Part(dp=1, tp=1, stage=0), {3}),
    ],
)
def test_a_position_in_the_layout_selects_its_ranks(
    part: Part, ranks: set[int], source: Source, reading: Reading
) -> None:
    assert ranks_of(part, source, reading) == ranks


def test_conditions_on_kind_and_step_are_combined(source: Source, reading: Reading) -> None:
    mask = select_operations(Part(kind="optimizer", step=2), source.info, reading)

    operations = reading.model.operations
    # One on each rank.
    assert mask.sum() == 8
    assert set(operations.step[mask].tolist()) == {2}
    assert set(operations.duration_ns[mask].tolist()) == {MS}


def test_a_link_is_directed(source: Source, reading: Reading) -> None:
    there = select_operations(Part(link=(0, 4)), source.info, reading)
    back = select_operations(Part(link=(4, 0)), source.info, reading)

    # Sender and receiver, four micro-batches, three steps: 24 operations.
    assert (there.sum(), back.sum(), (there & back).sum()) == (24, 24, 0)
    assert set(reading.model.rank[there].tolist()) == {0, 4}


def test_a_group_selects_the_communication_of_its_members(source: Source, reading: Reading) -> None:
    group = dp_group(LAYOUT, Coords(dp=0, tp=1, pp=0))

    mask = select_operations(Part(group=group), source.info, reading, spans=source.span_table)

    kinds = {reading.model.kinds[kind] for kind in reading.model.kind[mask]}
    assert (set(reading.model.rank[mask].tolist()), kinds, mask.sum()) == ({1, 3}, {"dp-comm"}, 6)


def test_a_name_selects_sends_without_receives_in_the_bytedance_format() -> None:
    source = ByteDanceCluster(1, 2, 4, lambda *_: 5 * MS).run([0, 3]).source()
    reading = read_operations(source.info, source.span_table, source.step_table)

    mask = select_operations(
        Part(name="forward-send"), source.info, reading, spans=source.span_table
    )

    assert mask.sum() == 8
    assert set(reading.model.stage[mask].tolist()) == {0}


def test_a_part_without_operations_is_an_error(source: Source, reading: Reading) -> None:
    with pytest.raises(EmptyPartError, match="no operation of the run meets"):
        select_operations(Part(rank=99), source.info, reading)
    with pytest.raises(EmptyPartError, match="no kind 'forwards'"):
        select_operations(Part(kind="forwards"), source.info, reading)
    with pytest.raises(MissingSpansError, match="needs the run's spans"):
        select_operations(Part(name="all_reduce"), source.info, reading)


def test_masks_of_several_parts_can_be_combined(source: Source, reading: Reading) -> None:
    both = select_operations(Part(rank=1), source.info, reading) | select_operations(
        Part(rank=2), source.info, reading
    )

    assert np.unique(reading.model.rank[both]).tolist() == [1, 2]
