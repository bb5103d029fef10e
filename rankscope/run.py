"""One stored run, opened for a notebook or a script."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Self

from analysis.analyze import analyze_run
from analysis.timeline import step_timeline
from analysis.verdict import verdict_sentence
from collector.location import default_store_url
from collector.store import open_store
from rankscope.source import StoreSource

if TYPE_CHECKING:
    from types import TracebackType

    import networkx as nx

    from analysis.report import RunReport
    from analysis.source import RunInfo, SpanTable, StepTable
    from analysis.timeline import StepTimeline
    from collector.store import Store


def open_run(run_id: str, *, store: str | None = None) -> Run:
    """Open a stored run for reading; close it, or leave its ``with`` block, to free the store.

    An embedded store has one owner at a time: stop a `rankscope serve` on it first.

    Args:
        run_id: Name of the run, as `rankscope runs` lists it.
        store: URL of the store; None: ``RANKSCOPE_STORE``, else the one in the data folder.

    Raises:
        UnknownRunError: The store holds no run of that name.
        StoreError: The store could not be opened.
    """
    opened = open_store(store or default_store_url())
    try:
        info = StoreSource(opened).run_info(run_id)
    except BaseException:
        opened.close()
        raise
    return Run(opened, info)


class Run:
    """One run of an open store. Results are computed when first asked for."""

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
            step: Its number.
            epoch: Of which incarnation; None: the last.

        Raises:
            EmptyRunError: The step holds no spans.
        """
        last = max(known.epoch for known in self.info.epochs)
        chosen = last if epoch is None else epoch
        return step_timeline(self._source, self.info.run_id, epoch=chosen, step=step)

    def graph(self, step: int) -> nx.DiGraph[int]:
        """Return who waits for whom in one step; see `analysis.graph.dependency_graph`.

        Raises:
            EmptyRunError: The step takes no part in the replay.
            GraphTooLargeError: It is too large for a graph of Python objects.
        """
        from analysis.analyze import read_run
        from analysis.graph import dependency_graph

        reading = read_run(self.info, self.spans(step, step), self._steps_of(step))
        return dependency_graph(reading.model, step)

    def _steps_of(self, step: int) -> StepTable:
        return self._source.steps(self.info.run_id, first=step, last=step)

    def close(self) -> None:
        """Free the store. Safe to repeat; results that were computed stay."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<run {self.info.run_id!r}: {self.info.world_size} ranks>"
