from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.analysis.analyze import read_operations
from rankscope.analysis.breakdown.starved import attribute_waits
from rankscope.analysis.breakdown.waterfall import (
    PARTS,
    Part,
    Waterfall,
    build_waterfall,
    summarize_waterfall,
)
from rankscope.analysis.replay import model
from rankscope.analysis.replay.model import split_by_time
from rankscope.analysis.trace.tables import GroupInfo
from rankscope.tracer.span import SpanFlag, SpanKind
from rankscope.tracer.topology import Coords, Layout
from tests.analysis.readers.tracer.test_reader import PAIR, Row, spans_of, steps_of
from tests.support.analysis.bytedance_cluster import LATENCY, ByteDanceCluster
from tests.support.analysis.cluster import MS, gpt_cluster, source_of

if TYPE_CHECKING:
    from tests.support.analysis.cluster import Source

BUBBLES = (Part.BUBBLE_WARM_UP, Part.BUBBLE_STEADY, Part.BUBBLE_COOL_DOWN)


def split(source: Source) -> Waterfall:
    info, spans, steps = source.info, source.span_table, source.step_table
    return build_waterfall(info, read_operations(info, spans, steps), steps)


def shares(waterfall: Waterfall, row: int) -> dict[Part, float]:
    """Return the parts of one rank's first step in ms, without the empty ones."""
    times = {part: waterfall.of(part)[row, 0] / MS for part in PARTS}
    return {part: time for part, time in times.items() if time}


def slow_pair() -> Source:
    """Return a job of two ranks with blocks of 10 ms on rank 0 and 30 ms on rank 1."""
    cluster = gpt_cluster(
        Layout(dp=2),
        num_steps=1,
        num_microbatches=1,
        forward_ns=lambda rank, *_: (10, 30)[rank] * MS,
    )
    return source_of(cluster)


def test_the_excess_of_a_slow_rank_is_slow_compute_there_and_waiting_elsewhere() -> None:
    # 2 forward blocks and 2 backward blocks of twice the time, ideally 120 ms in all; two
    # collectives of 0.5 ms; 1 ms of optimizer.
    waterfall = split(slow_pair())

    assert shares(waterfall, 0) == {
        Part.USEFUL_COMPUTE: 61,
        Part.EXPOSED_TRANSFER: 1,
        Part.WAITING: 120,
    }
    assert shares(waterfall, 1) == {
        Part.USEFUL_COMPUTE: 121,
        Part.SLOW_COMPUTE: 60,
        Part.EXPOSED_TRANSFER: 1,
    }
    assert waterfall.total_ns.tolist() == [[182 * MS], [182 * MS]]
    assert waterfall.bubble is None


def test_in_a_balanced_pipeline_all_waiting_is_the_bubble_of_the_formula() -> None:
    # 4 micro-batches of 20 ms forward and 40 backward: (p - 1) (20 + 40) on every rank.
    waterfall = split(
        source_of(gpt_cluster(Layout(pp=2), num_steps=1, forward_ns=lambda *_: 10 * MS))
    )

    bubbles = [{part: shares(waterfall, row).get(part, 0) for part in BUBBLES} for row in (0, 1)]
    # Rank 0 waits from its last forward to its first backward, rank 1 at both ends.
    assert list(bubbles[0].values()) == [60, 0, 0]
    assert list(bubbles[1].values()) == [20, 0, 40]
    assert not waterfall.of(Part.WAITING).any()
    assert waterfall.bubble is not None
    assert waterfall.bubble.formula_ratio == 1 / 4
    assert waterfall.bubble.measured_ratio == 1 / 4


def test_the_bubble_of_1f1b_is_that_of_the_formula_except_for_transfers() -> None:
    # Backward takes twice as long; a transfer takes a fortieth of both.
    source = (
        ByteDanceCluster(2, 3, 6, lambda *args: (20 if args[-1] else 40) * MS).run([4]).source()
    )

    waterfall = split(source)

    assert waterfall.bubble is not None
    assert waterfall.bubble.formula_ratio == 2 / 6
    assert waterfall.bubble.measured_ratio == pytest.approx(2 / 6, rel=0.03)
    # The wait for a reduction whose group was not traced; and gc, which takes 3 us.
    assert (waterfall.of(Part.UNKNOWN) == LATENCY).all()
    assert (waterfall.of(Part.GC) == 3000).all()


