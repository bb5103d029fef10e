"""A selected span and its relations; a box of spans against the rest; spans that match a text."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rankscope.analysis.drawing.selection import (
    Arrow,
    ProofSpan,
    SpanPlace,
    compare_box,
    compare_proof,
    describe_span,
    find_alike,
    find_rank_stops,
    find_ranks,
    find_span,
    find_spans,
    frame_stop,
)
from rankscope.analysis.drawing.timeline import read_timeline, select_ranks
from rankscope.analysis.report.report import Proof
from rankscope.tracer.span import KINDS, SpanFlag, SpanKind
from tests.support.dashboard.step_builder import comm, compute, step_of
from tests.support.dashboard.training_builder import training_provider

STEP = read_timeline(training_provider(), "demo-42", epoch=0, step=3)


def rows_of(kind: str, rank: int) -> list[int]:
    spans = STEP.spans
    kinds = np.array([one.value for one in KINDS])[spans.kind]
    return np.flatnonzero((kinds == kind) & (spans.rank == rank)).tolist()


def test_a_communication_names_whom_it_waited_for_and_the_last_member_whom_it_delayed() -> None:
    waits = [row for row in rows_of("dp-comm", 7) if STEP.wait_ns[row] > 0]
    row = max(waits, key=lambda one: int(STEP.wait_ns[one]))

    waiting = describe_span(STEP, row)

    last = int(STEP.last_rank[row])
    assert waiting.waited_for == last
    at_ns = waiting.begin_ns + int(STEP.wait_ns[row])
    assert waiting.arrows == (Arrow(from_rank=last, from_ns=at_ns, to_rank=7, to_ns=at_ns),)
    assert waiting.members[-1].rank == last
    assert waiting.before in {"forward", "backward"}
    (culprit,) = [
        one
        for one in rows_of("dp-comm", last)
        if STEP.spans.seq[one] == STEP.spans.seq[row]
        and STEP.spans.group_id[one] == STEP.spans.group_id[row]
    ]
    assert 7 in describe_span(STEP, culprit).delayed


def test_a_communication_whose_last_member_is_missing_lists_those_that_arrived() -> None:
    waits = [row for row in rows_of("dp-comm", 7) if STEP.wait_ns[row] > 0]
    whole = describe_span(STEP, waits[0])
    last = int(STEP.last_rank[waits[0]])
    step = select_ranks(STEP, {one.rank for one in whole.members} - {last})
    step = replace(step, wait_ns=np.full_like(step.wait_ns, -1))
    (row,) = np.flatnonzero(
        (step.spans.start_ns == STEP.spans.start_ns[waits[0]])
        & (step.spans.rank == 7)
        & step.communication
    )

    found = describe_span(step, int(row))

    assert (found.wait_ns, found.waited_for) == (None, None)
    assert found.members == whole.members[:-1]


def test_a_box_says_what_its_spans_share_and_the_rest_does_not() -> None:
    of_rank = STEP.spans.rank == 5

    found = compare_box(STEP, of_rank)

    assert (found[0].name, found[0].value) == ("rank", "5")
    assert (found[0].inside_ratio, found[0].outside_ratio) == (1.0, 0.0)
    assert compare_box(STEP, np.zeros(len(STEP.spans), np.bool_)) == ()


def test_a_text_finds_spans_of_a_rank_a_kind_or_a_name() -> None:
    by_rank, num_of_rank = find_spans(STEP, "Rank 5", most=3)
    by_kind, num_of_kind = find_spans(STEP, "BACK", most=1000)

    assert set(STEP.spans.rank[by_rank].tolist()) == {5}
    assert len(by_rank) == 3 < num_of_rank
    assert {KINDS[code].value for code in STEP.spans.kind[by_kind].tolist()} == {"backward"}
    assert num_of_kind == len(by_kind)
    durations = STEP.spans.duration_ns[by_kind].tolist()
    assert durations == sorted(durations, reverse=True)
    assert find_spans(STEP, "no such thing", most=3)[1] == 0


def test_a_text_names_a_rank_by_number_or_the_ranks_of_a_host() -> None:
    step = replace(STEP, hosts={0: "node-a", 1: "node-b", 2: "node-b"})

    texts = ("rank 7", "007", "NODE-B", "", "9" * 30)
    found = {text: find_ranks(step, text) for text in texts}

    assert found == {"rank 7": (7,), "007": (7,), "NODE-B": (1, 2), "": (), "9" * 30: ()}


def test_a_place_names_the_innermost_span_at_its_time_and_alike_ones_do_the_same_work() -> None:
    # GIVEN a forward of 100 on rank 0 with one of 20 within, and forwards of 30 and 40 on rank 1
    step = step_of(compute(0, 0, 100), compute(0, 40, 60), compute(1, 0, 30), compute(1, 30, 70))
    forward = SpanPlace(rank=0, kind=SpanKind.FORWARD, at_ns=45)

    inner, outer = find_span(step, forward), find_span(step, replace(forward, at_ns=39))

    assert inner is not None
    assert outer is not None
    assert [int(step.spans.duration_ns[row]) for row in (inner, outer)] == [20, 100]
    assert find_span(step, replace(forward, at_ns=100)) is None
    assert find_span(step, replace(forward, kind=SpanKind.OPTIMIZER)) is None
    alike = [(one.rank, one.begin_ns, one.duration_ns) for one in find_alike(step, inner)]
    assert alike == [(0, 0, 100), (1, 30, 40), (1, 0, 30), (0, 40, 20)]
    # AND a proof is held against those of other ranks
    proof = Proof(epoch=0, step=3, rank=0, begin_ns=0, end_ns=100, excess_ns=60)
    assert compare_proof(step, proof, (0,)) == ProofSpan(
        kind="forward", duration_ns=100, num_alike=2, median_ns=35
    )
    assert compare_proof(step, replace(proof, begin_ns=7), (0,)) is None


def test_a_rank_stops_at_the_end_of_its_last_span_or_where_it_began_what_never_ended() -> None:
    # GIVEN rank 0 that ends a forward at 30, and rank 1 that is in an all-reduce from 20 on
    step = step_of(
        compute(0, 0, 30),
        replace(comm(1, 20, 90), flags=SpanFlag.OPEN),
        compute(1, 20, 90, SpanKind.WAIT),
    )

    assert find_rank_stops(step, (0, 1, 5)) == {0: 30, 1: 20}
    # AND the view begins before the first culprit stopped, and ends after the last rank did
    frame = frame_stop(80, 30)
    assert (frame.begin_ns, frame.end_ns) == (15, 101)
    assert frame_stop(80).begin_ns == 0
