"""Transfers of pairs whose sender does not wait for its receiver, beside pairs in which it does."""

from __future__ import annotations

import numpy as np

from rankscope.analysis.readers.transfers import find_truncated
from rankscope.analysis.readers.waits import split_waits
from rankscope.tracer.span import Span, SpanKind, UnixNs
from tests.support.dashboard.builders import span_table

TRANSFER_NS = 100
LATE_NS = (-40, 30, 60, -20, 80, 45)
"""When the receive of each transfer is posted, after its send."""


def transfers(*, is_eager: bool, late_ns: tuple[int, ...] = LATE_NS) -> list[Span]:
    """Return the sends and receives of a pair; the link varies by 1 %."""
    spans = []
    for seq, late in enumerate(late_ns):
        sent = 10_000 * (seq + 1)
        begin = sent if is_eager else sent + max(late, 0)
        end = begin + TRANSFER_NS + seq % 2
        for rank, kind, start in ((0, SpanKind.PP_SEND, sent), (1, SpanKind.PP_RECV, sent + late)):
            spans.append(
                Span(
                    rank=rank,
                    step=0,
                    kind=kind,
                    name=kind.value,
                    start_ns=UnixNs(start),
                    duration_ns=end - start,
                    group_id=9,
                    seq=seq,
                    src_rank=0,
                    dst_rank=1,
                )
            )
    return spans


def truncated(spans: list[Span]) -> list[int]:
    """Return the numbers of the transfers whose begin was not seen."""
    table = span_table(spans)
    split = split_waits(table, [], clock_error_ns=0)
    found = find_truncated(table, split, np.arange(len(table)))
    return sorted(table.seq[found].tolist())


def test_receives_posted_in_mid_transfer_have_no_known_transfer() -> None:
    # THEN transfers 0 and 3, whose receive waited, are known from their begin
    assert truncated(transfers(is_eager=True)) == [1, 1, 2, 2, 4, 4, 5, 5]


def test_senders_that_wait_for_their_receivers_have_known_transfers() -> None:
    assert truncated(transfers(is_eager=False)) == []


def test_with_equally_late_receivers_it_is_unknown_whether_senders_wait() -> None:
    for is_eager in (True, False):
        assert truncated(transfers(is_eager=is_eager, late_ns=(50,) * 6)) == []


def test_three_transfers_do_not_show_whether_senders_wait() -> None:
    assert truncated(transfers(is_eager=True, late_ns=(-40, 30, 60))) == []
