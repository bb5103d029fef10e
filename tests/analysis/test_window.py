from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.trace.context import (
    EventRecord,
    MicrobatchTable,
    RankExit,
    RunContext,
    SampleTable,
)
from rankscope.analysis.trace.errors import EmptyRunError, UnknownRunError
from rankscope.analysis.trace.rows import concatenate, select_rows
from rankscope.analysis.trace.tables import EpochInfo, RankInfo, RunInfo, StepTable
from rankscope.analysis.window import SETTLING_STEPS, RunWindow, last_complete_step, sort_samples
from rankscope.tracer.topology import Coords, Layout
from tests.support.analysis.cluster import MS, Source, gpt_cluster
from tests.support.analysis.tables import table_of
from tests.support.analysis.training import Training

if TYPE_CHECKING:
    from rankscope.analysis.trace.tables import SpanTable

NUM_STEPS = 10


@pytest.fixture(scope="module")
def whole() -> Source:
    cluster = gpt_cluster(
        Layout(dp=2), num_steps=NUM_STEPS, forward_ns=lambda rank, _step, _mb: (10 + rank) * MS
    )
    return Source(cluster.run_info(), cluster.span_table(), cluster.step_table())


def names_of(spans: SpanTable) -> list[str]:
    return [spans.names[code] for code in spans.name]


def same_spans(found: SpanTable, expected: SpanTable) -> bool:
    columns = found.__dataclass_fields__.keys() - {"name", "names", "track", "tracks"}
    alike = all(np.array_equal(getattr(found, c), getattr(expected, c)) for c in columns)
    return alike and names_of(found) == names_of(expected)


def test_steps_read_one_by_one_equal_those_read_at_once(whole: Source) -> None:
    source = Training(whole)
    window = RunWindow(source, "tiny", max_spans=10**6)
    for step in range(NUM_STEPS):
        source.newest = step
        window.advance()

    assert same_spans(window.spans("tiny"), whole.span_table)
    assert window.steps("tiny").start_ns.tolist() == whole.step_table.start_ns.tolist()
    assert window.last == NUM_STEPS - 1


def test_a_job_that_stalls_before_its_first_complete_step_is_read_once(whole: Source) -> None:
    # GIVEN step 0, which rank 1 has not ended
    steps = select_rows(whole.step_table, whole.step_table.rank == 0)
    stalled = EventRecord(epoch=0, rank=0, at_ns=1, kind="stalled", text="")
    hung = replace(whole, step_table=steps)
    source = Training(hung, newest=0)
    window = RunWindow(source, "tiny", max_spans=10**6)
    assert window.advance() == 0

    source.whole = replace(hung, around=RunContext(events=(stalled,)))

    assert (window.advance(), len(window.spans("tiny")) > 0) == (1, True)
    assert (window.last, window.num_earlier_steps) == (None, 0)
    assert window.advance() == 0
    source.whole = replace(whole, around=RunContext(events=(stalled,)))
    assert (window.advance(), window.last) == (1, 0)


def test_advancing_reads_the_new_steps_and_the_few_that_may_be_incomplete(whole: Source) -> None:
    source = Training(whole, newest=5)
    window = RunWindow(source, "tiny", max_spans=10**6)
    window.advance()
    source.reads.clear()

    source.newest = 7
    assert window.advance() == 2
    assert source.reads == [(6 - SETTLING_STEPS, 7)]
    assert window.advance() == 0
    assert len(source.reads) == 1


