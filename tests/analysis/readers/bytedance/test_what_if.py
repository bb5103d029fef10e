from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.analysis.readers.bytedance.blocks import SLICE_ROWS
from rankscope.analysis.readers.bytedance.format import TraceColumns
from rankscope.analysis.readers.bytedance.reader import read_bytedance
from rankscope.analysis.readers.bytedance.what_if import what_if_trace
from rankscope.analysis.replay.replayer import Replayer, what_if
from rankscope.analysis.trace.errors import EmptyRunError
from rankscope.analysis.trace.rows import select_rows
from rankscope.tracer.topology import Coords
from tests.support.analysis.bytedance_cluster import LATENCY, ByteDanceCluster
from tests.support.analysis.cluster import MS

if TYPE_CHECKING:
    from rankscope.analysis.readers.bytedance.what_if import TraceWhatIf
    from rankscope.analysis.replay.replayer import WhatIf
    from rankscope.analysis.trace.tables import RunInfo, SpanTable
    from tests.support.analysis.cluster import Source


def noisy(dp: int, pp: int, *, steps: list[int] | None = None, seed: int = 7) -> ByteDanceCluster:
    rng = np.random.default_rng(seed)

    def compute_ns(dp: int, stage: int, step: int, mb: int, forward: bool) -> float:  # noqa: FBT001
        return MS * (10 if forward else 20) * float(rng.uniform(0.8, 1.2))

    return ByteDanceCluster(dp, pp, 4, compute_ns).run([3, 5, 6] if steps is None else steps)


def shuffled(spans: SpanTable, seed: int) -> SpanTable:
    order = np.random.default_rng(seed).permutation(len(spans))
    columns = {
        name: getattr(spans, name)[order]
        for name in spans.__dataclass_fields__
        if name not in ("names", "tracks")
    }
    return type(spans)(**columns, names=spans.names, tracks=spans.tracks)


def analysed(cluster: ByteDanceCluster) -> TraceWhatIf:
    source = cluster.source()
    return what_if_trace(source.info, source.span_table)


def assert_same(found: WhatIf, expected: WhatIf) -> None:
    assert found.steps == expected.steps
    assert found.replayed_ns == pytest.approx(expected.replayed_ns, rel=1e-12)
    assert found.ideal_ns == pytest.approx(expected.ideal_ns, rel=1e-12)
    for name in ("by_kind_ns", "by_dp_ns", "by_stage_ns", "by_worker_ns"):
        parts, others = getattr(found, name), getattr(expected, name)
        assert list(parts) == list(others)
        for key, times in parts.items():
            assert times == pytest.approx(others[key], rel=1e-12), (name, key)
    assert found.m_w == pytest.approx(expected.m_w, abs=1e-9)
    assert found.m_s == pytest.approx(expected.m_s, abs=1e-9)


def test_one_slow_worker_costs_what_it_adds_to_the_pipeline() -> None:
    # A pipeline of one stage: a step is four micro-batches one after the other.
    def compute_ns(dp: int, stage: int, step: int, mb: int, forward: bool) -> float:  # noqa: FBT001
        slow = 2 if dp == 1 else 1
        return MS * (10 if forward else 20) * slow

    source = ByteDanceCluster(4, 1, 4, compute_ns).run([0]).source()

    found = what_if_trace(source.info, source.span_table).result

    # params-all-gather, layernorm, scatter and clip take a latency each, gc 3 us, optimizer 2 ms.
    around = 4 * LATENCY + 3_000 + 2 * MS
    mean_ideal = 4 * (10 + 20) * MS * (1 + 2 + 1 + 1) / 4
    assert found.replayed_ns[0] == pytest.approx(4 * 60 * MS + around)
    assert found.ideal_ns[0] == pytest.approx(mean_ideal + around)
    assert found.by_dp_ns[1][0] == pytest.approx(4 * 60 * MS + around)
    # The others are faster than ideal, but still wait for three ideal ones.
    assert found.by_dp_ns[0][0] == pytest.approx(mean_ideal + around)
    assert found.m_w == pytest.approx(1.0)


