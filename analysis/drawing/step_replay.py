"""The replay of one step for a timeline: its critical path, slack of its spans, its ideal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import COMM_KINDS, KIND_CODES, NONE, SpanKind

from ..arrays.sorting import argsort_rows
from ..replay.critical_path import critical_path
from ..replay.model import BACKWARD_KINDS, EVALUATION_KIND, FORWARD_KINDS, P2P_KINDS
from ..replay.step_graph import build_step_graph, node_slack, replayed_times
from ..trace.rows import make_span_table
from .raster import Stretches
from .timeline import StepTimeline

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..replay.critical_path import CriticalPath
    from ..replay.model import Reading, ReplayModel
    from .raster import StepPicture


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReplay:
    """Critical path, slack and ideal of one step.

    Recorded times are in ns from the start of its first span.
    """

    steps: tuple[int, int]
    """First and last step that the ideal durations are taken from."""

    actual_ns: int
    """Recorded duration of the step, as the report has it."""

    ideal_ns: int
    """Its duration in the device replay with ideal durations: without gaps of the hosts."""

    path: Stretches
    """The critical path as recorded, in order of time: operations with the gaps before them, of
    communication the transfer."""

    operations: Stretches
    """All operations as recorded, ordered by rank and begin."""

    slack_ns: NDArray[np.float64]
    """Shape (operations,): how much later each may end without delaying the end of the step;
    infinite if nothing that closes the step follows."""

    ideal: StepTimeline
    """The step in the ideal replay, with the waits that remain; it begins at 0."""

    def slack_of(self, *, rank: int, kind: int, begin_ns: int, end_ns: int) -> float | None:
        """Return the slack of a span: the least of its operations'.

        Returns:
            None if it is not part of the replay, such as the wait in a collective; infinite if the
            end of the step does not depend on it.
        """
        ops = self.operations
        own = ops.rank == rank
        found = own & (ops.start_ns == begin_ns) & (ops.end_ns == end_ns)
        if not found.any():  # compute that its communication cuts into pieces
            found = own & (ops.kind == kind) & (ops.start_ns >= begin_ns) & (ops.end_ns <= end_ns)
        return float(self.slack_ns[found].min()) if found.any() else None


def replay_step(reading: Reading, recorded: StepTimeline | StepPicture) -> StepReplay:
    """Replay one step as recorded and with ideal durations.

    Args:
        reading: Operations of some steps, this one among them; the ideal durations are theirs.
        recorded: The step, of which only its bounds and ranks count.

    Raises:
        EmptyRunError: The step is not part of the replay.
        CycleError: Operations of the step depend on each other.
    """
    model, step = reading.model, recorded.step
    operations = model.operations
    graph = build_step_graph(model, [step])
    kinds = np.array([KIND_CODES[_span_kind(kind)] for kind in model.kinds], np.int8)
    slack_ns = node_slack(graph, operations.duration_ns, operations.gap_ns)
    start_ns, end_ns = operations.start_ns[graph.rows], operations.end_ns[graph.rows]
    order = argsort_rows(model.rank[graph.rows], start_ns, end_ns)
    rows = graph.rows[order]
    device_ns = np.where(model.on_device, model.ideal_ns, 0.0)
    times, step_ns = replayed_times(graph, device_ns, np.zeros(len(device_ns)))
    drawn = np.flatnonzero(model.on_device[graph.rows])
    ideal_ns = round(float(step_ns[0]))
    actual_ns = int(reading.actual_ns[reading.steps.index(step)])
    ideal = _make_timeline(
        recorded,
        rank=model.rank[graph.rows[drawn]],
        kind=kinds[model.kind[graph.rows[drawn]]],
        times_ns=np.rint(np.stack((times.start_ns, times.gate_ns, times.end_ns))[:, drawn]),
    )
    return StepReplay(
        steps=(reading.steps[0], reading.steps[-1]),
        actual_ns=actual_ns,
        ideal_ns=ideal_ns,
        path=_recorded_path(critical_path(model, [step]), model, kinds, recorded.begin_ns),
        operations=Stretches(
            rank=model.rank[rows],
            start_ns=start_ns[order] - recorded.begin_ns,
            end_ns=end_ns[order] - recorded.begin_ns,
            kind=kinds[model.kind[rows]],
        ),
        slack_ns=slack_ns[order],
        ideal=ideal,
    )


def _recorded_path(
    path: CriticalPath, model: ReplayModel, kinds: NDArray[np.int8], begin_ns: int
) -> Stretches:
    """Return the path at the recorded times, which the replayed ones differ from a little."""
    rows, operations = path.operation, model.operations
    gap_ns = path.gap_ns.astype(np.int64)
    transfer_ns = operations.duration_ns[rows].astype(np.int64)
    # The arrival of a member of a communication is its gap alone; its transfer follows.
    is_gap = (path.gap_ns > 0) & (path.end_ns - path.start_ns <= path.gap_ns)
    start_ns, end_ns = operations.start_ns[rows], operations.end_ns[rows]
    return Stretches(
        rank=path.rank,
        start_ns=np.where(gap_ns > 0, start_ns - gap_ns, end_ns - transfer_ns) - begin_ns,
        end_ns=np.where(is_gap, start_ns, end_ns) - begin_ns,
        kind=kinds[path.kind],
    )


def _make_timeline(
    recorded: StepTimeline | StepPicture,
    *,
    rank: NDArray[np.int32],
    kind: NDArray[np.int8],
    times_ns: NDArray[np.float64],
) -> StepTimeline:
    """Return replayed operations as a timeline as long as the recorded step.

    Args:
        rank: Shape (operations,).
        kind: Shape (operations,): code of the span kind.
        times_ns: Shape (3, operations): start, arrival of the last member, end.
    """
    start_ns, gate_ns, end_ns = times_ns.astype(np.int64)
    is_comm = np.isin(kind, [KIND_CODES[one] for one in COMM_KINDS])
    num = len(rank)
    return StepTimeline(
        run=recorded.run,
        epoch=recorded.epoch,
        step=recorded.step,
        begin_ns=0,
        end_ns=recorded.end_ns - recorded.begin_ns,
        spans=make_span_table(
            epoch=np.full(num, recorded.epoch, np.int32),
            step=np.full(num, recorded.step, np.int32),
            rank=rank,
            kind=kind,
            name=np.zeros(num, np.int32),
            track=is_comm.astype(np.int32),
            start_ns=start_ns,
            duration_ns=end_ns - start_ns,
            names=("in the ideal step",),
            tracks=("compute", "communication"),
        ),
        wait_ns=np.where(is_comm, gate_ns - start_ns, NONE),
        transfer_ns=np.where(is_comm, end_ns - gate_ns, NONE),
        last_rank=np.full(num, NONE, np.int32),
        blocked_ns=np.full(num, NONE, np.int64),
        transfer_kind=np.full(num, NONE, np.int8),
        coords=recorded.coords,
        hosts=recorded.hosts,
    )


def _span_kind(kind: str) -> SpanKind:
    """Return the span kind of a kind of the replay; the ByteDance format has its own."""
    if kind in FORWARD_KINDS | {EVALUATION_KIND}:
        return SpanKind.FORWARD
    if kind in BACKWARD_KINDS:
        return SpanKind.BACKWARD
    if kind in P2P_KINDS:
        return SpanKind.PP_SEND if kind != SpanKind.PP_RECV else SpanKind.PP_RECV
    return SpanKind(kind) if kind in KIND_CODES else SpanKind.DP_COMM
