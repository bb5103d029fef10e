"""Stored runs in notebooks and scripts: `open_run` and the results of a run."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Self

from rankscope.analysis.analyze import analyze_run, read_operations
from rankscope.analysis.drawing.timeline import read_timeline
from rankscope.analysis.verdict import verdict_sentence
from rankscope.collector.client.served_store import open_for_reading
from rankscope.collector.store.location import default_store_url

from .sources.store_source import StoreSource

if TYPE_CHECKING:
    from collections.abc import Collection

    import networkx as nx
    import numpy as np
    from numpy.typing import NDArray

    from rankscope.analysis.breakdown.waterfall import Waterfall
    from rankscope.analysis.drawing.timeline import StepTimeline
    from rankscope.analysis.price.operation_sets import Part, PartPrice
    from rankscope.analysis.replay.critical_path import CriticalPath, Slack
    from rankscope.analysis.replay.model import Reading
    from rankscope.analysis.replay.step_graph import IdealTimeline
    from rankscope.analysis.replay.what_if import Replayer
    from rankscope.analysis.report.report import RunReport
    from rankscope.analysis.trace.tables import RunInfo, SpanTable, StepTable
    from rankscope.collector.store.store import Store


def open_run(run_id: str, *, store: str | None = None) -> Run:
    """Open a stored run for reading. Close it, or use it in a ``with`` block, to free the store.

    If a `rankscope serve` holds the store, the run is read through that server.

    Args:
        run_id: Name of the run, as `rankscope runs` lists it.
        store: URL of the store. None: ``RANKSCOPE_STORE``, or else the store in the data folder.

    Raises:
        UnknownRunError: The store holds no run of this name.
        StoreError: The store could not be opened.
    """
    opened = open_for_reading(store or default_store_url())
    try:
        info = StoreSource(opened).run_info(run_id)
    except BaseException:
        opened.close()
        raise
    return Run(opened, info)


class Run:
    """One run of an open store. Each result is computed at its first use."""

    def __init__(self, store: Store, info: RunInfo) -> None:
        self._store = store
        self._source = StoreSource(store)
        self.info = info
        """Layout, ranks and groups."""

    @cached_property
    def report(self) -> RunReport:
        """The diagnosis of all steps."""
        return analyze_run(self._source, self.info.run_id)

    @cached_property
    def verdict(self) -> str:
        """The diagnosis in one sentence."""
        return verdict_sentence(self.report)

    def spans(self, first: int | None = None, last: int | None = None) -> SpanTable:
        """Return the spans of steps ``first`` to ``last``, both included, as numpy columns."""
        return self._source.spans(self.info.run_id, first=first, last=last)

    def steps(self) -> StepTable:
        """Return one row per (epoch, step, rank)."""
        return self._source.steps(self.info.run_id)

    def timeline(self, step: int, *, epoch: int | None = None) -> StepTimeline:
        """Return one step, each span with its wait and transfer.

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
        return read_operations(self.info, self.spans(), self.steps())

    @cached_property
    def waterfall(self) -> Waterfall:
        """The parts of each rank's step time; see `analysis.breakdown.waterfall.Part`."""
        from rankscope.analysis.breakdown.waterfall import build_waterfall
        from rankscope.analysis.readers.tracer.device_steps import align_steps_to_device

        spans = self.spans()
        steps = align_steps_to_device(spans, self.steps())
        return build_waterfall(self.info, self.reading, spans, steps)

    def critical_path(self, step: int) -> CriticalPath:
        """Return the chain of operations that determines when a step ends.

        Raises:
            EmptyRunError: The step takes no part in the replay.
        """
        from rankscope.analysis.replay.critical_path import critical_path

        return critical_path(self.reading.model, [step])

    def slack(self, step: int) -> Slack:
        """Return how much later each operation could end without delaying the end of the step.

        Raises:
            EmptyRunError: The step takes no part in the replay.
        """
        from rankscope.analysis.replay.critical_path import operation_slack

        return operation_slack(self.reading.model, [step])

    def ideal_timeline(self, step: int) -> IdealTimeline:
        """Return the operations of a step, as recorded and as they would be without any slowness.

        Raises:
            EmptyRunError: The step takes no part in the replay.
        """
        from rankscope.analysis.replay.step_graph import ideal_timeline

        return ideal_timeline(self.reading.model, step)

    def what_if(self, part: Part | NDArray[np.bool_]) -> PartPrice:
        """Return what would be saved if a set of operations were healthy.

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
                part, self.info, self.reading, spans=self.spans() if by_span else None
            )
        return price_part(self.replayer, part)

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
        from rankscope.analysis.replay.what_if import Replayer

        return Replayer(self.reading.model)

    def graph(
        self, step: int | Collection[int], *, ranks: Collection[int] | None = None
    ) -> nx.DiGraph[int]:
        """Return the dependency graph of some steps.

        See `analysis.replay.networkx_graph.dependency_graph`.

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
