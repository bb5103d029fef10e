"""One step of one run: the spans of all ranks, with wait and transfer of their communication."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, NONE, SpanFlag, SpanKind

from ..arrays.grouping import row_keys
from ..readers.clocks import align_clocks
from ..readers.formats import split_run_waits
from ..readers.waits import instance_keys, is_communication
from ..trace.errors import EmptyRunError
from ..trace.rows import concatenate, make_span_table, select_rows
from ..trace.tables import format_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from numpy.typing import NDArray

    from rankscope.tracer.topology import Coords

    from ..readers.waits import Arrivals
    from ..trace.context import EventRecord
    from ..trace.tables import RunInfo, RunSummary, SpanSource, SpanTable
    from .raster import Viewport


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """One step, or some of its spans; the arrays have an entry for each row of ``spans``."""

    run: str
    epoch: int
    step: int
    begin_ns: int
    """Start of the step's first span, Unix time; times are drawn relative to it."""

    end_ns: int
    """End of the step's last span."""

    spans: SpanTable
    wait_ns: NDArray[np.int64]
    """Shape (spans,): own start to the last arrival; -1 if the span is no communication or a
    member of its instance is missing."""

    transfer_ns: NDArray[np.int64]
    """Shape (spans,): the last arrival to the own end; meaningless if ``wait_ns`` is -1."""

    last_rank: NDArray[np.int32]
    """Shape (spans,): the member that arrived last; -1 if ``wait_ns`` is. Of a ``wait`` it is that
    of its communication."""

    blocked_ns: NDArray[np.int64]
    """Shape (spans,): of a ``wait``, own start to the last arrival of its communication, whose
    transfer it then waits for; -1 if that is unknown, or the span is no ``wait``."""

    transfer_kind: NDArray[np.int8]
    """Shape (spans,): of a ``wait``, the kind of its communication; -1 if ``blocked_ns`` is."""

    coords: dict[int, Coords]
    """Positions of the ranks; empty if the run declared no layout."""

    hosts: dict[int, str] = field(default_factory=dict)
    """Hosts of the ranks, as far as they are known."""

    ranking: tuple[int, ...] = ()
    """Ranks by their excess, the largest first; empty if it is unknown."""

    sections: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Groups of that order by name, from the top; empty if it has none."""

    @property
    def communication(self) -> NDArray[np.bool_]:
        """Shape (spans,): communication, by the span's kind or by its inferred group."""
        found: NDArray[np.bool_] = is_communication(self.spans) | (self.wait_ns >= 0)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewportSpans:
    """The spans of a picture's viewport."""

    found: StepTimeline | None = None
    """None: they are not read, are too many, or none are stored."""

    is_pending: bool = False
    """Whether they are being read."""


NO_SPANS = ViewportSpans()


def cut_timeline(
    timeline: StepTimeline, viewport: Viewport, ranks: Collection[int]
) -> StepTimeline:
    """Return the spans of some ranks that touch a viewport; begin and end are the whole step's."""
    spans = timeline.spans
    begin_ns = timeline.begin_ns + viewport.begin_ns
    end_ns = timeline.begin_ns + viewport.end_ns
    rows = np.flatnonzero(
        (spans.start_ns < end_ns)
        & (spans.start_ns + spans.duration_ns > begin_ns)
        & np.isin(spans.rank, list(ranks))
    )
    return _select(timeline, rows)


def select_ranks(timeline: StepTimeline, ranks: Collection[int]) -> StepTimeline:
    """Return the spans of some ranks; begin and end are the whole step's."""
    rows = np.flatnonzero(np.isin(timeline.spans.rank, list(ranks)))
    return _select(timeline, rows)


