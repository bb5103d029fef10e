"""Stored runs in notebooks and scripts: `open_run`, `runs`, `query` and the results of a run.

What has rows is an Arrow table: ``.to_pandas()`` makes a data frame of it, as ``run.df`` does for
all tables of a run (``run.df.steps()``), and ``polars.from_arrow`` one of polars. In a notebook the
first rows of a table are shown. Times whose name ends in ``_ns`` are in ns; moments among them
(``start_ns``, ``at_ns``) are Unix time.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cached_property, wraps
from html import escape
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from rankscope.analysis.analyze import analyze_run, read_operations
from rankscope.analysis.breakdown.run_history import StepMark, summarize_history
from rankscope.analysis.drawing.timeline import read_timeline
from rankscope.analysis.report.text import format_percent
from rankscope.analysis.trace.errors import EmptyRunError
from rankscope.analysis.verdict import verdict_sentence
from rankscope.collector.client.served_store import open_for_reading
from rankscope.collector.read.kernels import read_kernels
from rankscope.collector.read.runs import read_events
from rankscope.collector.read.samples import read_samples
from rankscope.collector.read.spans import read_filtered_spans
from rankscope.collector.read.steps import read_step_bounds, read_step_marks, read_steps
from rankscope.collector.store.location import default_store_url

from .extras import advise_install
from .sources.goodput import read_goodput
from .sources.incidents import IncidentSource, read_incidents
from .sources.result_tables import (
    communications_table,
    events_table,
    findings_table,
    kind_times_table,
    rank_steps_table,
    ranks_table,
    runs_table,
    settings_table,
    show_tables,
    step_times_table,
    waits_table,
    waterfall_table,
    with_steps,
)
from .sources.store_source import StoreSource

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import networkx as nx
    import numpy as np
    import plotly.graph_objects as go
    import pyarrow as pa
    from numpy.typing import NDArray

    from rankscope.analysis.breakdown.run_history import RunHistory
    from rankscope.analysis.drawing.timeline import StepTimeline
    from rankscope.analysis.goodput import Goodput
    from rankscope.analysis.price.operation_sets import Part, PartPrice
    from rankscope.analysis.replay.critical_path import CriticalPath, Slack
    from rankscope.analysis.replay.model import Reading
    from rankscope.analysis.replay.pipeline import Planned
    from rankscope.analysis.replay.replayer import Replayer
    from rankscope.analysis.replay.step_graph import IdealTimeline
    from rankscope.analysis.report.report import RunReport
    from rankscope.analysis.trace.tables import RunInfo
    from rankscope.analysis.what_if import RunPlay, StepPlay
    from rankscope.collector.store.store import Store
    from rankscope.dashboard.records.incident import Incident


MAX_MARKS = 1_000_000
"""Newest steps of a run's history."""


def open_run(run_id: str, *, store: str | None = None) -> Run:
    """Open a stored run for reading. Close it, or use it in a ``with`` block, to free the store.

    If a `rankscope serve` holds the store, the run is read through that server.

    Example:
        >>> run = rankscope.open_run("tuesday")

    Args:
        run_id: Name of the run, as `rankscope runs` lists it.
        store: URL of the store. None: ``RANKSCOPE_STORE``, or else the store in the data folder.

    Raises:
        UnknownRunError: The store holds no run of this name.
        StoreError: The store could not be opened.
    """
    show_tables()
    opened = open_for_reading(store or default_store_url())
    try:
        info = StoreSource(opened).run_info(run_id)
    except BaseException:
        opened.close()
        raise
    return Run(opened, info)


def runs(*, store: str | None = None) -> pa.Table:
    """Return one row per run of a store, the newest first.

    Example:
        >>> rankscope.runs().to_pandas()

    Args:
        store: URL of the store, as in `open_run`.

    Raises:
        StoreError: The store could not be opened.
    """
    show_tables()
    with open_for_reading(store or default_store_url()) as opened:
        return runs_table(StoreSource(opened).runs())


