"""A job that trains on while a test looks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankscope.analysis.trace.context import RunContext
    from rankscope.analysis.trace.tables import RunInfo, SpanTable, StepTable
    from tests.support.analysis.cluster import Source


@dataclass
class Training:
    """A source that has seen the run up to step ``newest``."""

    whole: Source
    newest: int = -1
    num_looks: int = 0
    reads: list[tuple[int | None, int | None]] = field(default_factory=list)

    def runs(self) -> tuple[()]:
        return ()

    def run_info(self, run_id: str) -> RunInfo:
        self.num_looks += 1
        return self.whole.run_info(run_id)

    def steps(self, run_id: str, *, first: int | None = None, last: int | None = None) -> StepTable:
        return self.whole.steps(run_id, first=first, last=self._last(last))

    def spans(self, run_id: str, *, first: int | None = None, last: int | None = None) -> SpanTable:
        self.reads.append((first, last))
        return self.whole.spans(run_id, first=first, last=self._last(last))

    def context(
        self, run_id: str, *, first: int | None = None, last: int | None = None
    ) -> RunContext:
        return self.whole.context(run_id, first=first, last=self._last(last))

    def _last(self, last: int | None) -> int:
        return self.newest if last is None else min(last, self.newest)