def test_the_waiting_that_a_slow_stage_causes_is_no_bubble() -> None:
    def blocks(slow_ms: int) -> Waterfall:
        cluster = ByteDanceCluster(
            1, 2, 4, lambda dp, stage, step, mb, forward: (10 + stage * slow_ms) * MS
        )
        return split(cluster.run([0]).source())

    even, slow = blocks(0), blocks(6)

    # Each of its 8 operations takes 6 ms more, 3 ms more than the mean of both stages.
    assert slow.of(Part.SLOW_COMPUTE).tolist() == [[0], [8 * 3 * MS]]
    assert slow.of(Part.WAITING)[0, 0] > 8 * 2 * MS
    assert even.of(Part.WAITING).max() <= LATENCY
    assert (
        sum(slow.of(part)[1, 0] for part in BUBBLES)
        <= sum(even.of(part)[1, 0] for part in BUBBLES) + 3 * MS
    )


def one_rank(*rows: Row, end: int) -> Source:
    source = slow_pair()
    info = replace(
        source.info,
        layout=Layout(),
        world_size=1,
        epochs=(replace(source.info.epochs[0], ranks=source.info.epochs[0].ranks[:1], groups=()),),
    )
    assert info.epochs[0].ranks[0].coords == Coords()
    return replace(
        source,
        info=info,
        span_table=spans_of(list(rows)),
        step_table=steps_of((0, 0, 0, 0, end)),
    )


def test_host_time_is_classified_by_its_span_and_its_position() -> None:
    waterfall = split(
        one_rank(
            (0, SpanKind.DATA, 5, 9, False, 0),
            (0, SpanKind.FORWARD, 20, 50, False, 0),
            (0, SpanKind.GC, 30, 37, False, 0),
            (0, SpanKind.BACKWARD, 54, 80, False, 0),
            (0, SpanKind.CHECKPOINT, 80, 91, False, 0),
            end=100,
        )
    )

    # 20 before the first forward, 4 between forward and backward, 9 at the end.
    found = {part: int(time * MS) for part, time in shares(waterfall, 0).items()}
    assert found == {
        Part.USEFUL_COMPUTE: 23 + 26,
        Part.INPUT: 20,
        Part.GC: 7,
        Part.HOST_GAP: 4 + 9,
        Part.CHECKPOINT: 11,
    }


def test_a_wait_for_an_unrecorded_communication_is_unknown() -> None:
    waterfall = split(
        one_rank(
            (0, SpanKind.FORWARD, 0, 50, False, 0),
            (0, SpanKind.WAIT, 50, 80, False, 0),
            end=80,
        )
    )

    assert {part: int(time * MS) for part, time in shares(waterfall, 0).items()} == {
        Part.USEFUL_COMPUTE: 50,
        Part.UNKNOWN: 30,
    }


@st.composite
def traced_sources(draw: st.DrawFn) -> Source:
    layout = draw(
        st.sampled_from([Layout(dp=3), Layout(pp=2, tp=2), Layout(pp=3, dp=2), Layout(dp=2, tp=2)])
    )
    times = draw(st.lists(st.integers(1, 40 * MS), min_size=7, max_size=7))
    cluster = gpt_cluster(
        layout,
        num_steps=2,
        num_microbatches=3,
        forward_ns=lambda rank, step, mb: times[(rank * 5 + step * 3 + mb) % 7],
    )
    return source_of(cluster)


