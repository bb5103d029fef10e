"""Where on the device's clock a communication was launched."""

from __future__ import annotations

import numpy as np

from rankscope.analysis.readers.tracer.matched_waits import MatchedWaits, match_waits
from rankscope.analysis.readers.tracer.reader import read_traced
from rankscope.analysis.readers.waits import split_waits
from rankscope.analysis.trace.tables import (
    EpochInfo,
    GroupInfo,
    RankInfo,
    RunInfo,
    SpanTable,
    StepTable,
)
from rankscope.tracer.span import KIND_CODES, NONE, SpanFlag, SpanKind
from rankscope.tracer.topology import Coords, Layout

ON_DEVICE = SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN
MS = 1_000_000
GROUP = 7
DP = GroupInfo(group_id=GROUP, kind="dp-comm", name="dp", members=(0,))

Row = tuple[SpanKind, int, int, int, int]
"""Kind, start, end, host's launch (all ms), seq."""


def tables(*rows: Row, bounds: tuple[int, ...] = ()) -> tuple[SpanTable, StepTable]:
    """Return one rank's spans and its one step.

    Args:
        rows: Of its one group, too.
        bounds: Communications (seq) whose end is only a bound.
    """
    num = len(rows)
    kind, start, end, launch, seq = (list(column) for column in zip(*rows, strict=True))
    is_comm = np.array([seq != NONE for seq in seq])

    def filled(value: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.full(num, value, dtype=np.int32)

    spans = SpanTable(
        epoch=filled(0),
        step=filled(0),
        rank=filled(0),
        kind=np.array([KIND_CODES[each] for each in kind], dtype=np.int8),
        name=filled(0),
        track=is_comm.astype(np.int32),
        start_ns=np.array(start, dtype=np.int64) * MS,
        duration_ns=np.array(np.subtract(end, start), dtype=np.int64) * MS,
        launch_ns=np.array(launch, dtype=np.int64) * MS,
        group_id=np.where(is_comm, GROUP, 0).astype(np.uint64),
        seq=np.array(seq, dtype=np.int64),
        src_rank=filled(NONE),
        dst_rank=filled(NONE),
        microbatch=filled(NONE),
        chunk=filled(NONE),
        num_bytes=np.full(num, NONE, dtype=np.int64),
        interval_id=np.zeros(num, dtype=np.int64),
        flags=np.array([_flags(each, is_bound=each in bounds) for each in seq], dtype=np.uint16),
        depth=np.zeros(num, dtype=np.int16),
        names=("",),
        tracks=("compute", "comm"),
    )
    steps = StepTable(
        epoch=np.zeros(1, dtype=np.int32),
        step=np.zeros(1, dtype=np.int32),
        rank=np.zeros(1, dtype=np.int32),
        start_ns=np.zeros(1, dtype=np.int64),
        end_ns=np.full(1, 100 * MS),
        num_tokens=np.full(1, NONE, dtype=np.int64),
        loss=np.full(1, np.nan),
        left_out=np.zeros(1, dtype=np.uint32),
    )
    return spans, steps


def _flags(seq: int, *, is_bound: bool) -> int:
    if seq == NONE:
        return int(ON_DEVICE)
    end = SpanFlag.END_BOUND if is_bound else SpanFlag.DEVICE_END_KNOWN
    return int(SpanFlag.DEVICE_BEGIN_KNOWN | end | SpanFlag.ASYNC)


def joined(*rows: Row) -> MatchedWaits:
    """Join one rank's spans, all of step 0 and its one group."""
    spans, steps = tables(*rows)
    split = split_waits(spans, [DP], clock_error_ns=0)
    return match_waits(spans, steps, np.zeros(1, dtype=np.int32), split)[0]


def launches_ms(found: MatchedWaits) -> list[int]:
    order = np.argsort(found.spans.seq[found.comm])
    return [int(at) // MS for at in found.line.time_at(found.launch)[order]]


def test_an_idle_stream_begins_what_it_is_given_at_once() -> None:
    # GIVEN a host that issues a backward of 40 ms and two reductions within 3 ms, the device
    # coming to the reductions after 20 and 40 ms, each over before the next
    found = joined(
        (SpanKind.BACKWARD, 10, 50, 1, NONE),
        (SpanKind.DP_COMM, 30, 36, 2, 0),
        (SpanKind.DP_COMM, 50, 56, 3, 1),
    )

    # THEN they were launched where they began, not 1 and 2 ms into the backward
    assert launches_ms(found) == [30, 50]


def test_a_queued_communication_was_launched_between_its_neighbours() -> None:
    # GIVEN a reduction that begins as the one before on its stream ends, issued by the host
    # halfway between that one and the next backward
    found = joined(
        (SpanKind.BACKWARD, 10, 40, 1, NONE),
        (SpanKind.DP_COMM, 20, 38, 2, 0),
        (SpanKind.DP_COMM, 38, 50, 4, 1),
        (SpanKind.BACKWARD, 40, 70, 6, NONE),
    )

    # THEN the device came to it halfway between the two: at (20 + 40) / 2
    assert launches_ms(found) == [20, 30]


def test_a_queued_communication_was_launched_before_it_began() -> None:
    # GIVEN one that queued, and nothing known that was issued after it
    found = joined(
        (SpanKind.BACKWARD, 10, 40, 1, NONE),
        (SpanKind.DP_COMM, 20, 22, 2, 0),
        (SpanKind.DP_COMM, 22, 30, 9, 1),
    )

    # THEN the device came to it as much later than to the one before as the host did, 27, but
    # not after it began
    assert launches_ms(found) == [20, 22]


def test_what_nobody_waited_for_took_as_long_as_alike_ones_or_less() -> None:
    # GIVEN four reductions: one known to take 6 ms, two hidden ones that had ended after 30 ms
    # and after 4 ms at the latest, and one known to take 8 ms
    spans, steps = tables(
        (SpanKind.BACKWARD, 0, 90, 0, NONE),
        (SpanKind.DP_COMM, 1, 7, 0, 0),
        (SpanKind.DP_COMM, 10, 40, 0, 1),
        (SpanKind.DP_COMM, 50, 54, 0, 2),
        (SpanKind.DP_COMM, 60, 68, 0, 3),
        bounds=(1, 2),
    )
    ranks = (RankInfo(rank=0, coords=Coords()),)
    run = RunInfo(
        run_id="run",
        source_format="rankscope",
        layout=Layout(),
        world_size=1,
        clock_error_ns=0,
        epochs=(EpochInfo(epoch=0, ranks=ranks, groups=(DP,)),),
    )

    model = read_traced(run, spans, steps).model

    # THEN the first hidden one took the known ones' median, 7, the second no more than its bound
    comm = np.array([model.kinds[kind] == "dp-comm" for kind in model.kind])
    assert (model.operations.duration_ns[comm] / MS).tolist() == [6.0, 7.0, 4.0, 8.0]