def _select(timeline: StepTimeline, rows: NDArray[np.intp]) -> StepTimeline:
    return replace(
        timeline,
        spans=select_rows(timeline.spans, rows),
        wait_ns=timeline.wait_ns[rows],
        transfer_ns=timeline.transfer_ns[rows],
        last_rank=timeline.last_rank[rows],
        blocked_ns=timeline.blocked_ns[rows],
        transfer_kind=timeline.transfer_kind[rows],
    )


def read_timeline(  # noqa: PLR0913  # the step, and what is known of a live one
    source: SpanSource,
    run_id: str,
    *,
    epoch: int,
    step: int,
    info: RunInfo | None = None,
    events: Iterable[EventRecord] = (),
    now_ns: int | None = None,
) -> StepTimeline:
    """Read one step of one epoch and split its communication.

    Args:
        info: The run's description; None: it is read.
        events: Events of the run: what a hung rank is in is no span yet, but in its last event.
        now_ns: Unix time until which a span that has not ended lasts; None: until the last event.

    Raises:
        UnknownRunError: The source holds no such run.
        EmptyRunError: The run has no spans of this step in this epoch.
    """
    info = source.run_info(run_id) if info is None else info
    table = source.spans(run_id, first=step, last=step)
    spans = select_rows(table, (table.epoch == epoch) & (table.step == step))
    open_spans = find_open_spans(spans, events, epoch=epoch, step=step, now_ns=now_ns)
    if open_spans is not None:
        spans = concatenate(spans, open_spans)
    if not len(spans):
        raise empty_step_error(run_id, epoch=epoch, step=step)
    return make_timeline(info, spans, epoch=epoch, step=step)


def find_open_spans(
    spans: SpanTable,
    events: Iterable[EventRecord],
    *,
    epoch: int,
    step: int,
    now_ns: int | None = None,
) -> SpanTable | None:
    """Return the spans of a step that its ranks have begun and not ended, as spans until now.

    They are in the last event ``stalled`` or ``lost`` of each rank. One that has ended since, and
    so is among ``spans``, and one that is malformed are left out. None if there are none.
    """
    latest = {
        event.rank: event
        for event in events
        if event.epoch == epoch and event.kind in ("stalled", "lost")
    }
    ended = set(zip(spans.rank.tolist(), spans.kind.tolist(), spans.start_ns.tolist(), strict=True))
    rows: list[tuple[int, int, int, int, str, int, int]] = []
    for event in latest.values():
        for entry in event.open_spans:
            try:
                kind, start_ns = KIND_CODES[SpanKind(entry["kind"])], int(entry["start_ns"])
                group_id, seq = int(entry["group_id"], 16), int(entry["seq"])
                name, of_step = str(entry["name"]), int(entry["step"])
            except (KeyError, TypeError, ValueError):
                continue
            until_ns = event.at_ns if now_ns is None else now_ns
            is_valid = 0 <= start_ns <= until_ns and 0 <= group_id < 1 << 64 and abs(seq) < 1 << 63
            is_shown = is_valid and of_step == step and (event.rank, kind, start_ns) not in ended
            if is_shown:
                duration_ns = until_ns - start_ns
                rows.append((event.rank, kind, start_ns, duration_ns, name, group_id, seq))
    if not rows:
        return None
    rank, kinds, start, duration, names, group_ids, seqs = zip(*rows, strict=True)
    texts = tuple(sorted(set(names)))
    num = len(rows)
    return make_span_table(
        epoch=np.full(num, epoch, np.int32),
        step=np.full(num, step, np.int32),
        rank=np.array(rank, np.int32),
        kind=np.array(kinds, np.int8),
        name=np.array([texts.index(name) for name in names], np.int32),
        track=np.zeros(num, np.int32),
        start_ns=np.array(start, np.int64),
        duration_ns=np.array(duration, np.int64),
        group_id=np.array(group_ids, np.uint64),
        seq=np.array(seqs, np.int64),
        flags=np.full(num, int(SpanFlag.OPEN), np.uint16),
        names=texts,
        tracks=("open",),
    )