def test_advancing_reads_no_steps_for_which_there_is_no_room(whole: Source) -> None:
    source = Training(whole, newest=5)
    window = RunWindow(source, "tiny", max_spans=len(whole.span_table) // NUM_STEPS)
    window.advance()
    source.reads.clear()

    source.newest = 6
    assert window.advance() == 1
    assert source.reads == [(6, 6)]
    assert np.unique(window.steps("tiny").step).tolist() == [6]


def test_a_late_span_is_read_with_the_next_step(whole: Source) -> None:
    late = whole.span_table
    keep = np.arange(len(late)) != np.flatnonzero(late.step == 3)[-1]
    without = replace(whole, span_table=select_rows(late, keep))
    source = Training(without, newest=3)
    window = RunWindow(source, "tiny", max_spans=10**6)
    window.advance()

    source.whole, source.newest = whole, 4
    window.advance()

    assert len(window.spans("tiny")) == int((late.step <= 4).sum())


def test_the_window_keeps_its_limits_and_its_newest_step(whole: Source) -> None:
    per_step = len(whole.span_table) // NUM_STEPS
    source = Training(whole, newest=5)
    by_spans = RunWindow(source, "tiny", max_spans=3 * per_step)
    by_steps = RunWindow(source, "tiny", max_spans=10**6, max_steps=2)
    tiny = RunWindow(source, "tiny", max_spans=1)
    for newest in (5, 8):
        source.newest = newest
        for window in (by_spans, by_steps, tiny):
            window.advance()

    found = [sorted(set(w.spans("tiny").step.tolist())) for w in (by_spans, by_steps, tiny)]
    assert found == [[6, 7, 8], [7, 8], [8]]
    assert sorted(set(by_steps.steps("tiny").step.tolist())) == [7, 8]
    assert [w.num_earlier_steps for w in (by_spans, by_steps, tiny)] == [6, 7, 8]


def test_a_window_fits_the_time_budget_of_its_analysis_with_at_least_eight_steps() -> None:
    cluster = gpt_cluster(Layout(dp=2), num_steps=32, forward_ns=lambda _rank, _step, _mb: MS)
    long = Source(cluster.run_info(), cluster.span_table(), cluster.step_table())
    source = Training(long, newest=29)
    window = RunWindow(source, "tiny", max_spans=10**6)
    window.advance()

    kept = []
    for seconds, newest in ((10.0, 30), (10.0, 31)):
        window.fit(seconds, 5.0)
        source.newest = newest
        window.advance()
        kept.append(len(set(window.steps("tiny").step.tolist())))

    assert kept == [15, 8]


def test_the_mfu_is_that_of_all_steps_though_the_window_keeps_few(whole: Source) -> None:
    ranks = tuple(replace(rank, peak_flops_per_s=1e9) for rank in whole.info.epochs[0].ranks)
    info = replace(
        whole.info, flops_per_token=1.0, epochs=(replace(whole.info.epochs[0], ranks=ranks),)
    )
    source = Training(replace(whole, info=info), newest=4)
    window = RunWindow(source, "tiny", max_spans=10**6, max_steps=2)
    for newest in (4, 5, 8):
        source.newest = newest
        window.advance()

    assert window.mfu is not None
    assert list(window.mfu.by_step) == list(range(9))
    assert window.mfu.mean == pytest.approx(np.mean(list(window.mfu.by_step.values())))


def restarted(whole: Source, *, at: int, steps: int) -> Source:
    """Return the run after a restart that repeats ``steps`` steps from step ``at`` on."""
    spans, rows = whole.spans("", first=at), whole.steps("", first=at)
    spans = select_rows(spans, spans.step < at + steps)
    rows = select_rows(rows, rows.step < at + steps)
    spans = replace(spans, epoch=spans.epoch + 1, start_ns=spans.start_ns + 10**12)
    rows = replace(
        rows,
        epoch=rows.epoch + 1,
        start_ns=rows.start_ns + 10**12,
        end_ns=rows.end_ns + 10**12,
    )
    epochs = (whole.info.epochs[0], replace(whole.info.epochs[0], epoch=1))
    return Source(
        replace(whole.info, epochs=epochs),
        concatenate(whole.span_table, spans),
        concatenate(whole.step_table, rows),
    )


def test_after_a_restart_the_new_epoch_counts_from_its_first_step(whole: Source) -> None:
    source = Training(whole, newest=NUM_STEPS)
    window = RunWindow(source, "tiny", max_spans=10**6)
    window.advance()

    source.whole = restarted(whole, at=6, steps=0)  # The new epoch has no step yet.
    assert window.advance() == 0
    assert window.last == NUM_STEPS - 1
    source.whole = restarted(whole, at=6, steps=2)
    window.advance()
    source.whole = restarted(whole, at=6, steps=3)
    window.advance()

    steps = window.steps("tiny")
    pairs = sorted(set(zip(steps.epoch.tolist(), steps.step.tolist(), strict=True)))
    assert pairs == [(0, step) for step in range(6)] + [(1, 6), (1, 7), (1, 8)]
    spans = window.spans("tiny")
    assert sorted(set(zip(spans.epoch.tolist(), spans.step.tolist(), strict=True))) == pairs


def test_an_exit_of_a_rank_is_reported_without_a_new_step(whole: Source) -> None:
    source = Training(whole, newest=4)
    window = RunWindow(source, "tiny", max_spans=10**6)
    window.advance()

    ended = RankExit(epoch=0, rank=1, state="failed", at_ns=5, exception="ValueError")
    source.whole = replace(whole, around=RunContext(exits=(ended,)))

    assert window.advance() == 1
    assert window.context("tiny").exits == (ended,)
    assert window.advance() == 0


def test_a_window_without_a_complete_step_raises(whole: Source) -> None:
    window = RunWindow(Training(whole), "tiny", max_spans=10)

    assert window.advance() == 0
    with pytest.raises(EmptyRunError):
        window.spans("tiny")
    with pytest.raises(UnknownRunError):
        window.spans("other")


def around(step: int) -> RunContext:
    """Return one micro-batch and one sample of a step; samples of even and odd steps differ."""
    none = np.zeros(1, dtype=np.int32)
    return RunContext(
        microbatches=table_of(
            MicrobatchTable, step=step, num_tokens=step, sum_squared_lengths=step
        ),
        samples=SampleTable(
            host=none,
            device=none,
            at_ns=np.array([100 - step], dtype=np.int64),
            name=none,
            value=np.array([float(step)]),
            hosts=(f"h{step % 2}",),
            names=(f"n{step % 2}",),
        ),
    )


def test_joined_samples_are_ordered_by_name_host_device_and_time() -> None:
    joined = sort_samples(
        concatenate(concatenate(around(0).samples, around(1).samples), around(2).samples)
    )

    assert [joined.names[code] for code in joined.name] == ["n0", "n0", "n1"]
    assert [joined.hosts[code] for code in joined.host] == ["h0", "h0", "h1"]
    assert (joined.at_ns.tolist(), joined.value.tolist()) == ([98, 100, 99], [2.0, 0.0, 1.0])


def steps_of(*rows: tuple[int, int, int]) -> StepTable:
    """Return step rows of (epoch, step, rank), all ended."""
    epoch, step, rank = zip(*rows, strict=True)
    return table_of(StepTable, epoch=epoch, step=step, rank=rank, end_ns=1)


def test_a_step_is_complete_when_all_ranks_of_its_epoch_have_ended_it() -> None:
    ranks = tuple(RankInfo(rank=rank, coords=Coords(dp=rank)) for rank in range(2))
    info = RunInfo(
        run_id="r",
        source_format="rankscope",
        layout=Layout(dp=2),
        world_size=2,
        epochs=(EpochInfo(epoch=0, ranks=ranks), EpochInfo(epoch=1, ranks=ranks)),
    )

    assert last_complete_step(info, steps_of((0, 4, 0), (0, 4, 1), (0, 5, 0))) == 4
    # Step 5 was ended by one rank in each of two epochs: it is complete in neither.
    assert last_complete_step(info, steps_of((0, 5, 0), (1, 5, 1))) is None


def test_the_ranks_are_read_again_only_for_a_new_step_or_version(whole: Source) -> None:
    """Of thousands of ranks that takes a second, and a window is asked every second."""
    source, version = Training(whole, newest=3), [0]
    window = RunWindow(source, "tiny", max_spans=10**6, version=lambda _: version[0])
    assert window.advance() == 4
    looks = source.num_looks
    assert (window.advance(), source.num_looks - looks) == (0, 0)
    version[0] += 1
    assert (window.advance(), source.num_looks - looks) == (0, 1)
    source.newest = 4
    assert (window.advance(), source.num_looks - looks) == (1, 2)
