from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.readers.clocks import align_clocks
from rankscope.analysis.trace.context import EventRecord, RankExit, RunContext, SampleTable
from rankscope.analysis.trace.tables import EpochInfo, GroupInfo, RankInfo, RunInfo, SpanTable
from rankscope.tracer.span import Span, SpanFlag, SpanKind, UnixNs
from rankscope.tracer.topology import Coords, Layout
from tests.support.dashboard.builders import span_table

MS = 1_000_000
S = 1_000 * MS
T0 = 1_790_000_000 * S
"""Far enough from 0 that a float64 of it is 256 ns coarse."""


def run(*hosts: str, errors: tuple[int | None, ...] = (), error_ns: int | None = None) -> RunInfo:
    errors = errors or (None,) * len(hosts)
    ranks = tuple(
        RankInfo(rank=rank, coords=Coords(dp=rank), host=host, clock_error_ns=errors[rank])
        for rank, host in enumerate(hosts)
    )
    groups = tuple(
        GroupInfo(group_id=number, kind="dp-comm", name="dp", members=tuple(range(len(hosts))))
        for number in (7, 8)
    )
    return RunInfo(
        run_id="job",
        source_format="rankscope",
        layout=Layout(dp=len(hosts)),
        world_size=len(hosts),
        epochs=(EpochInfo(epoch=0, ranks=ranks, groups=groups),),
        clock_error_ns=error_ns,
    )


def collective(
    rank: int,
    begin_ns: int,
    end_ns: int,
    *,
    seq: int,
    name: str = "all_reduce",
    group: int = 7,
    flags: int = 16,
) -> Span:
    return Span(
        rank=rank,
        step=seq,
        kind=SpanKind.DP_COMM,
        name=name,
        start_ns=UnixNs(T0 + begin_ns),
        duration_ns=end_ns - begin_ns,
        group_id=group,
        seq=seq,
        flags=SpanFlag(flags),
    )


def repeated(*members: tuple[int, int, int], name: str = "all_reduce") -> SpanTable:
    """Return four collectives, given rank, begin and end of their members."""
    return span_table(
        [
            collective(rank, begin_ns, end_ns, seq=seq, name=name)
            for seq in range(4)
            for rank, begin_ns, end_ns in members
        ]
    )


def p2p(rank: int, begin_ns: int, end_ns: int, *, pair: tuple[int, int], seq: int) -> Span:
    src, dst = pair
    return replace(
        collective(rank, begin_ns, end_ns, seq=seq, name="p2p"),
        kind=SpanKind.PP_SEND if rank == src else SpanKind.PP_RECV,
        src_rank=src,
        dst_rank=dst,
    )


def starts_ns(spans: SpanTable) -> list[int]:
    return [int(start) - T0 for start in spans.start_ns]


def test_a_collective_ends_at_one_time_on_all_hosts() -> None:
    # GIVEN host b 30 ms ahead; its rank enters 4 ms after the other one, and both leave at 5 ms
    info = run("a", "b")
    spans = span_table(
        [
            collective(rank, 100 * MS * seq + own_ns, 100 * MS * seq + end_ns, seq=seq)
            for seq in range(4)
            for rank, own_ns, end_ns in ((0, 0, 5 * MS), (1, 34 * MS, 35 * MS))
        ]
    )

    # WHEN the clocks are aligned
    found = align_clocks(info, spans)

    # THEN starts are on a's clock and differ by 4 ms, durations are as they were
    aligned = found.align(spans)
    by_rank = dict(
        zip(aligned.rank[aligned.step == 1].tolist(), starts_ns(aligned)[2:4], strict=True)
    )
    assert by_rank == {0: 100 * MS, 1: 104 * MS}
    assert aligned.duration_ns.tolist() == spans.duration_ns.tolist()
    assert found.run.clock_error_ns == 1_000
    assert found.run.warnings == (
        (
            "clock of b was never measured: aligned with a by the ends of 4 communications"
            " (30.0 ms ahead, error up to 1.00 us)"
        ),
    )


