"""Simulation of a scenario, step by step."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.tracer.span import SpanKind

from .cluster import NS_PER_MS, Cluster, make_cluster
from .describe import clock_rows, manifest_of, rank_rows, run_row
from .ending import Ending, cut_off, ending_of, exit_events
from .hosts import Monitors, make_clocks
from .labels import labels_of
from .pipeline import Pipeline
from .recorder import ON_HOST, SpanTemplate
from .schedule import Finished, Posted, Slot
from .state import MAIN, SequenceNumbers, StepState
from .tables import (
    Event,
    RowName,
    StepTables,
    event_table,
    microbatch_table,
    number_column,
    same_number,
    span_table,
    table,
)
from .update import Gathers, Update
from .workload import Lengths, draw_lengths

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa
    from numpy.typing import NDArray

    from .describe import Row
    from .labels import Label
    from .placement import Group
    from .recorder import SpanColumns
    from .scenario import Scenario
    from .state import Times

DEFAULT_RUN_ID = "simulated"
FIRST_LOSS, LAST_LOSS, LOSS_STEPS = 10.5, 2.2, 400.0
PARAMETER_COPIES = 9
"""Bytes of parameters, gradients and optimizer state over the bytes of bfloat16 gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """A finished step; times are true ns from the start of the run."""

    step: int
    start: NDArray[np.int64]
    """Shape (pp, dp, cp, tp), as ``end``."""

    end: NDArray[np.int64]
    spans: SpanColumns
    lengths: Lengths
    ending: Ending | None

    @property
    def last_ns(self) -> int:
        """Time at which the last rank ended the step or was last seen."""
        seen = self.end if self.ending is None else self.ending.last_seen
        return int(seen.max())


class Simulation:
    """A run of a scenario. Equal scenarios and run ids give equal bytes."""

    def __init__(self, scenario: Scenario, *, run_id: str) -> None:
        self.scenario = scenario
        self.run_id = run_id
        self.cluster: Cluster = make_cluster(scenario)
        self.labels: tuple[Label, ...] = labels_of(self.cluster)
        self._clocks = make_clocks(scenario)
        self.process = hashlib.blake2b(
            repr((run_id, scenario)).encode(), digest_size=16
        ).hexdigest()
        """Name of the process in all rows, 32 hex digits."""

        self.ending: Ending | None = None
        """The crash or hang; known when `tables` has reached its step."""

        self.ended_ns: int | None = None
        """End of the run, Unix ns; known when `tables` is exhausted; None in a hang."""

    @property
    def groups(self) -> tuple[Group, ...]:
        """Communication groups."""
        return self.cluster.groups.groups

    @property
    def process_hash(self) -> int:
        """Upper bits of the segment numbers of rows."""
        digest = hashlib.blake2b(self.process.encode(), digest_size=5).digest()
        return int.from_bytes(digest, "big")

    def manifest(self, rank: int) -> dict[str, Any]:
        """Return the manifest of a rank."""
        return manifest_of(self.cluster, self.run_id, rank)

    def run_row(self, *, created_ns: int) -> Row:
        """Return the row of table ``runs``; complete when `tables` is exhausted."""
        return run_row(self, created_ns=created_ns)

    def rank_rows(self) -> Iterator[Row]:
        """Yield the rows of table ``ranks``; complete when `tables` is exhausted."""
        return rank_rows(self)

    def group_rows(self) -> Iterator[Row]:
        """Yield the rows of table ``groups``."""
        for group in self.groups:
            yield {
                "run_id": self.run_id,
                "epoch": 0,
                "group_id": group.group_id,
                "kind": group.kind.value,
                "name": group.name,
                "members": list(group.members),
            }

    def clock_rows(self) -> Iterator[Row]:
        """Yield the rows of table ``clock``."""
        return clock_rows(self)

    def tables(self) -> Iterator[StepTables]:
        """Run all steps and yield the tables of each; every call begins at the first step."""
        seqs, monitors = SequenceNumbers(), Monitors(self.cluster)
        now = np.zeros(self.cluster.placement.rank.shape, dtype=np.int64)
        self.ending, self.ended_ns = None, None
        for step in range(self.scenario.num_steps):
            effects = self.cluster.effects.of_step(step)
            lengths = draw_lengths(self.scenario, step, spread=effects.sequence_spread)
            state = StepState(self.cluster, step, start=now, effects=effects, seqs=seqs)
            end, stopped_at = run_step(state, lengths)
            spans, ending = state.recorder.columns(), None
            if effects.ending is not None:
                ending = ending_of(self.cluster, effects.ending, stopped_at=stopped_at)
                spans = cut_off(spans, ending)
            done = _Done(step=step, start=now, end=end, spans=spans, lengths=lengths, ending=ending)
            now, self.ending = end, ending
            is_hang = ending is not None and ending.is_hang
            self.ended_ns = None if is_hang else self.scenario.started_ns + done.last_ns
            yield self._tables(done, monitors)
            if ending is not None:
                return

    def _tables(self, done: _Done, monitors: Monitors) -> StepTables:
        name = RowName(run_id=self.run_id, process_hash=self.process_hash, step=done.step)
        spans = span_table(self._read_spans(done.spans), name)
        steps = self._step_table(done, name, first_row=spans.num_rows)
        lengths = done.lengths if self.scenario.record_lengths and done.ending is None else None
        microbatches = microbatch_table(
            lengths,
            self.cluster.placement,
            name,
            first_row=spans.num_rows + steps.num_rows,
        )
        events: tuple[Event, ...] = ()
        if done.ending is not None:
            seen_ns = self._unix_ns(done.ending.last_seen, self.cluster.placement.host)
            events = exit_events(done.ending, seen_ns)
        middle_ns = self.scenario.started_ns + (int(done.start.min()) + done.last_ns) // 2
        return StepTables(
            step=done.step,
            segment=name.segment,
            spans=spans,
            steps=steps,
            microbatches=microbatches,
            samples=monitors.read(done.step, self.run_id, at_ns=middle_ns),
            events=event_table(events, self.run_id, process=self.process),
        )

    def _read_spans(self, spans: SpanColumns) -> SpanColumns:
        """Return the spans as their hosts' clocks read them.

        Start and end are both read, so durations have the drift of the clock (below a millionth)
        but not its offset, and spans of one host that touch still touch.
        """
        host = self.cluster.placement.host[spans.rank]
        start, end = self._unix_ns(spans.start, host), self._unix_ns(spans.end, host)
        launched = (spans.launch != spans.start).any()
        launch = self._unix_ns(spans.launch, host) if launched else start
        return replace(spans, start=start, end=end, launch=launch)

    def _step_table(self, done: _Done, name: RowName, *, first_row: int) -> pa.Table:
        """Return table ``steps``, ranks ascending; without rows if the step did not end."""
        place, scenario = self.cluster.placement, self.scenario
        by_rank = np.argsort(place.rank.ravel())
        by_rank = by_rank if done.ending is None else by_rank[:0]
        rank, num_rows = place.rank.ravel()[by_rank], len(by_rank)
        loss = LAST_LOSS + (FIRST_LOSS - LAST_LOSS) * math.exp(-done.step / LOSS_STEPS)
        num_tokens = scenario.num_microbatches * done.lengths.num_tokens
        warm_up = scenario.pp - place.stage[rank].astype(np.int64)
        memory = PARAMETER_COPIES * scenario.gradient_bytes + scenario.activation_bytes * warm_up
        start, end = (
            self._unix_ns(times.ravel()[by_rank], place.host[rank])
            for times in (done.start, done.end)
        )
        return table(
            {
                **name.columns(num_rows),
                "rank": number_column(rank, np.int32),
                "start_ns": number_column(start),
                "end_ns": number_column(end),
                "num_tokens": same_number(num_tokens, num_rows, np.int64),
                "loss": same_number(loss, num_rows, np.float64),
                "peak_memory_bytes": number_column(memory),
                **name.row_columns(num_rows, first_row=first_row),
            }
        )

    def _unix_ns(self, true_ns: NDArray[np.int64], host: NDArray[np.int32]) -> NDArray[np.int64]:
        return self.scenario.started_ns + self._clocks.read_ns(true_ns, host)