@pytest.mark.slow
@given(
    dp=st.integers(2, 4),
    pp=st.integers(1, 3),
    missing=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 2), st.sampled_from([3, 5, 6]),
                  st.sampled_from(["gc", "params-all-gather", "layernorm-grads-all-reduce",
                                   "grads-reduce-scatter", "forward-send"])),
        max_size=4,
    ),
    seed=st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_replicas_of_different_shapes_take_part_in_one_step(
    dp: int, pp: int, missing: list[tuple[int, int, int, str]], seed: int
) -> None:
    cluster = noisy(dp, pp, seed=seed)
    for operation in missing:
        row = next((row for row in cluster.rows if row[:4] == operation), None)
        if row is not None:
            cluster.rows.remove(row)
    source = cluster.source()

    reading = read_bytedance(source.info, source.span_table)
    if not reading.steps:
        with pytest.raises(EmptyRunError):
            what_if_trace(source.info, source.span_table)
        return
    found = what_if_trace(source.info, source.span_table)

    assert_same(found.result, what_if(Replayer(reading.model)))
    assert found.left_out == reading.left_out
    assert found.warnings == reading.warnings
    assert found.actual_ns.tolist() == reading.actual_ns.tolist()


def repeated(source: Source, times: int) -> tuple[RunInfo, TraceColumns]:
    """Return the run with each replica repeated, each copy with ranks of its own."""
    info, spans = source.info, source.span_table
    ranks = info.epochs[0].ranks
    many = tuple(
        replace(
            rank,
            rank=rank.rank + 100 * copy,
            coords=Coords(dp=rank.coords.dp + info.layout.dp * copy, pp=rank.coords.pp),
        )
        for copy in range(times)
        for rank in ranks
    )
    copy = np.repeat(np.arange(times, dtype=np.int32), len(spans))
    columns = TraceColumns(
        step=np.tile(spans.step, times),
        rank=np.tile(spans.rank, times) + 100 * copy,
        name=np.tile(spans.name, times),
        start_ns=np.tile(spans.start_ns, times),
        duration_ns=np.tile(spans.duration_ns, times),
        seq=np.tile(spans.seq, times).astype(np.int8),
        chunk=np.tile(spans.chunk, times).astype(np.int8),
        names=spans.names,
    )
    layout = replace(info.layout, dp=info.layout.dp * times)
    epochs = (replace(info.epochs[0], ranks=many),)
    return replace(info, layout=layout, epochs=epochs), columns


def test_repeating_the_replicas_of_a_run_does_not_change_step_times() -> None:
    source = noisy(4, 3).source()
    times = SLICE_ROWS // len(source.span_table) + 1  # more rows than one slice

    few = what_if_trace(source.info, source.span_table).result
    many = what_if_trace(*repeated(source, times)).result

    assert many.replayed_ns.tolist() == few.replayed_ns.tolist()
    assert many.ideal_ns == pytest.approx(few.ideal_ns, rel=1e-9)
    assert len(many.by_dp_ns) == 4 * times
    for dp, step_times in many.by_dp_ns.items():
        assert step_times == pytest.approx(few.by_dp_ns[dp % 4], rel=1e-9)
    for stage, step_times in many.by_stage_ns.items():
        assert step_times == pytest.approx(few.by_stage_ns[stage], rel=1e-9)


@pytest.mark.parametrize("is_contradiction", [False, True])
def test_operations_numbered_with_gaps_or_against_their_starts_are_sorted(
    *, is_contradiction: bool
) -> None:
    source = noisy(2, 3).source()
    spans = source.span_table
    expected = what_if_trace(source.info, spans).result
    first = (spans.seq == 0) & (spans.rank == 0) & (spans.step == 5)
    spans.seq[:] = np.where(first, 50, spans.seq) if is_contradiction else spans.seq * 2 + 1

    found = what_if_trace(source.info, spans if is_contradiction else shuffled(spans, 1))

    assert_same(found.result, expected)
    # On rank 0, forward-send and -compute, backward-recv and -compute have more than one operation.
    prefix = "4 operations began before one of a lower seq_id"
    assert [warning.startswith(prefix) for warning in found.warnings] == [True] * is_contradiction


