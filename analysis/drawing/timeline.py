"""One step of one run: the spans of all ranks, with wait and transfer of their communication."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..readers.bytedance.reader import split_bytedance_waits
from ..readers.waits import is_communication, split_traced_waits
from ..trace.errors import EmptyRunError
from ..trace.rows import select_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rankscope.tracer.topology import Coords

    from ..readers.waits import Arrivals
    from ..trace.tables import RunInfo, RunSummary, SpanSource, SpanTable
    from .raster import StepPicture

_BYTEDANCE = "bytedance"


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
    """Shape (spans,): the member that arrived last; -1 if ``wait_ns`` is."""

    coords: dict[int, Coords]
    """Positions of the ranks; empty if the run declared no layout."""

    @property
    def communication(self) -> NDArray[np.bool_]:
        """Shape (spans,): communication, by the span's kind or by its inferred group."""
        found: NDArray[np.bool_] = is_communication(self.spans) | (self.wait_ns >= 0)
        return found


def cut_timeline(timeline: StepTimeline, picture: StepPicture) -> StepTimeline:
    """Return the spans that a picture's viewport touches; begin and end are the whole step's."""
    if picture.viewport is None:
        return timeline
    spans = timeline.spans
    begin_ns = timeline.begin_ns + picture.viewport.begin_ns
    end_ns = timeline.begin_ns + picture.viewport.end_ns
    rows = np.flatnonzero(
        (spans.start_ns < end_ns)
        & (spans.start_ns + spans.duration_ns > begin_ns)
        & np.isin(spans.rank, picture.ranks)
    )
    return replace(
        timeline,
        spans=select_rows(spans, rows),
        wait_ns=timeline.wait_ns[rows],
        transfer_ns=timeline.transfer_ns[rows],
        last_rank=timeline.last_rank[rows],
    )


def read_timeline(source: SpanSource, run_id: str, *, epoch: int, step: int) -> StepTimeline:
    """Read one step of one epoch and split its communication.

    Raises:
        UnknownRunError: The source holds no such run.
        EmptyRunError: The run has no spans of this step in this epoch.
    """
    info = source.run_info(run_id)
    table = source.spans(run_id, first=step, last=step)
    spans = select_rows(table, (table.epoch == epoch) & (table.step == step))
    if not len(spans):
        raise empty_step_error(run_id, epoch=epoch, step=step)
    return make_timeline(info, spans, epoch=epoch, step=step)


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
    return info.source_format != _BYTEDANCE


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
        info: The run.
        spans: Spans of the step, at least one.
        epoch: Their epoch.
        step: Their step.
        arrivals: The last arrivals of the communication instances over all spans of the step, if
            ``spans`` are only some of them; the run's format must record groups.
        bounds_ns: Begin and end of the whole step, Unix time; None: those of ``spans``.
    """
    if bounds_ns is None:
        bounds_ns = int(spans.start_ns.min()), int((spans.start_ns + spans.duration_ns).max())
    of_epoch = replace(info, epochs=tuple(one for one in info.epochs if one.epoch == epoch))
    if records_groups(info):
        split = split_traced_waits(of_epoch, spans, arrivals=arrivals)
    else:
        split = split_bytedance_waits(info, spans)
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
        last_rank=split.last_rank,
        coords={rank.rank: rank.coords for rank in ranks},
    )