def find_blocked(
    spans: SpanTable, wait_ns: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return how long each ``wait`` lasts until its communication's last member arrives.

    Args:
        spans: Spans of one step.
        wait_ns: Shape (spans,): of each communication, as of `split_run_waits`.

    Returns:
        Shape (spans,) each: that time, at most the wait's duration, and the row of the
        communication; -1 if one is unknown, or the span is no ``wait``.
    """
    blocked_ns, found = np.full((2, len(spans)), NONE, dtype=np.int64)
    is_wait = (spans.kind == KIND_CODES[SpanKind.WAIT]) & (spans.group_id != 0)
    waits, comm = np.flatnonzero(is_wait & (spans.seq != NONE)), np.flatnonzero(wait_ns >= 0)
    if not len(waits) or not len(comm):
        return blocked_ns, found
    rows = np.concatenate((comm, waits))
    key = row_keys(instance_keys(spans, rows), spans.rank[rows])
    of_comm, of_wait = key[: len(comm)], key[len(comm) :]
    order = np.argsort(of_comm, kind="stable")
    index = order[np.minimum(np.searchsorted(of_comm[order], of_wait), len(comm) - 1)]
    is_known = of_comm[index] == of_wait
    waits, comm = waits[is_known], comm[index[is_known]]
    until_ns = spans.start_ns[comm] + wait_ns[comm] - spans.start_ns[waits]
    blocked_ns[waits], found[waits] = np.clip(until_ns, 0, spans.duration_ns[waits]), comm
    return blocked_ns, found


def empty_step_error(run_id: str, *, epoch: int, step: int) -> EmptyRunError:
    """Return the error of a step without spans."""
    return EmptyRunError(
        f"run {run_id!r} has no spans of step {step} in epoch {epoch}:"
        " none has arrived yet, or they are no longer stored"
    )


def records_groups(info: RunInfo | RunSummary) -> bool:
    """Return whether the run's format records process groups.

    Without them the instances are inferred from all spans of a step, so it must be read whole.
    """
    return format_of(info).has_groups


def make_timeline(
    info: RunInfo,
    spans: SpanTable,
    *,
    epoch: int,
    step: int,
    arrivals: Arrivals | None = None,
    bounds_ns: tuple[int, int] | None = None,
) -> StepTimeline:
    """Split the communication of a step.

    Args:
        spans: Spans of the step, at least one.
        arrivals: The last arrivals of the communication instances over all spans of the step, if
            ``spans`` are only some of them; the run's format must record groups.
        bounds_ns: Begin and end of the whole step, Unix time; None: those of ``spans``.
    """
    if records_groups(info) and arrivals is None and info.clock_error_ns is None:
        spans = align_clocks(info, spans).align(spans)
    if bounds_ns is None:
        bounds_ns = int(spans.start_ns.min()), int((spans.start_ns + spans.duration_ns).max())
    of_epoch = replace(info, epochs=tuple(one for one in info.epochs if one.epoch == epoch))
    split = split_run_waits(of_epoch, spans, arrivals=arrivals)
    blocked_ns, comm = find_blocked(spans, split.wait_ns)
    is_known = comm != NONE
    ranks = [rank for one in of_epoch.epochs if info.has_layout for rank in one.ranks]
    return StepTimeline(
        run=info.run_id,
        epoch=epoch,
        step=step,
        begin_ns=bounds_ns[0],
        end_ns=bounds_ns[1],
        spans=spans,
        wait_ns=split.wait_ns,
        transfer_ns=split.transfer_ns,
        last_rank=np.where(is_known, split.last_rank[comm], split.last_rank),
        blocked_ns=blocked_ns,
        transfer_kind=np.where(is_known, spans.kind[comm], NONE).astype(np.int8),
        coords={rank.rank: rank.coords for rank in ranks},
        hosts={one.rank: one.host for epoch in of_epoch.epochs for one in epoch.ranks if one.host},
    )
