from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from rankscope.analysis.causes.crash import find_crashes
from rankscope.analysis.causes.hang import find_hangs
from rankscope.analysis.trace.context import RankExit, RunContext
from rankscope.analysis.trace.tables import EpochInfo, GroupInfo, SpanTable
from rankscope.tracer.span import KIND_CODES, NONE, Span, SpanFlag, SpanKind, UnixNs
from rankscope.tracer.topology import Coords
from tests.support.analysis.cluster import dropping
from tests.support.analysis.exit_builders import (
    SECOND,
    context_of,
    cut_off,
    event,
    failed,
    lost,
    run_of,
    steps_of,
    timed_out,
)
from tests.support.dashboard.builders import span_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rankscope.analysis.trace.context import EventRecord
    from rankscope.analysis.trace.tables import RunInfo

DP, TP_LOW, TP_HIGH = 7, 8, 9
DP_BIT = 1 << KIND_CODES[SpanKind.DP_COMM]
GROUPS = (
    GroupInfo(group_id=DP, kind="dp-comm", name="dp", members=tuple(range(8))),
    GroupInfo(group_id=TP_LOW, kind="tp-comm", name="tp 0", members=(0, 1)),
    GroupInfo(group_id=TP_HIGH, kind="tp-comm", name="tp 2", members=(4, 5)),
)
WORLD = GroupInfo(group_id=6, kind="other", name="world", members=tuple(range(8)))


def job(*, num_dropped: int = 0) -> RunInfo:
    return replace(run_of(groups=GROUPS), accounts=dropping(num_dropped))