def test_step_with_repeated_operations_is_left_out_and_named() -> None:
    cluster = noisy(2, 2, steps=[4, 5])
    cluster.rows += [row for row in cluster.rows if row[2] == 5]
    source = cluster.source()

    found = what_if_trace(source.info, source.span_table)

    num = sum(row[2] == 4 for row in cluster.rows)
    assert found.left_out == {5: f"{num} operations are in the trace twice"}
    assert read_bytedance(source.info, source.span_table).left_out == found.left_out


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("optimizer", "1 of 4 workers have no optimizer"),
        ("forward-recv", "1 sends and receives have no counterpart"),
        ("backward-send", "1 sends and receives have no counterpart"),
        ("forward-compute", "workers that should have equally many forward-compute have 3 to 4"),
        (
            "grads-reduce-scatter",
            "workers that should have equally many grads-reduce-scatter have 0 to 1",
        ),
        (
            "embedding-grads-all-reduce",
            "workers that should have equally many embedding-grads-all-reduce have 0 to 1",
        ),
    ],
)
def test_step_without_an_operation_is_left_out_and_named(name: str, reason: str) -> None:
    cluster = noisy(2, 2, steps=[4, 5])
    cluster.rows.remove(next(r for r in cluster.rows if r[:4] == (1, 1, 5, name)))
    source = cluster.source()

    found = what_if_trace(source.info, source.span_table)

    assert found.result.steps == (4,)
    assert found.left_out == {5: reason}
    reading = read_bytedance(source.info, source.span_table)
    assert reading.left_out == {5: reason}
    assert found.actual_ns.tolist() == reading.actual_ns.tolist()
    assert_same(found.result, what_if(Replayer(reading.model)))


def test_workers_that_were_not_traced_are_reported_and_the_rest_compared() -> None:
    cluster = noisy(3, 3, steps=[4])
    cluster.rows = [row for row in cluster.rows if row[:2] != (1, 1)]
    source = cluster.source()

    found = what_if_trace(source.info, source.span_table)

    assert found.left_out == {}
    assert found.warnings == (
        "1 of 9 workers are not in the trace: time that others waited for them counts as transfer",
    )
    assert (1, 2) in found.result.by_worker_ns
    assert read_bytedance(source.info, source.span_table).warnings == found.warnings


def test_steps_with_a_cycle_are_left_out() -> None:
    cluster = noisy(1, 2, steps=[4, 5])
    # By its clock stage 0 ran backward before forward, so it waits for its own send.
    first = next(r for r in cluster.rows if r[1:4] == (0, 5, "backward-compute"))
    cluster.rows[cluster.rows.index(first)] = (*first[:4], first[4] - 10_000 * MS, *first[5:])

    found = analysed(cluster)

    assert found.result.steps == (4,)
    assert "in a cycle" in found.left_out[5]


def test_recorded_time_includes_operations_that_are_not_replayed() -> None:
    cluster = noisy(1, 2, steps=[4])
    before = analysed(cluster)
    first = min(row[4] for row in cluster.rows)
    cluster.rows.append((0, 0, 4, "params-all-gather", first - 5 * MS, MS, 0, 0))

    found = analysed(cluster)

    assert found.result.replayed_ns.tolist() == before.result.replayed_ns.tolist()
    assert found.actual_ns.tolist() == [before.actual_ns[0] + 5 * MS]


def test_run_without_a_whole_step_raises() -> None:
    source = noisy(2, 1, steps=[4]).source()
    spans = source.span_table
    no_optimizer = select_rows(spans, spans.name != spans.names.index("optimizer"))

    with pytest.raises(EmptyRunError, match="2 of 2 workers have no optimizer"):
        what_if_trace(source.info, no_optimizer)


def test_operations_of_unknown_type_are_reported_and_left_out() -> None:
    cluster = noisy(2, 1)
    expected = analysed(cluster).result
    cluster.rows.append((0, 0, 3, "something new", 0, MS, 0, 0))

    found = analysed(cluster)

    assert found.warnings == (
        "1 operations of unknown type are left out of the replay: something new",
    )
    assert_same(found.result, expected)