def query(sql: str, *, store: str | None = None, **parameters: object) -> pa.Table:
    """Return the result of a query in SQL, for what no method has (docs/sql.md).

    Example:
        >>> rankscope.query("SELECT count() FROM spans WHERE run_id = {run:String}", run="tuesday")

    Args:
        sql: One SELECT of ClickHouse's dialect.
        store: URL of the store, as in `open_run`.
        **parameters: Values of its ``{name:Type}``.

    Raises:
        StoreError: The store could not be opened, or refused the query.
    """
    show_tables()
    with open_for_reading(store or default_store_url()) as opened:
        return opened.arrow(sql, parameters)


class Run:
    """One run of an open store. Each result is computed at its first use."""

    def __init__(self, store: Store, info: RunInfo) -> None:
        self._store = store
        self._source = StoreSource(store)
        self.info = info
        """Layout, ranks and groups."""

    @property
    def df(self) -> DataFrames:
        """The same tables as data frames of pandas, which the extra ``notebook`` installs.

        Example:
            >>> run.df.steps().plot(x="step", y="actual_s")
        """
        return DataFrames(self)

    @cached_property
    def report(self) -> RunReport:
        """The diagnosis of all steps, as `rankscope analyze` prints it."""
        return analyze_run(self._source, self.info.run_id)

    @cached_property
    def verdict(self) -> str:
        """The diagnosis in one sentence."""
        return verdict_sentence(self.report)

    @cached_property
    def history(self) -> RunHistory | None:
        """Incarnations of the job, their steps and losses; None if no step has ended."""
        rows = read_step_marks(self._store, self.info.run_id, most=MAX_MARKS)
        return summarize_history(StepMark(**row) for row in rows)

    @cached_property
    def goodput(self) -> Goodput | None:
        """Use of the time of the run, over all restarts; None if nothing is known.

        Example:
            >>> run.goodput.ratio, run.goodput.hours("repeated")
        """
        run_id = self.info.run_id
        (state,) = (run.state for run in self._source.runs() if run.run_id == run_id)
        return read_goodput(self._store, run_id, self.report, state=state)

    def findings(self) -> pa.Table:
        """Return one row per finding, the verdict's first.

        Example:
            >>> run.findings().to_pandas()[["cause", "ranks", "recoverable_ratio"]]
        """
        return findings_table(self.report)

    def incidents(self) -> tuple[Incident, ...]:
        """Return the findings that a server or `rankscope analyze` has recorded, with their life.

        Onset, end, cost, what changed before, other findings on the hosts, notes, and whether the
        steps since the end are faster, in the order in which they opened.

        Example:
            >>> [(one.cause, one.state, one.lost_device_h) for one in run.incidents()]
        """
        (summary,) = (run for run in self._source.runs() if run.run_id == self.info.run_id)
        return read_incidents(
            IncidentSource(
                store=self._store,
                run_id=summary.run_id,
                num_ranks=summary.world_size,
                state=summary.state,
                report=self.report,
            )
        )

    def spans(
        self,
        steps: int | tuple[int, int] | None = None,
        *,
        ranks: int | Collection[int] = (),
        kinds: str | Collection[str] = (),
    ) -> pa.Table:
        """Return recorded spans, by epoch, step, rank and start.

        Example:
            >>> run.spans(12, ranks=3, kinds=["forward", "backward"]).to_pandas()

        Args:
            steps: One step, or the first and the last of several; -1 for the spans outside any
                step. None: all steps.
            ranks: Only these global ranks.
            kinds: Only these kinds of span (``forward``, ``dp-comm``, ...).
        """
        first, last = (steps, steps) if isinstance(steps, int) else steps or (None, None)
        return read_filtered_spans(
            self._store,
            self.info.run_id,
            first=first,
            last=last,
            ranks=[ranks] if isinstance(ranks, int) else [*ranks],
            kinds=[kinds] if isinstance(kinds, str) else [*kinds],
        )

    def steps(self) -> pa.Table:
        """Return one row per step of the job: begin, actual and ideal time, S, MFU, tokens, loss.

        Example:
            >>> run.steps().to_pandas().nlargest(3, "actual_s")
        """
        return step_times_table(self.report, self._source.steps(self.info.run_id))

    def rank_steps(self) -> pa.Table:
        """Return one row per (epoch, step, rank), as each rank reported it.

        Example:
            >>> run.rank_steps().to_pandas().groupby("rank")["duration_ns"].mean()
        """
        return rank_steps_table(read_steps(self._store, self.info.run_id))

    def ranks(self) -> pa.Table:
        """Return one row per traced rank: position, host, device, state and slowdown (S).

        Example:
            >>> run.ranks().sort_by([("slowdown", "descending")]).slice(0, 5).to_pandas()
        """
        return ranks_table(self.info, self.slowdown_by_rank)

    def waits(self) -> pa.Table:
        """Return who waits for whom, directly or through others: shares of the step time.

        Example:
            >>> run.waits().to_pandas().groupby("on_rank")["ratio"].sum().nlargest(3)
        """
        return waits_table(self.report)

    def kind_times(self, step: int, *, epoch: int | None = None) -> pa.Table:
        """Return the times of one step by rank and kind of span: busy, wait, transfer, exposed.

        Example:
            >>> run.kind_times(12).to_pandas().pivot(index="rank", columns="kind", values="busy_ns")

        Raises:
            EmptyRunError: The step holds no spans.
        """
        from rankscope.analysis.breakdown.kind_times import sum_kind_times

        return kind_times_table(sum_kind_times(self.timeline(step, epoch=epoch)))

    def communications(self, steps: int | tuple[int, int], *, epoch: int | None = None) -> pa.Table:
        """Return the communications of steps on each rank: wait, transfer, last member.

        What is null is unknown: a member was not recorded.

        Example:
            >>> run.communications((8, 12)).to_pandas().groupby("step")["wait_ns"].max()

        Args:
            steps: One step, or the first and the last of several; those without spans are left out.
            epoch: Epoch of the steps. None: the last one.

        Raises:
            EmptyRunError: None of them holds spans.
        """
        if isinstance(steps, int):
            return communications_table([self.timeline(steps, epoch=epoch)])
        timelines = []
        for step in range(steps[0], steps[1] + 1):
            with suppress(EmptyRunError):
                timelines.append(self.timeline(step, epoch=epoch))
        if not timelines:
            raise EmptyRunError(f"run {self.info.run_id!r} has no spans of steps {steps}")
        return communications_table(timelines)

    def events(self) -> pa.Table:
        """Return what happened once, in order of time: exits, tracebacks, stalls, alerts.

        Example:
            >>> run.events().to_pandas().query("kind == 'exit'")[["rank", "text"]]
        """
        return events_table(read_events(self._store, self.info.run_id))

    def kernels(self) -> pa.Table:
        """Return the sums of a profile's kernels by step, rank, phase and name, busiest first.

        Empty if the run was not imported from `torch.profiler`. docs/sql.md has the columns.

        Example:
            >>> run.kernels().group_by(["phase", "name"]).aggregate([("total_ns", "sum")])
        """
        return read_kernels(self._store, self.info.run_id)

    def settings(self) -> pa.Table:
        """Return environment, versions and configuration of the newest epoch, by value.

        A setting with several rows differs between ranks; ``num_ranks`` have each value.

        Example:
            >>> run.settings().to_pandas().query("setting.str.contains('torch')")
        """
        return settings_table(self._source.context(self.info.run_id, first=0, last=0).manifests)

    def samples(self, name: str = "") -> pa.Table:
        """Return clocks, power and counters of the run's hosts during its steps.

        Column ``step`` is the step that had begun last.

        Example:
            >>> run.samples("gpu-clock-hz").to_pandas().groupby(["host", "device"])["value"].min()

        Args:
            name: Only this quantity. "": all.
        """
        bounds = read_step_bounds(self._store, self.info.run_id) or (0, 0)
        found = read_samples(
            self._store, self.info.run_id, first_ns=bounds[0], last_ns=bounds[1], name=name
        )
        return with_steps(found, self._source.steps(self.info.run_id))

    def timeline(self, step: int, *, epoch: int | None = None) -> StepTimeline:
        """Return one step, each span with its wait and transfer.

        Example:
            >>> run.timeline(12).wait_ns.max()

        Args:
            step: Number of the step.
            epoch: Epoch of the step. None: the last one.

        Raises:
            EmptyRunError: The step holds no spans.
        """
        last = max(known.epoch for known in self.info.epochs)
        chosen = last if epoch is None else epoch
        return read_timeline(self._source, self.info.run_id, epoch=chosen, step=step)

    @cached_property
    def reading(self) -> Reading:
        """All steps as operations. The operation numbers of the results below refer to these."""
        return read_operations(
            self.info, self._source.spans(self.info.run_id), self._source.steps(self.info.run_id)
        )

    def waterfall(self) -> pa.Table:
        """Return the parts of each rank's time in each step, which sum to it exactly.

        `analysis.breakdown.waterfall.Part` describes the parts.

        Example:
            >>> run.waterfall().to_pandas().drop(columns=["rank", "step"]).sum()
        """
        from rankscope.analysis.breakdown.waterfall import build_waterfall
        from rankscope.analysis.readers.clocks import align_clocks
        from rankscope.analysis.readers.tracer.device_steps import align_steps

        spans = self._source.spans(self.info.run_id)
        clocks = align_clocks(self.info, spans)
        spans, steps = clocks.align(spans), clocks.align(self._source.steps(self.info.run_id))
        aligned = align_steps(spans, steps)
        return waterfall_table(build_waterfall(self.info, self.reading, aligned))

    def figure_steps(self) -> go.Figure:
        """Draw step time and MFU by step, as the overview does.

        Example:
            >>> run.figure_steps()
        """
        from rankscope.dashboard.figures.step_time import step_time_figure

        return step_time_figure(self.report)

    def figure_excess(self) -> go.Figure:
        """Draw the excess compute of each rank in each step, as the overview does.

        Example:
            >>> run.figure_excess()
        """
        from rankscope.dashboard.figures.excess import excess_figure

        return excess_figure(self.report)

    def figure_workers(self) -> go.Figure:
        """Draw the slowdown of each worker over the parallel layout, as the overview does.

        Example:
            >>> run.figure_workers()
        """
        from rankscope.dashboard.figures.workers import worker_figure

        return worker_figure(self.report)

    def figure_proof(self, cause: str | None = None) -> go.Figure | None:
        """Draw what proves a finding, as the overview does: its quantity beside that of peers.

        None if the run has no such finding, or the cause no picture.

        Example:
            >>> run.figure_proof()

        Args:
            cause: Cause of the finding. None: that of the verdict.
        """
        from rankscope.dashboard.figures.proof_card import proof_figure

        named = self.report.top_finding.cause if cause is None else cause
        finding = next((each for each in self.report.findings if each.cause == named), None)
        return None if finding is None else proof_figure(self.report, finding)

    def figure_ranks(
        self, of: str = "compute", *, steps: tuple[int, int] | None = None
    ) -> go.Figure | None:
        """Draw a quantity of all ranks as a heat map by host, as the page Rank does.

        None if it is not known in these steps.

        Example:
            >>> run.figure_ranks("evidence")

        Args:
            of: ``evidence`` of the top finding, or ``compute``; ``wait``, ``exposed`` and ``host``
                if a server has summed up the run.
            steps: The first and the last step. None: the newest.
        """
        from rankscope.dashboard.figures.host_boxes import arrange_hosts
        from rankscope.dashboard.figures.rank import heat_map_figure
        from rankscope.dashboard.records.rank_details import RankQuantity

        from .server.rank_view import read_quantity

        values = read_quantity(self._store, self.report, quantity=RankQuantity(of), steps=steps)
        if values is None or not values.seconds:
            return None
        step_s = self.report.step_time_s.actual
        return heat_map_figure(arrange_hosts(values), values, run=self.info.run_id, step_s=step_s)

    def figure_rank(self, rank: int) -> go.Figure | None:
        """Draw one rank over the steps beside its peers, as its page does; None if it is unknown.

        Example:
            >>> run.figure_rank(2)
        """
        from rankscope.dashboard.figures.rank import rank_over_steps_figure

        from .server.rank_view import read_rank_details

        details = read_rank_details(self._store, self.info.run_id, rank, self.report.coords)
        return None if details is None else rank_over_steps_figure(self.report, details)

    def figure_place(self, rank: int) -> go.Figure:
        """Draw where a rank is in the parallel layout, as its page does.

        Example:
            >>> run.figure_place(2)
        """
        from rankscope.dashboard.figures.rank import place_figure

        return place_figure(self.report, rank)

    def figure_waits(self, ranks: int | Collection[int] = ()) -> go.Figure | None:
        """Draw who waits for some ranks, directly or not, as the page Graph does.

        None if no rank waits for them.

        Example:
            >>> run.figure_waits(2)

        Args:
            ranks: The ranks that are waited for. None given: those of the top finding.
        """
        from rankscope.analysis.breakdown.wait_graph import MAX_NODES, follow_waits
        from rankscope.dashboard.figures.wait_graph import wait_graph_figure

        report = self.report
        named = [ranks] if isinstance(ranks, int) else [*ranks] or [*report.top_finding.ranks]
        if report.direct_waits is None or not named:
            return None
        graph = follow_waits(report.direct_waits, named, report.coords, max_nodes=MAX_NODES)
        return wait_graph_figure(graph, run=report.run) if graph.edges else None

    def figure_links(self) -> go.Figure | None:
        """Draw the transfer time of each pair above alike ones, as the page Links does.

        None if the run has no pair whose transfers could be measured.

        Example:
            >>> run.figure_links()
        """
        from rankscope.dashboard.pages.links import link_matrix_figure

        links = self.report.links
        if links is None or links.matrix is None:
            return None
        return link_matrix_figure(links.matrix, run=self.report.run)

    def figure_mfu(self) -> go.Figure:
        """Draw MFU, HFU and loss over the steps, as the page MFU does.

        Example:
            >>> run.figure_mfu()
        """
        from rankscope.dashboard.figures.waterfall import mfu_figure

        return mfu_figure(self.report, self.history)

    def figure_waterfall(self, by: str = "rank") -> go.Figure | None:
        """Draw what the time of a step goes to, side by side, as the page MFU does.

        None if no step was analysed, or the axis has one position.

        Example:
            >>> run.figure_waterfall("step")

        Args:
            by: ``step``, ``rank``, or an axis: ``pp``, ``dp``, ``tp``, ``cp``, ``ep``.
        """
        from rankscope.analysis.breakdown.waterfall_views import WaterfallBy, list_rows
        from rankscope.dashboard.figures.waterfall import waterfall_figure

        rows = list_rows(self.report, WaterfallBy(by))
        return None if rows is None else waterfall_figure(rows, run=self.report.run)

    def figure_start_up(self) -> go.Figure | None:
        """Draw what the ranks did before their first step, as the page Start-up does.

        None if no span is outside the steps.

        Example:
            >>> run.figure_start_up()
        """
        from rankscope.dashboard.pages.start_up import start_up_figure

        from .server.around_runs import read_startup

        found = read_startup(self._store, self.info.run_id)
        return None if found is None else start_up_figure(found)

    def figure_history(self) -> go.Figure:
        """Draw all steps of the run with findings, pauses and restarts, as above the timeline.

        Example:
            >>> run.figure_history()
        """
        import plotly.graph_objects as go

        from rankscope.dashboard.figures.run_axis import run_axis_figure

        return go.Figure(run_axis_figure(self.report, self.history, step=None, links={}))

    def figure_timeline(self, step: int, *, epoch: int | None = None) -> go.Figure:
        """Draw every span of a step, in rows by rank; for some hundred ranks, or fewer.

        Example:
            >>> run.figure_timeline(12)

        Raises:
            EmptyRunError: The step holds no spans.
        """
        import plotly.graph_objects as go

        from rankscope.analysis.drawing.rows import RowOrder, lay_out_ranks
        from rankscope.dashboard.figures.timeline import hover_texts, timeline_figure

        timeline = self.timeline(step, epoch=epoch)
        figure, bars = timeline_figure(timeline, lay_out_ranks(timeline, RowOrder.RANK))
        texts = hover_texts(timeline)
        figure["layout"] |= {"barmode": "overlay", "hovermode": "closest"}
        return go.Figure([*(one.trace(texts) for one in bars), *figure["data"]], figure["layout"])

    def critical_path(self, step: int) -> CriticalPath:
        """Return the chain of operations that determines when a step ends.

        Example:
            >>> run.critical_path(12).rank

        Raises:
            EmptyRunError: The step takes no part in the replay.
        """
        from rankscope.analysis.replay.critical_path import critical_path

        return critical_path(self.reading.model, [step])

    def slack(self, step: int) -> Slack:
        """Return how much later each operation could end without delaying the end of the step.

        Example:
            >>> run.slack(12).slack_ns.max()

        Raises:
            EmptyRunError: The step takes no part in the replay.
        """
        from rankscope.analysis.replay.critical_path import operation_slack

        return operation_slack(self.reading.model, [step])

    def ideal_timeline(self, step: int) -> IdealTimeline:
        """Return the operations of a step, as recorded and as they would be without any slowness.

        Example:
            >>> run.ideal_timeline(12).ideal_ns / run.ideal_timeline(12).actual_ns

        Raises:
            EmptyRunError: The step takes no part in the replay.
        """
        from rankscope.analysis.replay.step_graph import ideal_timeline

        return ideal_timeline(self.reading.model, step)

    def what_if(self, part: Part | NDArray[np.bool_]) -> PartPrice:
        """Return what would be saved if a set of operations were healthy.

        Example:
            >>> run.what_if(Part(rank=2)).recoverable_ratio

        Args:
            part: The set: conditions (`analysis.price.operation_sets.Part`), or a mask over the
                operations of ``reading``.

        Raises:
            EmptyPartError: No operation meets the conditions.
        """
        from rankscope.analysis.price.operation_sets import Part, price_part, select_operations

        if isinstance(part, Part):
            by_span = part.group is not None or part.name is not None
            part = select_operations(
                part,
                self.info,
                self.reading,
                spans=self._source.spans(self.info.run_id) if by_span else None,
            )
        return price_part(self.replayer, part)

    def play(self, step: int) -> StepPlay:
        """Return a step to replay with changes: a part shortened, a finding fixed, hosts swapped.

        The first call reads and diagnoses the run.

        Example:
            >>> run.play(12).fix(run.report.top_finding).played_ns

        Raises:
            EmptyRunError: The step takes no part in the replay.
        """
        return self._plays.step(step)

    def plan_pipeline(
        self, *, stages: int, chunks: int = 1, microbatches: int, schedule: str = "1f1b"
    ) -> Planned:
        """Return the mean step with another pipeline, of the compute and transfers recorded.

        Example:
            >>> [run.plan_pipeline(stages=8, chunks=v, microbatches=32).speedup for v in (1, 2, 4)]

        Args:
            stages: Pipeline-parallel size.
            chunks: Model chunks per stage; more than one are interleaved.
            microbatches: Micro-batches of a step, per data-parallel position.
            schedule: `analysis.replay.pipeline.Schedule`.

        Raises:
            ScheduleError: There is no such schedule, or the pipeline of the run is unknown.
        """
        from rankscope.analysis.replay.pipeline import Schedule, plan

        return plan(
            self._plays.pipeline,
            stages=stages,
            chunks=chunks,
            microbatches=microbatches,
            schedule=Schedule(schedule),
        )

    @cached_property
    def _plays(self) -> RunPlay:
        from rankscope.analysis.what_if import open_play

        return open_play(self._source, self.info.run_id)

    @cached_property
    def slowdown_by_tp(self) -> dict[int, float | None]:
        """Slowdown (S) of each tp position."""
        from rankscope.analysis.price.operation_sets import slowdown_by_tp

        return slowdown_by_tp(self.info, self.replayer)

    @cached_property
    def slowdown_by_host(self) -> dict[str, float | None]:
        """Slowdown (S) of each host whose name is known."""
        from rankscope.analysis.price.operation_sets import slowdown_by_host

        return slowdown_by_host(self.info, self.replayer)

    @cached_property
    def slowdown_by_rank(self) -> dict[int, float | None]:
        """Slowdown (S) of each rank."""
        from rankscope.analysis.price.operation_sets import slowdown_by_rank

        return slowdown_by_rank(self.info, self.replayer)

    @cached_property
    def replayer(self) -> Replayer:
        """The replay of all steps, as input of the functions of `analysis.price.operation_sets`."""
        from rankscope.analysis.replay.replayer import Replayer

        return Replayer(self.reading.model)

    def graph(
        self, step: int | Collection[int], *, ranks: Collection[int] | None = None
    ) -> nx.DiGraph[int]:
        """Return the dependency graph of some steps.

        See `analysis.replay.networkx_graph.dependency_graph`.

        Example:
            >>> run.graph(12, ranks=[2]).number_of_edges()

        Args:
            step: Number of the step, or several numbers.
            ranks: The ranks to include. None: all.

        Raises:
            EmptyRunError: A step takes no part in the replay.
            GraphTooLargeError: The steps have too many operations for a graph of Python objects.
        """
        from rankscope.analysis.replay.networkx_graph import dependency_graph

        return dependency_graph(self.reading.model, step, ranks=ranks)

    def close(self) -> None:
        """Close the store. Computed results stay usable; closing twice is safe."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<run {self.info.run_id!r}: {self.info.world_size} ranks>"

    def _repr_html_(self) -> str:
        """Return the verdict and the findings, for a cell of a notebook."""
        head = "<tr><th>cause</th><th>severity</th><th>recoverable</th><th>evidence</th></tr>"
        rows = "".join(
            f"<tr><td>{escape(found.cause)}</td><td>{escape(found.severity or '')}</td>"
            f"<td>{format_percent(found.recoverable_ratio)}</td>"
            f"<td style='text-align:left'>{escape(found.evidence)}</td></tr>"
            for found in self.report.findings
        )
        return (
            f"<p><b>{escape(self.info.run_id)}</b>, {self.info.world_size} ranks:"
            f" {escape(self.verdict)}</p><table>{head}{rows}</table>"
        )


class DataFrames:
    """The tables of a run as data frames: ``run.df.steps()`` is ``run.steps().to_pandas()``."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in _TABLES:
            raise AttributeError(f"{name!r} is no table of a run: {', '.join(_TABLES)}")
        method = getattr(self._run, name)

        @wraps(method)
        def read(*args: object, **options: object) -> Any:  # noqa: ANN401 - pandas has no types
            try:
                import_module("pandas")
            except ModuleNotFoundError as error:
                line = advise_install(error, user="run.df")
                raise ModuleNotFoundError(line or str(error), name=error.name) from None
            return method(*args, **options).to_pandas()

        return read

    def __dir__(self) -> list[str]:
        return [*_TABLES]


_TABLES = tuple(
    name
    for name, value in vars(Run).items()
    if getattr(value, "__annotations__", {}).get("return") == "pa.Table"
)
