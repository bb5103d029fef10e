"""Which rank stands in which communication that it has not left."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.tracer.span import KIND_CODES, KINDS, NONE, SpanFlag, SpanKind

from ..readers.waits import is_p2p

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from ..trace.context import EventRecord, RunContext
    from ..trace.tables import SpanTable, StepTable

P2P = frozenset({SpanKind.PP_SEND, SpanKind.PP_RECV})
P2P_NAMES = frozenset({"send", "recv", "recv_any_source"})
"""What torch calls them; inside a group of another axis they have that axis's kind."""

UNFINISHED = int(SpanFlag.OPEN | SpanFlag.ERROR)

Instance = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One rank inside a communication that it has not left."""

    rank: int
    group_id: int
    seq: int
    kind: str
    name: str
    step: int
    src_rank: int = NONE
    """Of a p2p; `NONE` where it is a collective, or nobody told."""

    dst_rank: int = NONE

    @property
    def is_p2p(self) -> bool:
        """Whether it has two sides; which they are may not be known."""
        told = NONE not in (self.src_rank, self.dst_rank)
        return told or self.kind in P2P or self.name in P2P_NAMES

    @property
    def instance(self) -> Instance:
        """What all members of one communication share."""
        return self.group_id, self.seq, self.src_rank, self.dst_rank


def standing_ranks(
    epoch: int, spans: SpanTable, steps: StepTable, context: RunContext
) -> tuple[Standing, ...]:
    """Return each communication that a rank has not left, each once."""
    found = {(one.rank, one.instance): one for one in _of_spans(epoch, spans)}
    rows = steps.epoch == epoch
    done = dict(zip(steps.rank[rows].tolist(), steps.step[rows].tolist(), strict=True))
    for event in _latest_events(epoch, context).values():
        for one in _of_event(event):
            if one.step > done.get(one.rank, NONE):
                found.setdefault((one.rank, one.instance), one)
    return tuple(found.values())


def open_work(epoch: int, context: RunContext) -> Mapping[int, tuple[str, ...]]:
    """Return the kinds of what each rank that told had begun and not ended."""
    return {
        rank: tuple(sorted({str(entry.get("kind", "")) for entry in _open_entries(event)}))
        for rank, event in _latest_events(epoch, context).items()
    }


def _latest_events(epoch: int, context: RunContext) -> Mapping[int, EventRecord]:
    """Return the last event of each rank that tells what it stood in."""
    return {
        event.rank: event
        for event in context.events
        if event.epoch == epoch and event.kind in ("stalled", "lost")
    }


def _of_spans(epoch: int, spans: SpanTable) -> Iterable[Standing]:
    unfinished = (spans.flags & UNFINISHED) != 0
    is_wait = spans.kind == KIND_CODES[SpanKind.WAIT]
    chosen = (spans.epoch == epoch) & (spans.group_id != 0) & unfinished & ~is_wait
    rows = np.flatnonzero(chosen)
    for row, instance in zip(rows.tolist(), _instances(spans, rows), strict=True):
        group_id, seq, src_rank, dst_rank = instance
        yield Standing(
            rank=int(spans.rank[row]),
            group_id=group_id,
            seq=seq,
            src_rank=src_rank,
            dst_rank=dst_rank,
            kind=KINDS[spans.kind[row]].value,
            name=spans.names[spans.name[row]],
            step=int(spans.step[row]),
        )


def _instances(spans: SpanTable, rows: NDArray[np.int64]) -> list[Instance]:
    """Return what communication each of these rows is part of."""
    pair = is_p2p(spans)[rows]
    columns = (
        spans.group_id[rows],
        spans.seq[rows],
        np.where(pair, spans.src_rank[rows], NONE),
        np.where(pair, spans.dst_rank[rows], NONE),
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _of_event(event: EventRecord) -> Iterable[Standing]:
    """Yield the open communications that an event tells; what is malformed is passed over."""
    for entry in _open_entries(event):
        try:
            group_id, seq, step = int(entry["group_id"], 16), int(entry["seq"]), int(entry["step"])
        except (KeyError, TypeError, ValueError):
            continue
        if group_id and seq >= 0:
            yield Standing(
                rank=event.rank,
                group_id=group_id,
                seq=seq,
                kind=str(entry.get("kind", "")),
                name=str(entry.get("name", "")),
                step=step,
            )


def _open_entries(event: EventRecord) -> list[dict[str, Any]]:
    told: Any = event.data.get("open")
    return [entry for entry in told if isinstance(entry, dict)] if isinstance(told, list) else []


def entered_ranks(
    epoch: int, spans: SpanTable, standing: Iterable[Standing]
) -> Mapping[Instance, set[int]]:
    """Return who has a span of each communication in which somebody stands."""
    wanted = {one.instance for one in standing}
    groups = np.array(sorted({instance[0] for instance in wanted}), dtype=np.uint64)
    seqs = np.array(sorted({instance[1] for instance in wanted}), dtype=np.int64)
    is_wait = spans.kind == KIND_CODES[SpanKind.WAIT]
    chosen = (spans.epoch == epoch) & np.isin(spans.seq, seqs) & np.isin(spans.group_id, groups)
    rows = np.flatnonzero(chosen & ~is_wait)
    found: dict[Instance, set[int]] = defaultdict(set)
    for instance, rank in zip(_instances(spans, rows), spans.rank[rows].tolist(), strict=True):
        found[instance].add(rank)
    return found
