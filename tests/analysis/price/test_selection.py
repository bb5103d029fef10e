from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.analyze import read_operations
from rankscope.analysis.price.selection import (
    EmptyPartError,
    MissingSpansError,
    Part,
    select_operations,
)
from rankscope.tracer.topology import Coords, Layout
from tests.support.analysis.bytedance_cluster import ByteDanceCluster
from tests.support.analysis.cluster import MS, dp_group, gpt_cluster, source_of

if TYPE_CHECKING:
    from rankscope.analysis.replay.model import Reading
    from tests.support.analysis.cluster import Source

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
def test_a_place_in_the_layout_picks_its_ranks(
    part: Part, ranks: set[int], source: Source, reading: Reading
) -> None:
    assert ranks_of(part, source, reading) == ranks


def test_kind_and_step_pick_what_they_say(source: Source, reading: Reading) -> None:
    mask = select_operations(Part(kind="optimizer", step=2), source.info, reading)

    operations = reading.model.operations
    # One a rank.
    assert mask.sum() == 8
    assert set(operations.step[mask].tolist()) == {2}
    assert set(operations.duration_ns[mask].tolist()) == {MS}


def test_a_link_is_directed(source: Source, reading: Reading) -> None:
    there = select_operations(Part(link=(0, 4)), source.info, reading)
    back = select_operations(Part(link=(4, 0)), source.info, reading)

    # Sender and receiver, four micro-batches, three steps.
    assert (there.sum(), back.sum(), (there & back).sum()) == (24, 24, 0)
    assert set(reading.model.rank[there].tolist()) == {0, 4}


def test_a_group_picks_its_members_communication(source: Source, reading: Reading) -> None:
    group = dp_group(LAYOUT, Coords(dp=0, tp=1, pp=0))

    mask = select_operations(Part(group=group), source.info, reading, spans=source.span_table)

    kinds = {reading.model.kinds[kind] for kind in reading.model.kind[mask]}
    assert (set(reading.model.rank[mask].tolist()), kinds, mask.sum()) == ({1, 3}, {"dp-comm"}, 6)


def test_a_name_picks_sends_apart_from_receives_in_the_bytedance_format() -> None:
    source = ByteDanceCluster(1, 2, 4, lambda *_: 5 * MS).run([0, 3]).source()
    reading = read_operations(source.info, source.span_table, source.step_table)

    mask = select_operations(
        Part(name="forward-send"), source.info, reading, spans=source.span_table
    )

    assert mask.sum() == 8
    assert set(reading.model.stage[mask].tolist()) == {0}


def test_what_picks_nothing_says_so(source: Source, reading: Reading) -> None:
    with pytest.raises(EmptyPartError, match="no operation of the run"):
        select_operations(Part(rank=99), source.info, reading)
    with pytest.raises(EmptyPartError, match="no kind 'forwards'"):
        select_operations(Part(kind="forwards"), source.info, reading)
    with pytest.raises(MissingSpansError, match="needs the run's spans"):
        select_operations(Part(name="all_reduce"), source.info, reading)


def test_masks_combine(source: Source, reading: Reading) -> None:
    both = select_operations(Part(rank=1), source.info, reading) | select_operations(
        Part(rank=2), source.info, reading
    )

    assert np.unique(reading.model.rank[both]).tolist() == [1, 2]