def with_partners(run: RunInfo) -> RunInfo:
    """Return a run in which ranks 0 and 1, 2 and 3, ... are tensor-parallel partners."""
    (epoch,) = run.epochs
    ranks = (
        replace(info, coords=Coords(dp=info.rank // 2, tp=info.rank % 2)) for info in epoch.ranks
    )
    return replace(run, epochs=(replace(epoch, ranks=tuple(ranks)),))


def comm(
    rank: int,
    group: int = DP,
    *,
    seq: int = 41,
    flags: SpanFlag = SpanFlag.OPEN,
    kind: SpanKind = SpanKind.DP_COMM,
    src: int = NONE,
    dst: int = NONE,
) -> Span:
    return Span(
        rank=rank,
        step=17,
        kind=kind,
        name="all_reduce",
        start_ns=UnixNs(SECOND),
        duration_ns=SECOND,
        group_id=group,
        seq=seq,
        src_rank=src,
        dst_rank=dst,
        flags=flags,
    )


UP_TO_16 = steps_of(*((16, rank) for rank in range(8)))


def table(spans: Iterable[Span]) -> SpanTable:
    return span_table(list(spans))


def test_the_rank_that_never_entered_is_the_silent_one() -> None:
    spans = table(comm(rank) for rank in range(8) if rank != 5)

    (finding,) = find_hangs(job(), spans, UP_TO_16, RunContext())

    assert (finding.cause, finding.ranks, finding.steps) == ("hang", (5,), (17, 17))
    assert finding.confidence == pytest.approx(0.95)
    assert finding.evidence == (
        "rank 5 never entered all_reduce 41 (dp-comm) of group dp with 8 ranks, in which ranks"
        " 0 to 4, 6 and 7 are blocked; the last step that it finished is 16"
    )


@pytest.mark.parametrize(
    ("odd_steps", "expected"),
    [((13,), "; in step 13 it ran 2 forwards (the others 1)"), (range(10, 17), "finished is 16")],
)
def test_the_step_in_which_the_silent_rank_skipped_a_batch_is_said(
    odd_steps: Iterable[int], expected: str
) -> None:
    # GIVEN rank 5, which ran a forward without a backward in one step, or as usual in all
    forward = replace(comm(0, 0, seq=NONE, flags=SpanFlag.NOTHING), kind=SpanKind.FORWARD)
    passes = [
        replace(forward, rank=rank, step=step)
        for step in range(10, 17)
        for rank in range(8)
        for _ in range(2 if rank == 5 and step in odd_steps else 1)
    ]
    spans = table([*passes, *(comm(rank) for rank in range(8) if rank != 5)])
    steps = steps_of(*((step, rank) for step in range(10, 17) for rank in range(8)))

    (finding,) = find_hangs(job(), spans, steps, RunContext())

    assert finding.ranks == (5,)
    assert finding.evidence.endswith(expected)


def test_a_rank_that_is_blocked_elsewhere_by_the_silent_one_is_not_named() -> None:
    # GIVEN rank 4, which waits for rank 5 in its tensor-parallel group; the others wait for both
    spans = table([comm(4, TP_HIGH, seq=3), *(comm(rank) for rank in (0, 1, 2, 3, 6, 7))])

    (finding,) = find_hangs(job(), spans, UP_TO_16, RunContext())

    assert finding.ranks == (5,)
    assert finding.confidence == pytest.approx(0.95 * 6 / 7)
    assert finding.evidence.endswith("; members are missing in 1 other communication")


def test_of_silent_tensor_parallel_partners_the_least_advanced_is_named() -> None:
    run = with_partners(job())
    forward = replace(comm(4, 0, seq=NONE, kind=SpanKind.FORWARD), name="forward")
    others = [comm(rank) for rank in (0, 1, 2, 3, 6, 7)]

    (one_is_behind,) = find_hangs(run, table([*others, forward]), UP_TO_16, RunContext())
    both_inside = [forward, replace(forward, rank=5)]
    (neither_is,) = find_hangs(run, table([*others, *both_inside]), UP_TO_16, RunContext())

    in_event = RunContext(events=(in_spans(4, FORWARD),))
    (one_has_begun,) = find_hangs(run, table(others), UP_TO_16, in_event)

    assert one_is_behind.ranks == (5,)
    assert one_has_begun.ranks == (5,)
    assert neither_is.ranks == (4, 5)


def test_a_receive_whose_sender_is_silent_names_the_sender() -> None:
    spans = table([comm(6, seq=3, kind=SpanKind.PP_RECV, src=2, dst=6)])

    (finding,) = find_hangs(job(), spans, UP_TO_16, RunContext())

    assert finding.ranks == (2,)
    assert "(pp-recv) from rank 2 to rank 6, in which rank 6 is blocked" in finding.evidence
    sent = comm(2, seq=3, kind=SpanKind.PP_SEND, src=2, dst=6, flags=SpanFlag.NOTHING)
    both = table([comm(6, seq=3, kind=SpanKind.PP_RECV, src=2, dst=6), sent])
    assert find_hangs(job(), both, UP_TO_16, RunContext()) == ()


def test_collectives_in_different_orders_are_a_cycle() -> None:
    spans = table([comm(0, TP_LOW, seq=5), comm(1, TP_LOW, seq=6)])

    (finding,) = find_hangs(job(), spans, UP_TO_16, RunContext())

    assert finding.ranks == (0, 1)
    assert finding.confidence == pytest.approx(0.5)
    assert finding.evidence.startswith("no rank is silent: rank 0 is blocked in all_reduce 5")


def test_the_only_rank_that_all_circles_pass_is_the_odd_one() -> None:
    # GIVEN rank 5, in a collective of all ranks, and ranks 4 and 6, which need it in their group;
    # the others need these two
    run = run_of(groups=(GROUPS[0], replace(GROUPS[2], members=(4, 5, 6))))
    alone, entered_before = comm(5, seq=42), comm(5, flags=SpanFlag.NOTHING)
    need_it = [comm(4, TP_HIGH, seq=3), comm(6, TP_HIGH, seq=3)]
    others = [comm(rank) for rank in (0, 1, 2, 3, 7)]
    spans = table([alone, entered_before, *need_it, *others])

    (finding,) = find_hangs(run, spans, UP_TO_16, RunContext())

    assert finding.ranks == (5,)
    assert finding.evidence.startswith("no rank is silent: ")


def test_a_rank_that_waits_for_a_circle_is_not_named_with_it() -> None:
    # GIVEN ranks 0 and 1 in different orders, and rank 7, which waits for rank 0 and others
    order = [comm(0, TP_LOW, seq=5), comm(1, TP_LOW, seq=6)]
    entered = [comm(rank, flags=SpanFlag.NOTHING) for rank in range(1, 7)]

    (finding,) = find_hangs(job(), table([*order, *entered, comm(7)]), UP_TO_16, RunContext())

    assert finding.ranks == (0, 1)


def in_spans(rank: int, *opened: tuple[str, str, int, int]) -> EventRecord:
    """Return the event of a rank that is stalled in spans: (name, kind, group, seq)."""
    spans = [
        {"name": name, "kind": kind, "step": 17, "group_id": f"{group:016x}", "seq": seq}
        for name, kind, group, seq in opened
    ]
    return event(rank, "stalled", open=spans, step=17)


FORWARD = ("forward", "forward", 0, -1)


def test_a_rank_in_a_receive_of_unknown_source_is_named_with_a_doubt() -> None:
    # GIVEN rank 4, which waits for rank 5, which receives from any of eight ranks
    receiving = in_spans(5, ("recv", "pp-recv", DP, 3))
    spans = table([comm(4, TP_HIGH, seq=3)])

    (finding,) = find_hangs(job(), spans, UP_TO_16, RunContext(events=(receiving,)))

    assert finding.ranks == (5,)
    assert finding.confidence == pytest.approx(0.5)
    assert finding.evidence.endswith("; the other side of that is unknown")


def stalled(rank: int, *, step: int = 17, kind: str = "stalled") -> EventRecord:
    entry = {"name": "all_reduce", "kind": "dp-comm", "step": step, "seq": 41}
    return event(rank, kind, open=[{**entry, "group_id": f"{DP:016x}"}], step=step)


def test_open_spans_are_also_read_from_events_unless_the_rank_went_on() -> None:
    nothing = table([])
    context = RunContext(events=tuple(stalled(rank) for rank in range(8) if rank != 5))

    (finding,) = find_hangs(job(), nothing, UP_TO_16, context)
    assert finding.ranks == (5,)

    gone_on = steps_of(*((17, rank) for rank in range(8)))
    assert find_hangs(job(), nothing, gone_on, context) == ()


def test_a_rank_that_ended_early_is_missing_and_ranks_that_ended_are_not_blocked() -> None:
    spans = table(comm(rank) for rank in range(8) if rank != 5)
    gone = [RankExit(epoch=0, rank=rank, state="ended", at_ns=9) for rank in range(8)]

    (finding,) = find_hangs(job(), spans, UP_TO_16, context_of(gone[5]))

    assert finding.ranks == (5,)
    assert finding.evidence.endswith("; it had already ended without an error")
    assert find_hangs(job(), spans, UP_TO_16, context_of(*gone)) == ()


def test_the_work_of_the_silent_rank_is_named_and_a_checkpoint_is_no_hang() -> None:
    spans = table(comm(rank) for rank in range(8) if rank != 5)
    computing = RunContext(events=(in_spans(5, FORWARD),))
    saving = RunContext(events=(in_spans(5, ("save", "checkpoint", 0, -1)),))

    (finding,) = find_hangs(job(), spans, UP_TO_16, computing)

    assert finding.ranks == (5,)
    assert finding.evidence.endswith("; it was inside forward")
    assert find_hangs(job(), spans, UP_TO_16, saving) == ()


MALFORMED = event(0, "stalled", open=[{"group_id": "no number"}, {"seq": 1}, 4])


@pytest.mark.parametrize(
    ("spans", "context"),
    [
        pytest.param(
            [comm(rank, flags=SpanFlag.NOTHING) for rank in range(8)],
            context_of(timed_out(0)),
            id="no rank is blocked",
        ),
        pytest.param(
            [comm(0, TP_LOW), comm(1, TP_LOW, flags=SpanFlag.NOTHING)],
            RunContext(),
            id="a member that has left is not missing",
        ),
        pytest.param(
            [comm(rank, flags=SpanFlag.ERROR) for rank in range(8) if rank != 5],
            context_of(failed(5, 10.0, "ValueError", "bad"), cut_off(0)),
            id="a crash blocks the others",
        ),
        pytest.param([], RunContext(events=(MALFORMED,)), id="a malformed event"),
    ],
)
def test_nothing_hangs(spans: list[Span], context: RunContext) -> None:
    assert find_hangs(job(), table(spans), UP_TO_16, context) == ()


def slow(rank: int, *, step: int = 17) -> EventRecord:
    return event(rank, "stack", step=step)


def test_if_all_members_are_inside_those_without_a_sign_are_frozen() -> None:
    waiting = [stalled(rank) for rank in range(8)]
    signs = [slow(rank) for rank in range(8) if rank != 5] + [slow(5, step=16)]

    (finding,) = find_hangs(job(), table([]), UP_TO_16, RunContext(events=(*waiting, *signs)))

    assert finding.ranks == (5,)
    assert finding.confidence == pytest.approx(0.95)
    assert finding.evidence == (
        "all 8 members have entered all_reduce 41 (dp-comm) of group dp with 8 ranks, which does"
        " not end: rank 5 is frozen in it, without the reports of a long step that the other 7"
        " sent"
    )


@pytest.mark.parametrize("reporting", [range(8), range(0), range(4)])
def test_if_all_members_are_inside_and_alike_no_rank_is_named(reporting: range) -> None:
    waiting = [stalled(rank) for rank in range(8)]
    signs = [slow(rank) for rank in reporting]

    (finding,) = find_hangs(job(), table([]), UP_TO_16, RunContext(events=(*waiting, *signs)))

    assert finding.ranks == ()
    assert finding.evidence.endswith("a frozen process")


PP_PAIRS = {rank: 20 + rank for rank in range(4)}
DP_PAIRS = {0: 30, 1: 31, 4: 32, 5: 33}
TP_PAIRS = {0: 40, 2: 41, 4: 42, 6: 43}


def pipeline() -> RunInfo:
    """Return 8 ranks of pp 2 x dp 2 x tp 2, with their groups of two."""
    pairs = ((PP_PAIRS, 4, "other"), (DP_PAIRS, 2, "dp-comm"), (TP_PAIRS, 1, "tp-comm"))
    groups = [
        GroupInfo(group_id=group, kind=kind, name=f"{kind} {low}", members=(low, low + distance))
        for of_rank, distance, kind in pairs
        for low, group in of_rank.items()
    ]
    return run_of(groups=groups)


def waiting_for_a_later_stage(rank: int) -> EventRecord:
    group = PP_PAIRS[rank]
    return in_spans(rank, ("send", "pp-send", group, 54), ("recv", "pp-recv", group, 53))


def stopped_inside_a_receive() -> tuple[EventRecord, ...]:
    """Return what the ranks of `pipeline` sent after SIGSTOP of rank 5, in order of time.

    Source: a recorded run of ``python -m benchmarks.real_alerts --only "kill -STOP"``.
    """
    return (
        in_spans(5, ("recv", "pp-recv", PP_PAIRS[1], 53)),
        in_spans(7, FORWARD, ("all_gather_into_tensor", "dp-comm", DP_PAIRS[5], 52)),
        in_spans(6, FORWARD, ("all_reduce", "tp-comm", TP_PAIRS[6], 208)),
        in_spans(4, FORWARD, ("all_reduce", "tp-comm", TP_PAIRS[4], 208)),
        *(waiting_for_a_later_stage(rank) for rank in (1, 0, 3, 2)),
    )


SENT = table([comm(1, 21, seq=53, kind=SpanKind.PP_SEND, src=1, dst=5, flags=SpanFlag.NOTHING)])
"""What rank 5 receives: it was sent before the stop."""


@pytest.mark.parametrize("num_reported", [3, 4, 8])
def test_a_rank_that_is_frozen_in_a_receive_is_named_without_those_that_wait_for_it(
    num_reported: int,
) -> None:
    # GIVEN rank 6, which waits for 7, which waits for 5, which has all that it waits for
    events = stopped_inside_a_receive()[:num_reported]

    (unknown,) = find_hangs(pipeline(), SENT, UP_TO_16, RunContext(events=events))
    signs = tuple(slow(rank) for rank in range(8) if rank != 5)
    (frozen,) = find_hangs(pipeline(), SENT, UP_TO_16, RunContext(events=events + signs))

    assert (unknown.ranks, frozen.ranks) == ((5,), (5,))
    assert unknown.evidence == (
        "all 2 members have entered recv 53 (pp-recv) from rank 1 to rank 5, which does not end:"
        " only rank 5 is still in it; a link, an adapter or a device of theirs, or a frozen process"
    )
    assert "rank 5 is frozen in it, without the reports of a long step" in frozen.evidence
    assert frozen.confidence == pytest.approx(0.95)


def test_a_rank_whose_minute_is_not_over_is_not_named_beside_a_frozen_one() -> None:
    # GIVEN rank 5, stopped in a forward, and rank 4, which waits for it and has not said so yet
    events = (
        in_spans(5, FORWARD),
        *(waiting_for_a_later_stage(rank) for rank in (0, 1)),
        *(slow(rank) for rank in range(8) if rank != 5),
    )

    (finding,) = find_hangs(pipeline(), table([]), UP_TO_16, RunContext(events=events))

    assert finding.ranks == (5,)
    # Without the reports of long steps the two are alike.
    (alike,) = find_hangs(pipeline(), table([]), UP_TO_16, RunContext(events=events[:3]))
    assert alike.ranks == (4, 5)


def test_the_communication_that_all_have_entered_explains_those_that_wait_elsewhere() -> None:
    inside = [comm(4, TP_HIGH, seq=5), comm(5, TP_HIGH, seq=5)]
    spans = table([*inside, *(comm(rank) for rank in range(8) if rank not in {4, 5})])
    events = [replace(stalled(4), data={"step": 17}), slow(4)]

    (finding,) = find_hangs(job(), spans, UP_TO_16, RunContext(events=tuple(events)))

    assert finding.ranks == (4, 5)  # one of them, or what joins them
    assert "tp 2 with 2 ranks, which does not end: a link" in finding.evidence


def test_members_that_are_inside_when_the_job_is_killed_do_not_hang() -> None:
    gone = [replace(stalled(rank), kind="lost") for rank in range(8)]
    context = context_of(*(lost(rank, step=17) for rank in range(8)), events=gone)

    assert find_hangs(job(), table([]), UP_TO_16, context) == ()

    # Nor if a rank was stalled in an earlier step, and went on.
    earlier = RunContext(events=(stalled(0, step=9), *gone))
    assert find_hangs(job(), table([]), UP_TO_16, earlier) == ()


def stopped(rank: int, at_s: float, *, recorded_s: float, step: int = 17) -> RankExit:
    """Return a process that is lost, with times in s after the begin of step 17."""
    return lost(rank, 17 * 60 + at_s, step=step, recorded_s=17 * 60 + recorded_s)


def test_a_hung_job_that_is_stopped_has_hung_and_not_crashed() -> None:
    # GIVEN steps of a minute, and nothing recorded in the last 70 s, which no step lasts
    waiting = [stalled(rank) for rank in range(8) if rank != 5]
    hung = [stopped(rank, 71.0, recorded_s=1.0) for rank in range(8)]

    (finding,) = find_hangs(job(), table([]), UP_TO_16, context_of(*hung, events=waiting))
    assert finding.ranks == (5,)
    assert find_crashes(job(), context_of(*hung, events=waiting), UP_TO_16) == ()

    # The others have waited only since rank 5 died, or they went on after they had waited.
    died = context_of(stopped(5, 2.0, recorded_s=1.5), *hung[:5], *hung[6:], events=waiting)
    later = (stopped(rank, 800.0, recorded_s=799.0, step=30) for rank in range(8))
    went_on = context_of(*later, events=waiting)
    assert find_hangs(job(), table([]), UP_TO_16, died) == ()
    assert find_crashes(job(), died, UP_TO_16)[0].ranks == (5,)
    assert len(find_crashes(job(), went_on, UP_TO_16)) == 1


@pytest.mark.parametrize(("silent_s", "cause"), [(12.0, "hang"), (3.0, "crash")])
def test_a_job_that_is_stopped_hung_if_it_was_silent_for_many_usual_steps(
    silent_s: float, cause: str
) -> None:
    # GIVEN steps of one second
    steps = replace(UP_TO_16, start_ns=UP_TO_16.end_ns - SECOND)
    blocked = [replace(stalled(rank), kind="lost") for rank in range(8) if rank != 5]
    ends = [stopped(rank, silent_s, recorded_s=0.0) for rank in range(8)]
    context = context_of(*ends, events=blocked)

    found = (*find_hangs(job(), table([]), steps, context), *find_crashes(job(), context, steps))

    assert [finding.cause for finding in found] == [cause]


@pytest.mark.parametrize(("waited_s", "causes"), [(2.0, []), (30.0, ["hang"])])
def test_a_job_that_is_interrupted_while_it_works_neither_hung_nor_crashed(
    waited_s: float, causes: list[str]
) -> None:
    # GIVEN steps of one second, and Ctrl-C, which ends rank 5 in its own code
    steps = replace(UP_TO_16, start_ns=UP_TO_16.end_ns - SECOND)
    spans = table(comm(rank, flags=SpanFlag.ERROR) for rank in range(8) if rank != 5)
    at_s = 1.0 + waited_s
    interrupted = failed(5, at_s, "KeyboardInterrupt", step=17)
    context = context_of(
        interrupted, *(cut_off(rank, at_s + 0.1) for rank in range(8) if rank != 5)
    )

    found = (*find_hangs(job(), spans, steps, context), *find_crashes(job(), context, steps))

    assert [finding.cause for finding in found] == causes


def test_a_job_that_is_killed_while_a_rank_saves_a_checkpoint_did_not_hang() -> None:
    saving = event(0, "lost", step=17, open=[{"name": "save", "kind": "checkpoint"}])
    ends = [stopped(rank, 71.0, recorded_s=1.0) for rank in range(8)]

    (finding,) = find_crashes(job(), context_of(*ends, events=[saving]), UP_TO_16)

    assert finding.cause == "crash"
    assert find_hangs(job(), table([]), UP_TO_16, context_of(*ends, events=[saving])) == ()


def test_a_process_without_signs_of_life_may_have_been_frozen() -> None:
    # GIVEN rank 5, whose last sign is that of its last record, and others that lived 70 s longer
    blocked = [replace(stalled(rank), kind="lost") for rank in range(8) if rank != 5]
    ends = [stopped(rank, 1.0 if rank == 5 else 71.0, recorded_s=1.0) for rank in range(8)]
    not_watched = [replace(each, at_error_ns=SECOND) for each in ends]

    (hang,) = find_hangs(job(), table([]), UP_TO_16, context_of(*not_watched, events=blocked))
    (crash,) = find_crashes(job(), context_of(*ends, events=blocked), UP_TO_16)

    assert (hang.ranks, crash.ranks) == ((5,), (5,))


def test_a_hung_job_whose_communication_was_not_recorded_names_no_rank() -> None:
    hung = context_of(*(stopped(rank, 71.0, recorded_s=1.0) for rank in range(8)))

    (finding,) = find_hangs(job(), table([]), UP_TO_16, hung)

    assert (finding.ranks, finding.steps) == ((), (17, 17))
    assert finding.evidence == (
        "what the ranks were doing is unknown; all were silent for 70.0 s before the job was"
        " stopped"
    )


def test_a_silent_rank_that_was_lost_in_the_end_is_named_with_less_confidence() -> None:
    spans = table(comm(rank, flags=SpanFlag.ERROR) for rank in range(8) if rank != 5)
    context = context_of(lost(5), *(timed_out(rank) for rank in range(8) if rank != 5))

    (finding,) = find_hangs(job(), spans, UP_TO_16, context)

    assert finding.ranks == (5,)
    assert finding.confidence == pytest.approx(0.95 * 0.8)
    (with_drops,) = find_hangs(job(num_dropped=3), spans, UP_TO_16, context)
    assert with_drops.confidence == pytest.approx(0.95 * 0.8 * 0.8)


def untraced(*ranks: int) -> RunInfo:
    """Return the job of eight ranks without the records of some."""
    whole = job()
    traced = tuple(info for info in whole.epochs[0].ranks if info.rank not in ranks)
    return replace(whole, epochs=(EpochInfo(epoch=0, ranks=traced, groups=GROUPS),))


def test_of_several_ranks_that_were_not_traced_it_is_unknown_which_is_missing() -> None:
    spans = table(comm(rank) for rank in range(6))

    (finding,) = find_hangs(untraced(6, 7), spans, UP_TO_16, RunContext())
    # Before the first step has ended they are not untraced: they never joined.
    (at_start,) = find_hangs(untraced(6, 7), spans, steps_of(), RunContext())

    # Nor is one that was recorded, and waits for them in a communication that is not traced.
    (partner,) = find_hangs(
        untraced(7), table(comm(rank) for rank in range(5)), steps_of(), RunContext()
    )

    assert partner.ranks == (7,)
    assert finding.cause == "insufficient-evidence"
    assert "the communication of ranks 6 and 7 was not recorded" in finding.evidence
    assert (at_start.cause, at_start.ranks) == ("hang", (6, 7))


def test_the_only_rank_without_records_is_the_one_that_all_others_wait_for() -> None:
    spans = table(comm(rank) for rank in range(7))

    (finding,) = find_hangs(untraced(7), spans, UP_TO_16, RunContext())

    assert (finding.cause, finding.ranks) == ("hang", (7,))
    assert finding.confidence == pytest.approx(0.95 * 0.8)
    assert finding.evidence.endswith("it never joined, or is not traced")


def test_ranks_of_which_nothing_arrived_are_not_named_beside_one_that_is_silent() -> None:
    # GIVEN rank 5 and its host h1, which reports, and ranks 0 to 3 of h0, which does not
    reports = tuple(event(rank, "stack", step=17) for rank in (4, 5))
    inside = table(comm(rank) for rank in (4, 6, 7))

    (finding,) = find_hangs(job(), inside, UP_TO_16, RunContext(events=reports))
    # Without rank 5 among the silent, h0 is what the others wait for.
    entered = table(comm(rank) for rank in (4, 5, 6, 7))
    (dead,) = find_hangs(job(), entered, UP_TO_16, RunContext(events=reports))

    assert finding.ranks == (5,)
    assert finding.evidence.endswith("; nothing has arrived from 4 other ranks since")
    assert dead.ranks == (0, 1, 2, 3)


def test_of_several_hosts_without_records_none_is_named() -> None:
    run = run_of(12, groups=[replace(GROUPS[0], members=tuple(range(12)))])
    steps = steps_of(*((16, rank) for rank in range(12)))

    (finding,) = find_hangs(run, table(comm(rank) for rank in range(4)), steps, RunContext())

    assert (finding.cause, finding.ranks) == ("hang", ())
    assert "nothing has arrived since from ranks 4 to 11 on 2 hosts" in finding.evidence


def in_frames(rank: int, frame: str) -> EventRecord:
    return event(rank, "stack", step=17, threads=[{"name": "MainThread", "frames": [frame]}])


@pytest.mark.parametrize(
    "frame", ["torch/utils/data/dataloader.py:1284 _try_get_data", "torch/cuda/streams.py:224 f"]
)
def test_a_silent_rank_whose_stack_is_in_a_collective_waits_itself(frame: str) -> None:
    # GIVEN ranks 4 and 5, whose communication inside compute is not traced
    others = table(comm(rank) for rank in (0, 1, 2, 3, 6, 7))
    stacks = (
        in_frames(4, "/lib/site-packages/torch/distributed/distributed_c10d.py:2 all_reduce"),
        in_frames(5, f"/lib/site-packages/{frame}"),
    )

    (finding,) = find_hangs(job(), others, UP_TO_16, RunContext(events=stacks))

    assert finding.ranks == (5,)


@pytest.mark.parametrize(
    ("in_driver", "also_elsewhere", "ranks"),
    [((5,), (), (4, 5)), ((5, 6), (), (4,)), ((5,), (6,), (4, 6))],
)
def test_a_device_for_which_one_rank_alone_waits_may_be_what_fails(
    in_driver: tuple[int, ...], also_elsewhere: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    # GIVEN silent ranks: the stack of rank 4 is missing
    silent = {4, *in_driver, *also_elsewhere}
    others = table(comm(rank) for rank in range(8) if rank not in silent)
    driver, loader = "torch/cuda/streams.py:224 f", "torch/utils/data/dataloader.py:1284 f"
    stacks = [in_frames(rank, f"/lib/site-packages/{driver}") for rank in in_driver]
    stacks += [in_frames(rank, f"/lib/site-packages/{loader}") for rank in also_elsewhere]

    (finding,) = find_hangs(job(), others, UP_TO_16, RunContext(events=tuple(stacks)))

    assert finding.ranks == ranks


@pytest.mark.parametrize("has_called", [False, True])
def test_in_a_circle_alike_groups_show_whether_a_collective_belongs_there(
    *, has_called: bool
) -> None:
    # GIVEN rank 4 in a collective of its pair, and its partner in that of all, which needs rank 4
    alone = replace(comm(4, TP_HIGH, seq=3), kind=SpanKind.TP_COMM)
    others = [comm(rank) for rank in range(8) if rank != 4]
    of_alike = [
        replace(comm(rank, TP_LOW, seq=3, flags=SpanFlag.NOTHING), kind=SpanKind.TP_COMM)
        for rank in (0, 1)
    ]
    spans = table([alone, *others, *(of_alike if has_called else ())])

    (finding,) = find_hangs(job(), spans, UP_TO_16, RunContext())

    # THEN: it is one too many, or its partner has left it out
    assert finding.ranks == ((5,) if has_called else (4,))


def test_a_partner_that_is_alone_elsewhere_is_named_before_the_one_that_waits_for_it() -> None:
    # GIVEN rank 4 in a collective with rank 5 that is not traced, and rank 5 in a barrier
    run = with_partners(run_of(groups=(*GROUPS, WORLD)))
    waiting = in_frames(4, "/lib/site-packages/torch/distributed/distributed_c10d.py:2 all_reduce")
    spans = [entered(5, "barrier", group=6), *(comm(rank) for rank in (0, 1, 2, 3, 6, 7))]

    (finding,) = find_hangs(run, table(spans), UP_TO_16, RunContext(events=(waiting,)))

    assert finding.ranks == (5,)


@pytest.mark.parametrize(("saved_s", "ranks"), [(None, None), (5.0, None), (2.0, (5,))])
def test_a_save_that_lasts_ten_times_as_long_as_one_before_hangs(
    saved_s: float | None, ranks: tuple[int, ...] | None
) -> None:
    entry = {"kind": "checkpoint", "name": "save", "step": 17, "start_ns": 17 * 60 * SECOND}
    saving = event(5, "stalled", open=[entry], step=17)
    earlier = replace(
        comm(5, 0, seq=NONE, kind=SpanKind.CHECKPOINT, flags=SpanFlag.NOTHING),
        duration_ns=int((saved_s or 0) * SECOND),
    )
    spans = [comm(rank) for rank in range(8) if rank != 5] + ([earlier] if saved_s else [])

    found = find_hangs(job(), table(spans), UP_TO_16, RunContext(events=(saving,)))

    assert [finding.ranks for finding in found] == ([] if ranks is None else [ranks])


@pytest.mark.parametrize(
    ("unrecorded", "ranks"),
    [
        ((), (3,)),
        ((3,), ()),
        # All leave communication out by request, and still report where they are blocked.
        (tuple(range(8)), (3,)),
    ],
)
def test_a_rank_whose_capture_of_communication_failed_is_not_named(
    unrecorded: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    steps = steps_of(*((step, rank) for step in (15, 16) for rank in range(8)))
    masks = np.where(np.isin(steps.rank, unrecorded) & (steps.step == 16), DP_BIT, 0)
    with_masks = replace(steps, left_out=masks.astype(np.uint32))
    inside = span_table([comm(rank) for rank in range(8) if rank != 3])

    (finding,) = find_hangs(job(), inside, with_masks, RunContext())

    assert finding.ranks == ranks
    assert finding.cause == ("hang" if ranks else "insufficient-evidence")


def entered(
    rank: int, name: str, num_bytes: int = 4, *, group: int = DP, flags: SpanFlag = SpanFlag.ERROR
) -> Span:
    return replace(comm(rank, group, flags=flags), name=name, num_bytes=num_bytes)


BY_NAME = ["all_reduce", "barrier"] * 4


@pytest.mark.parametrize(
    ("spans", "ranks", "text"),
    [
        pytest.param(
            [entered(rank, "barrier" if rank == 1 else "all_reduce") for rank in range(8)],
            (1,),
            "rank 1 is in barrier 41 and ranks 0 and 2 to 7 are in all_reduce 41 of group dp, which"
            " all its ranks must call alike",
            id="another operation",
        ),
        pytest.param(
            [entered(0, "broadcast", 4, flags=SpanFlag.NOTHING)]
            + [entered(rank, "broadcast", 4096) for rank in range(1, 8)],
            (0,),
            "rank 0 is in broadcast 41 of 4 bytes and ranks 1 to 7 are in broadcast 41 of 4,096",
            id="another size, though it has left",
        ),
        pytest.param(
            [entered(rank, name) for rank, name in enumerate(BY_NAME)],
            (),
            "all its ranks must call alike; which of them is wrong is unknown",
            id="as many ranks in each operation",
        ),
        pytest.param(
            [entered(rank, "all_to_all_single", 100 + rank) for rank in range(8) if rank != 2],
            (2,),
            "rank 2 never entered all_to_all_single 41",
            id="uneven exchanges of all-to-all are alike",
        ),
    ],
)
def test_ranks_that_differ_from_most_in_one_communication_are_named(
    spans: list[Span], ranks: tuple[int, ...], text: str
) -> None:
    (finding,) = find_hangs(job(), table(spans), UP_TO_16, RunContext())

    assert finding.ranks == ranks
    assert finding.confidence == pytest.approx(0.95)
    assert text in finding.evidence


def test_of_two_unlike_ranks_the_one_that_differs_from_alike_groups_is_named() -> None:
    # GIVEN ranks 4 and 5 in unlike operations 41, and ranks 0 and 1 of the other group in an alike
    ops = [entered(5, "all_gather", group=TP_HIGH), entered(4, "all_reduce", group=TP_HIGH)]
    others = [entered(r, "all_reduce", group=TP_LOW, flags=SpanFlag.NOTHING) for r in (0, 1)]
    as_tp = [replace(each, kind=SpanKind.TP_COMM) for each in (*ops, *others)]

    (finding,) = find_hangs(job(), table(as_tp), UP_TO_16, RunContext())
    (unknown,) = find_hangs(job(), table(as_tp[:2]), UP_TO_16, RunContext())
    # Sizes are unknown as 0 in events, and as -1 in spans.
    sizes = (0, 0, NONE, NONE)
    sized = [replace(op, num_bytes=size) for op, size in zip(as_tp, sizes, strict=True)]
    (without_sizes,) = find_hangs(job(), table(sized), UP_TO_16, RunContext())

    assert (finding.ranks, unknown.ranks, without_sizes.ranks) == ((5,), (), (5,))


def test_a_rank_that_enters_a_collective_after_all_others_have_ended_is_the_odd_one() -> None:
    gone = [RankExit(epoch=0, rank=rank, state="ended", at_ns=9) for rank in range(8) if rank != 1]
    spans = table([entered(1, "barrier")])

    (finding,) = find_hangs(job(), spans, UP_TO_16, context_of(*gone, timed_out(1)))

    assert finding.ranks == (1,)
    assert finding.evidence == (
        "rank 1 is blocked in barrier 41 (dp-comm) of group dp with 8 ranks, and ranks 0 and 2 to 7"
        " ended without an error and never entered it: a collective too many"
    )


def test_of_one_rank_that_ended_and_one_that_waits_none_is_named() -> None:
    gone = RankExit(epoch=0, rank=0, state="ended", at_ns=9)

    (finding,) = find_hangs(job(), table([comm(1, TP_LOW)]), UP_TO_16, context_of(gone))

    assert finding.ranks == ()
    assert finding.evidence.endswith("which of them is wrong is unknown")


def test_of_a_circle_over_two_groups_of_the_same_ranks_the_odd_one_is_named() -> None:
    # GIVEN a barrier of another group with the same members, in which rank 3 alone is
    run = run_of(groups=(*GROUPS, WORLD))
    spans = table([entered(3, "barrier", group=6), *(comm(r) for r in range(8) if r != 3)])

    (finding,) = find_hangs(run, spans, UP_TO_16, RunContext())

    assert finding.ranks == (3,)
    assert finding.confidence == pytest.approx(0.95)


def test_a_collective_that_others_have_passed_does_not_hold_the_rank_that_launched_it() -> None:
    # GIVEN rank 2, which launched 41 on its device, and nothing since
    spans = [comm(rank) for rank in range(8)] + [comm(r, seq=42) for r in range(8) if r != 2]

    (finding,) = find_hangs(job(), table(spans), UP_TO_16, RunContext())

    assert finding.ranks == (2,)
    assert "never entered all_reduce 42" in finding.evidence

    # Nor does one of another group.
    pair = [comm(rank, TP_HIGH, seq=3) for rank in (4, 5)]
    others = [comm(rank) for rank in range(8) if rank != 5]
    (across,) = find_hangs(job(), table([*pair, *others]), UP_TO_16, RunContext())
    assert across.ranks == (5,)


def test_the_line_of_code_of_the_named_rank_is_that_of_its_last_stack() -> None:
    spans = table(comm(rank) for rank in range(8) if rank != 5)
    stacks = [
        replace(event(5, "stack", step=17), place="train.py:70 main"),
        replace(event(5, "stack", step=12), place="train.py:3 f"),
    ]

    (finding,) = find_hangs(job(), spans, UP_TO_16, RunContext(events=tuple(stacks)))

    assert finding.evidence.endswith("; rank 5 is at train.py:70 main")


RECORDED = GroupInfo(group_id=0x70, kind="dp-comm", name="default_pg 0", members=tuple(range(8)))
"""The same group as a flight recorder numbers it."""


def dump(rank: int, *, opened: int | None = 90) -> EventRecord:
    """Return the event of a dump in which a rank is in a collective of this number."""
    entry = {
        "name": "all_reduce", "kind": "dp-comm", "step": NONE, "start_ns": SECOND,
        "group_id": f"{RECORDED.group_id:016x}", "seq": opened,
    }  # fmt: skip
    calls = [] if opened is None else [entry]
    called = {f"{RECORDED.group_id:016x}": 89 if opened is None else opened}
    return event(rank, "flight-recorder", open=calls, called=called, has_dump=True)


def job_with_dumps() -> RunInfo:
    return run_of(groups=(*GROUPS, RECORDED))


def test_dumps_of_a_run_that_was_traced_are_further_evidence() -> None:
    spans = table(comm(rank) for rank in range(8) if rank != 5)
    dumps = tuple(dump(rank, opened=None if rank == 5 else 90) for rank in range(8))

    (finding,) = find_hangs(job_with_dumps(), spans, UP_TO_16, RunContext(events=dumps))

    assert (finding.ranks, finding.steps) == ((5,), (17, 17))
    assert finding.evidence == (
        "rank 5 never entered all_reduce 41 (dp-comm) of group dp with 8 ranks, in which ranks"
        " 0 to 4, 6 and 7 are blocked; the last step that it finished is 16; no communication is in"
        " flight in the dump of rank 5; rank 5 stopped at 89 of group default_pg 0, the others at"
        " 90; members are missing in 1 other communication"
    )


def test_a_run_of_which_the_tracer_saw_no_end_is_explained_by_its_dumps() -> None:
    dumps = tuple(dump(rank, opened=None if rank == 5 else 90) for rank in range(8))

    (finding,) = find_hangs(job_with_dumps(), table([]), UP_TO_16, RunContext(events=dumps))

    assert (finding.ranks, finding.steps) == ((5,), None)
    assert "rank 5 never entered all_reduce 90" in finding.evidence


def test_processes_that_were_lost_after_they_wrote_a_dump_had_hung() -> None:
    run = job_with_dumps()
    exits = [lost(rank, 10.0 + rank / 100) for rank in range(8)]
    dumps = [dump(rank, opened=None if rank == 5 else 90) for rank in range(8)]
    with_dumps, without = context_of(*exits, events=dumps), context_of(*exits)

    (hang,) = find_hangs(run, table([]), UP_TO_16, with_dumps)

    assert hang.ranks == (5,)
    assert not find_crashes(run, with_dumps, UP_TO_16)
    assert find_crashes(run, without, UP_TO_16)


def test_a_malformed_dump_is_no_evidence() -> None:
    spans = table(comm(rank) for rank in range(8) if rank != 5)
    wrong = event(
        0, "flight-recorder", open=4, ended=[3], queued={}, called={"x": "y"}, last=7, has_dump=True
    )

    (finding,) = find_hangs(job(), spans, UP_TO_16, RunContext(events=(wrong,)))

    assert finding.ranks == (5,)