def simulate(scenario: Scenario, *, run_id: str = DEFAULT_RUN_ID) -> Simulation:
    """Return the run of a scenario; its steps run when `Simulation.tables` is read.

    Raises:
        ScenarioError: A fault acts on links that the job does not use.
    """
    return Simulation(scenario, run_id=run_id)


def run_step(state: StepState, lengths: Lengths) -> tuple[Times, int]:
    """Run a step; ``state`` has recorded its spans.

    Returns:
        The end of the step on each rank, shape (pp, dp, cp, tp), and when the rank of a crash or
        hang stopped, `NEVER` without one; true ns from the start of the run.
    """
    gathers = Gathers(state)
    pipeline, update = Pipeline(state, lengths, gathers), Update(state)
    for stage in range(len(state.now)):
        start = state.now[stage]
        mean_ns = state.filled(state.scenario.data_ms * NS_PER_MS)
        end = start + state.noise.compute_ns(mean_ns) + state.effects.data_ns[stage]
        if (end > start).any() and state.effects.records_input:
            template = SpanTemplate(kind=SpanKind.DATA, name="data", track=MAIN, flags=ON_HOST)
            state.recorder.add(stage, template, start, end)
        state.now[stage] = end
        if state.scenario.prefetch and state.scenario.dp * state.scenario.cp > 1:
            gathers.launch(stage)
    launching: set[Slot] = set()
    if state.scenario.overlap:
        slots = (action for action in state.cluster.order if isinstance(action, Slot))
        last = {(slot.stage, slot.chunk): slot for slot in slots if not slot.is_forward}
        launching = {*last.values()}  # each completes the gradients of a chunk
    for action in state.cluster.order:
        match action:
            case Posted(exchange):
                pipeline.post(exchange)
            case Finished(exchange):
                pipeline.finish(exchange)
            case Slot() as slot:
                pieces = pipeline.run(slot)
                if slot in launching:
                    update.launch(slot, pieces)
    update.finish()
    return np.stack(state.now), pipeline.stopped_at
