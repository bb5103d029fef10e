"""A simulated run as the analysis reads it, without a store."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rankscope.analysis.trace.context import RankManifest, RunContext
from rankscope.analysis.trace.errors import UnknownRunError
from rankscope.analysis.trace.tables import RunSummary
from rankscope.collector.read.runs import RunRows
from rankscope.collector.spool.descriptions import manifest_settings
from rankscope.sources.arrow_tables import microbatch_table, sample_table, span_table, step_table
from rankscope.sources.store_source import build_run_info, to_event, to_exit
from rankscope.trainer.simulator.simulation import Simulation

if TYPE_CHECKING:
    from rankscope.analysis.trace.tables import RunInfo, SpanTable, StepTable
    from rankscope.trainer.simulator.labels import Label
    from rankscope.trainer.simulator.scenario import Scenario
    from rankscope.trainer.simulator.tables import StepTables

MAX_STEP = (1 << 31) - 1


class SimulatedSource:
    """A `SpanSource` of one simulated run in memory."""

    def __init__(self, scenario: Scenario, *, run_id: str = "simulated") -> None:
        simulation = Simulation(scenario, run_id=run_id)
        self.labels: tuple[Label, ...] = simulation.labels
        """The labels of the run."""

        self._run_id = run_id
        self._tables: tuple[StepTables, ...] = tuple(simulation.tables())
        self._rank_rows = list(simulation.rank_rows())
        self._settings = [
            manifest_settings(simulation.manifest(rank)) for rank in range(scenario.world_size)
        ]
        groups = [
            {
                "epoch": 0,
                "group_id": group.group_id,
                "kind": group.kind,
                "name": group.name,
                "members": list(group.members),
            }
            for group in simulation.groups
        ]
        rows = RunRows(
            epochs=[simulation.run_row(created_ns=scenario.started_ns)],
            ranks=self._rank_rows,
            groups=groups,
            account=[],
            bad=[],
            pace=[],
            clocks=list(simulation.clock_rows()),
        )
        # The records are in memory: none was stored, dropped or buffered.
        self._info = replace(build_run_info(run_id, rows), accounts={})

    def runs(self) -> tuple[RunSummary, ...]:
        """Return the run, which has ended."""
        info, spans = self._info, self.spans(self._run_id)
        steps = set(spans.step.tolist())
        return (
            RunSummary(
                run_id=self._run_id,
                source_format=info.source_format,
                state="ended",
                world_size=info.world_size,
                layout=info.layout,
                num_spans=len(spans),
                num_steps=len(steps),
                started_ns=None,
            ),
        )

    def run_info(self, run_id: str) -> RunInfo:
        """Return the description of the run.

        Raises:
            UnknownRunError: The run has another name.
        """
        if run_id != self._run_id:
            raise UnknownRunError(run_id, (self._run_id,))
        return self._info

    def steps(self, run_id: str, *, first: int | None = None, last: int | None = None) -> StepTable:
        """Return the step rows with ``first <= step <= last`` (None: no limit)."""
        return step_table(self._joined("steps", first, last))

    def spans(self, run_id: str, *, first: int | None = None, last: int | None = None) -> SpanTable:
        """Return the spans of these steps."""
        return span_table(self._joined("spans", first, last))

    def context(
        self, run_id: str, *, first: int | None = None, last: int | None = None
    ) -> RunContext:
        """Return the context of these steps."""
        events: list[dict[str, Any]] = self._joined("events", None, None).to_pylist()
        exits = {row["rank"]: row["data"] for row in events if row["kind"] == "exit"}
        return RunContext(
            microbatches=microbatch_table(self._joined("microbatches", first, last)),
            samples=sample_table(self._joined("samples", first, last)),
            events=tuple(to_event(row) for row in events),
            manifests=tuple(
                RankManifest(epoch=0, rank=rank, settings=settings)
                for rank, settings in enumerate(self._settings)
            ),
            exits=tuple(
                to_exit(row | {"data": exits.get(row["rank"], "")}, None) for row in self._rank_rows
            ),
        )

    def _joined(self, name: str, first: int | None, last: int | None) -> pa.Table:
        begin, end = first or 0, MAX_STEP if last is None else last
        chosen = [getattr(step, name) for step in self._tables if begin <= step.step <= end]
        return pa.concat_tables(chosen).unify_dictionaries()