def test_the_error_is_the_spread_of_the_ends() -> None:
    # Host b leaves 0 to 80 us later, in turn: the median is 40 us, the median distance 20 us.
    spans = span_table(
        [
            collective(rank, 100 * MS * seq, 100 * MS * seq + 5 * MS + late_ns, seq=seq)
            for seq in range(5)
            for rank, late_ns in ((0, 0), (1, 20_000 * seq))
        ]
    )

    found = align_clocks(run("a", "b"), spans)

    assert found.run.clock_error_ns == round(3 * 1.4826 * 20_000)


def test_a_drift_is_fitted_in_a_long_run() -> None:
    # Host b gains 50 ppm: 0.18 s in the hour between the first and the last collective.
    true_ns = [36 * S * seq for seq in range(101)]
    on_b = [300 * MS + at + round(50e-6 * at) for at in true_ns]
    spans = span_table(
        [
            collective(rank, at - 5 * MS, at, seq=seq)
            for seq in range(101)
            for rank, at in ((0, true_ns[seq]), (1, on_b[seq]))
        ]
    )

    aligned = align_clocks(run("a", "b"), spans).align(spans)

    of_b = aligned.start_ns[aligned.rank == 1] - T0
    assert np.abs(of_b - (np.array(true_ns) - 5 * MS)).max() <= 1_000


def test_p2p_operations_in_both_directions_bound_an_offset() -> None:
    # GIVEN host b 2 s ahead, buffered sends, and nothing else between the hosts: 0 sends to 1,
    # which receives 1 ms later; 1 sends to 0, which receives 3 ms later
    ahead = 2 * S
    spans = span_table(
        [
            span
            for seq in range(12)
            for at in (100 * MS * seq,)
            for span in (
                p2p(0, at, at + 10_000, pair=(0, 1), seq=seq),
                p2p(1, at - 9 * MS + ahead, at + 1 * MS + ahead, pair=(0, 1), seq=seq),
                p2p(1, at + 20 * MS + ahead, at + 20 * MS + ahead + 10_000, pair=(1, 0), seq=seq),
                p2p(0, at + 2 * MS, at + 23 * MS, pair=(1, 0), seq=seq),
            )
        ]
    )

    found = align_clocks(run("a", "b"), spans)

    # THEN the offset is between 2 s - 3 ms and 2 s + 1 ms: 1.999 s, within 2 ms
    line = found.lines[0, 1]
    assert line.on_other_ns - line.at_ns == -(2 * S - 1 * MS)
    assert found.run.clock_error_ns == 2 * MS


def test_hosts_without_a_common_group_are_aligned_through_others() -> None:
    # GIVEN b 10 ms ahead of a, c 25 ms ahead of b, and no group of a and c
    spans = span_table(
        [
            collective(rank, at, at + 5 * MS, seq=seq, group=group)
            for seq in range(3)
            for rank, at, group in (
                (0, 100 * MS * seq, 7),
                (1, 100 * MS * seq + 10 * MS, 7),
                (1, 100 * MS * seq + 60 * MS, 8),
                (2, 100 * MS * seq + 85 * MS, 8),
            )
        ]
    )

    lines = align_clocks(run("a", "b", "c"), spans).lines

    assert {rank: line.on_other_ns - line.at_ns for (_, rank), line in lines.items()} == {
        1: -10 * MS,
        2: -35 * MS,
    }