@st.composite
def bytedance_sources(draw: st.DrawFn) -> Source:
    dp, pp = draw(st.sampled_from([(1, 2), (2, 3), (3, 1), (2, 2)]))
    times = draw(st.lists(st.integers(1, 40 * MS), min_size=7, max_size=7))
    cluster = ByteDanceCluster(
        dp, pp, 4, lambda d, s, step, mb, forward: times[(d * 5 + s * 2 + step * 3 + mb) % 7]
    )
    source = cluster.run([0, 1, 5]).source()
    # Late launches: some operations begin later than all that they waited for.
    spans = source.span_table
    by = np.minimum(spans.duration_ns // 2, draw(st.integers(0, 3)) * (MS // 10))
    by *= np.arange(len(spans)) % 5 == 0
    late = replace(spans, start_ns=spans.start_ns + by, duration_ns=spans.duration_ns - by)
    return replace(source, span_table=late)


@given(st.one_of(traced_sources(), bytedance_sources()))
@settings(max_examples=40, deadline=None)
def test_the_parts_sum_to_the_step_on_every_rank(source: Source) -> None:
    waterfall = split(source)

    assert waterfall.time_ns.dtype == np.int64
    assert (waterfall.time_ns.sum(axis=2) == waterfall.total_ns).all()
    assert waterfall.time_ns.min() >= 0
    assert waterfall.total_ns.min() > 0
    ratios = [ratio for ratio in waterfall.mean_ratio().values() if ratio is not None]
    assert sum(ratios) == pytest.approx(1.0)


@given(st.one_of(traced_sources(), bytedance_sources()))
@settings(max_examples=25, deadline=None)
def test_all_waiting_is_attributed_to_a_rank(source: Source) -> None:
    reading = read_operations(source.info, source.span_table, source.step_table)
    waterfall = split(source)

    found = summarize_waterfall(waterfall, attribute_waits(reading.model, reading.waits))

    waited = sum(on.ratio for on in found.waiting_on) * waterfall.total_ns.sum()
    assert waited == pytest.approx(waterfall.of(Part.WAITING).sum())


@given(source=bytedance_sources())
@settings(max_examples=20, deadline=None)
def test_blocks_of_steps_change_nothing(source: Source) -> None:
    reading = read_operations(source.info, source.span_table, source.step_table)
    whole, before = split(source), attribute_waits(reading.model, reading.waits)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model, "BLOCK_OPERATIONS", 1)
        blocks = list(split_by_time(reading.model, reading.waits))
        by_block, found = split(source), attribute_waits(reading.model, reading.waits)

    assert [block.first_step for block in blocks] == [0, 1, 2]
    assert (by_block.time_ns == whole.time_ns).all()
    assert (by_block.waiting_ns == whole.waiting_ns).all()
    assert by_block.bubble == whole.bubble
    assert (found.arrived_last == before.arrived_last).all()
    by_wait = np.lexsort((found.on_rank, found.wait))
    assert (found.wait[by_wait] == before.wait).all()
    assert (found.on_rank[by_wait] == before.on_rank).all()
    assert (found.waited_ns[by_wait] == before.waited_ns).all()


def test_a_summary_gives_shares_of_the_time_of_all_ranks() -> None:
    source = slow_pair()
    reading = read_operations(source.info, source.span_table, source.step_table)

    found = summarize_waterfall(split(source), attribute_waits(reading.model, reading.waits))

    # Each of the two ranks takes 182 ms.
    assert found.mean_ratio["waiting"] == 120 / 364
    assert [(entry.rank, entry.ratio) for entry in found.waiting_on] == [(1, 120 / 364)]
    assert found.by_rank_ns.sum(axis=1).tolist() == [182 * MS, 182 * MS]
    assert found.by_step_ns.sum() == 364 * MS
    assert (found.ranks, found.steps, found.bubble) == ((0, 1), (0,), None)


def test_a_transfer_is_exposed_only_while_no_compute_covers_it() -> None:
    # Rank 0 launches at 50 and computes until 80; rank 1 enters at 85; both leave at 90.
    source = slow_pair()
    epoch = source.info.epochs[0]
    group = GroupInfo(group_id=PAIR, kind="dp-comm", name="dp", members=(0, 1))
    waterfall = split(
        replace(
            source,
            info=replace(source.info, epochs=(replace(epoch, groups=(group,)),)),
            span_table=spans_of(
                [
                    (0, SpanKind.BACKWARD, 0, 80, False, 0),
                    (0, SpanKind.DP_COMM, 50, 90, True, SpanFlag.ASYNC),
                    (0, SpanKind.WAIT, 80, 90, True, 0),
                    (1, SpanKind.BACKWARD, 0, 85, False, 0),
                    (1, SpanKind.DP_COMM, 85, 90, True, 0),
                ]
            ),
            step_table=steps_of((0, 0, 0, 0, 90), (0, 0, 1, 0, 91)),
        )
    )

    found = [
        {part: round(time * MS) for part, time in shares(waterfall, k).items()} for k in (0, 1)
    ]
    assert found[0] == {Part.USEFUL_COMPUTE: 80, Part.WAITING: 5, Part.EXPOSED_TRANSFER: 5}
    # The ideal is 82.5 ns, rounded to 82; the last ns of the step is a host gap.
    assert found[1] == {
        Part.USEFUL_COMPUTE: 82,
        Part.SLOW_COMPUTE: 3,
        Part.EXPOSED_TRANSFER: 5,
        Part.HOST_GAP: 1,
    }
