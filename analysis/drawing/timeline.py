"""One step of one run, laid out for drawing: every rank's spans with their wait and transfer."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ..readers.bytedance.reader import split_bytedance_waits
from ..readers.waits import is_communication, split_traced_waits
from ..trace.errors import EmptyRunError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rankscope.tracer.topology import Coords

    from ..readers.waits import Arrivals, WaitSplit
    from ..trace.tables import EpochInfo, RunInfo, RunSummary, SpanSource, SpanTable

_BYTEDANCE = "bytedance"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """One step; the span columns are rows of ``spans``."""

    run: str
    epoch: int
    step: int
    begin_ns: int
    """Start of the step's first span on the common clock; draw times relative to it."""

    end_ns: int
    spans: SpanTable
    wait_ns: NDArray[np.int64]
    """Shape (spans,): this rank's start to the last arrival; -1 where the span is no
    communication or a member of its instance is missing."""

    transfer_ns: NDArray[np.int64]
    """Shape (spans,): the last arrival to this rank's end; meaningless where ``wait_ns`` is -1."""

    last_rank: NDArray[np.int32]
    """Shape (spans,): the member that arrived last; -1 where ``wait_ns`` is -1."""

    coords: dict[int, Coords]

    @property
    def communication(self) -> NDArray[np.bool_]:
        """Shape (spans,): communication, by the span's own word or by its inferred group."""
        found: NDArray[np.bool_] = is_communication(self.spans) | (self.wait_ns >= 0)
        return found


def step_timeline(source: SpanSource, run_id: str, *, epoch: int, step: int) -> StepTimeline:
    """Read one step of one epoch and split its communication.

    Raises:
        UnknownRunError: The source holds no such run.
        EmptyRunError: The run has no spans of this step in this epoch.
    """
    info = source.run_info(run_id)
    table = source.spans(run_id, first=step, last=step)
    spans = _rows(table, (table.epoch == epoch) & (table.step == step))
    if not len(spans):
        raise no_spans(run_id, epoch=epoch, step=step)
    return timeline_of(info, spans, epoch=epoch, step=step)


def no_spans(run_id: str, *, epoch: int, step: int) -> EmptyRunError:
    """Return what to raise for a step without spans."""
    return EmptyRunError(
        f"run {run_id!r} has no spans of step {step} in epoch {epoch}:"
        " nothing of it has arrived yet, or its spans are no longer kept"
    )


def timeline_of(info: RunInfo, spans: SpanTable, *, epoch: int, step: int) -> StepTimeline:
    """Split the communication of one step of one epoch.

    Args:
        info: The run.
        spans: All spans of this step, at least one.
        epoch: Their epoch.
        step: Their step.
    """
    incarnation = next((known for known in info.epochs if known.epoch == epoch), None)
    split = _split(spans, info, incarnation, arrivals=None)
    return StepTimeline(
        run=info.run_id,
        epoch=epoch,
        step=step,
        begin_ns=int(spans.start_ns.min()),
        end_ns=int((spans.start_ns + spans.duration_ns).max()),
        spans=spans,
        wait_ns=split.wait_ns,
        transfer_ns=split.transfer_ns,
        last_rank=split.last_rank,
        coords=_coords(info, incarnation),
    )


def portion_of(
    info: RunInfo,
    spans: SpanTable,
    arrivals: Arrivals,
    *,
    epoch: int,
    step: int,
    bounds_ns: tuple[int, int],
) -> StepTimeline:
    """Split the communication of some spans of a step, as `timeline_of` does with all of them.

    Args:
        info: The run, of a format that records groups.
        spans: Some spans of this step.
        arrivals: The communication instances that these belong to.
        epoch: Their epoch.
        step: Their step.
        bounds_ns: Begin and end of the whole step.
    """
    incarnation = next((known for known in info.epochs if known.epoch == epoch), None)
    split = _split(spans, info, incarnation, arrivals=arrivals)
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
        coords=_coords(info, incarnation),
    )


def _coords(info: RunInfo, incarnation: EpochInfo | None) -> dict[int, Coords]:
    if incarnation is None or not info.has_layout:
        return {}
    return {rank.rank: rank.coords for rank in incarnation.ranks}


def records_groups(info: RunInfo | RunSummary) -> bool:
    """Return whether the run tells who communicates with whom; else a step is split as a whole."""
    return info.source_format != _BYTEDANCE


def _split(
    spans: SpanTable,
    info: RunInfo,
    incarnation: EpochInfo | None,
    *,
    arrivals: Arrivals | None,
) -> WaitSplit:
    """Split by the groups that the epoch records, or that its format implies."""
    if not records_groups(info):
        return split_bytedance_waits(info, spans)
    of_epoch = replace(info, epochs=() if incarnation is None else (incarnation,))
    return split_traced_waits(of_epoch, spans, arrivals=arrivals)


def _rows(table: SpanTable, keep: NDArray[np.bool_]) -> SpanTable:
    """Return the rows of the table that are to be kept, in their order."""
    columns: dict[str, Any] = {
        field.name: getattr(table, field.name)[keep]
        for field in fields(table)
        if field.name not in ("names", "tracks")
    }
    return replace(table, **columns)