def test_a_host_without_any_common_group_stays_unknown() -> None:
    spans = span_table(
        [
            collective(rank, 10 * MS * rank, 10 * MS * rank + MS, seq=0, group=7 + rank // 2)
            for rank in range(3)
        ]
    )

    found = align_clocks(run("a", "b", "c"), spans)

    assert found.run.clock_error_ns is None
    assert found.run.warnings[-1] == (
        "clock of c was never measured, and no communication joins it with a: times cannot be"
        " compared between them"
    )


@pytest.mark.parametrize("name", ["broadcast", "reduce", "scatter", "gather"])
def test_the_ends_of_a_collective_with_a_root_prove_nothing(name: str) -> None:
    spans = repeated((0, 0, 5 * MS), (1, 0, 35 * MS), name=name)

    assert not align_clocks(run("a", "b"), spans).lines


def test_measured_clocks_are_not_touched() -> None:
    # Ends that differ by 3 ms are no contradiction: a host may be late.
    spans = repeated((0, 0, 5 * MS), (1, 0, 8 * MS))
    info = run("a", "b", errors=(50_000, 50_000), error_ns=100_000)

    found = align_clocks(info, spans)

    assert found.run is info
    assert found.align(spans) is spans


def test_a_declared_error_that_collectives_contradict_is_not_believed() -> None:
    # Host b is 30 ms ahead and declares 50 us: it would enter after the others have left.
    spans = repeated((0, 0, 5 * MS), (1, 30 * MS, 35 * MS), (2, 20_000, 5 * MS + 20_000))
    info = run("a", "b", "c", errors=(50_000,) * 3, error_ns=100_000)

    found = align_clocks(info, spans)

    assert [rank for _, rank in found.lines] == [1]
    assert found.run.clock_error_ns == 100_000
    assert found.run.warnings == (
        (
            "clock of b exceeds its error of 100 us: aligned with a"
            " by the ends of 4 communications (30.0 ms ahead, error up to 1.00 us)"
        ),
    )


def test_exits_events_and_samples_are_aligned_with_their_host() -> None:
    # GIVEN b 1 s ahead: by its clock it ended last, in fact it ended first
    spans = repeated((0, 0, 5 * MS), (1, S, S + 5 * MS))
    context = RunContext(
        exits=(
            RankExit(epoch=0, rank=0, state="failed", at_ns=T0 + 300 * MS),
            RankExit(epoch=0, rank=1, state="failed", at_ns=T0 + 1_200 * MS),
        ),
        events=(EventRecord(epoch=0, rank=1, at_ns=T0 + 1_100 * MS, kind="gc", text=""),),
        samples=SampleTable(
            host=np.array([0, 1], np.int32),
            device=np.array([-1, -1], np.int32),
            at_ns=np.array([T0 + S, T0 + S]),
            name=np.zeros(2, np.int32),
            value=np.ones(2),
            hosts=("b", "a"),
            names=("gpu-clock-hz",),
        ),
    )

    aligned = align_clocks(run("a", "b"), spans).align_context(context)

    assert [(one.rank, one.at_ns) for one in aligned.exits] == [
        (1, T0 + 200 * MS),
        (0, T0 + 300 * MS),
    ]
    assert aligned.events[0].at_ns == T0 + 100 * MS
    assert aligned.samples.at_ns.tolist() == [T0, T0 + S]


def test_ranks_of_an_unknown_host_share_its_clock_unless_they_contradict_that() -> None:
    # GIVEN four ranks of unknown hosts, declared equal; in truth 2 and 3 are 30 ms ahead
    info = run("", "", "", "", errors=(0,) * 4, error_ns=0)
    (epoch,) = info.epochs
    ranks = tuple(replace(each, clock=f"rank {each.rank}") for each in epoch.ranks)
    info = replace(info, epochs=(replace(epoch, ranks=ranks),))
    early, late = (0, 5 * MS), (30 * MS, 35 * MS)
    spans = repeated((0, *early), (1, *early), (2, *late), (3, *late))

    found = align_clocks(info, spans)

    assert [rank for _, rank in found.lines] == [2, 3]
    assert found.run.warnings == (
        (
            "clock of rank 2 and rank 3 exceeds its error of 0 ns: aligned with rank 0 by the ends"
            " of 8 communications (rank 2 30.0 ms ahead, error up to 1.00 us)"
        ),
    )
