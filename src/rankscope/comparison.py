"""Differences between two runs, or between two ranges of steps of one run."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from rankscope.analysis.analyze import analyze_run
from rankscope.analysis.breakdown.kernel_changes import compare_kernels
from rankscope.analysis.causes.misconfiguration import common_settings
from rankscope.analysis.report.text import format_change, format_count
from rankscope.analysis.statistics.step_change import StepChange, compare_step_times
from rankscope.collector.arrow_columns import optional_numbers, strings
from rankscope.collector.client.served_store import open_for_reading
from rankscope.collector.store.location import default_store_url

from .sources.result_tables import findings_table, show_tables, table_html
from .sources.store_source import StoreSource

if TYPE_CHECKING:
    from collections.abc import Sequence

    import plotly.graph_objects as go

    from rankscope.analysis.report.report import RunReport
    from rankscope.analysis.trace.tables import SpanSource
    from rankscope.collector.arrow_columns import Column

Steps = tuple[int, int]

_KERNELS: dict[str, pa.DataType] = {
    **dict.fromkeys(("phase", "stream", "name", "change"), pa.string()),
    **dict.fromkeys(("first_num", "first_seconds", "second_num", "second_seconds"), pa.float64()),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two reports side by side."""

    first: RunReport
    second: RunReport
    settings: pa.Table
    """Settings that most ranks of a run share and that differ: setting, first, second (null: not
    set). The place to look first."""

    @property
    def step_change(self) -> StepChange:
        """Change of the mean step time, and whether that is more than noise."""
        first, second = (
            [each for step in report.steps if (each := report.actual_s_by_step.get(step))]
            for report in (self.first, self.second)
        )
        return compare_step_times(first, second)

    def numbers(self) -> pa.Table:
        """Return the numbers of both: quantity, first, second, ratio (second / first).

        ``time.PART`` is the mean time of a rank in a step by part of the waterfall, in s.
        """
        values = _numbers(self.first), _numbers(self.second)
        names = [*values[0], *(name for name in values[1] if name not in values[0])]
        first, second = ([one.get(name) for name in names] for one in values)
        pairs = zip(first, second, strict=True)
        ratio = [b / a if a and b is not None else None for a, b in pairs]
        # Not `pa.array`, which imports pandas: plotly fails in another thread meanwhile.
        return pa.table(
            {
                "quantity": strings(names),
                "first": _optional_numbers(first),
                "second": _optional_numbers(second),
                "ratio": _optional_numbers(ratio),
            }
        )

    def kernels(self) -> pa.Table:
        """Return the kernels that differ, the largest differences in time first.

        Columns: phase, stream, name, change, and of each run the launches and seconds per step of
        a rank, null if it has none. Empty if not both are profiles.
        """
        rows = [
            {
                **{name: getattr(each.kernel, name) for name in ("phase", "stream", "name")},
                "change": each.change,
                **{
                    f"{of}_{name}": None if one is None else getattr(one, name)
                    for of, one in (("first", each.first), ("second", each.second))
                    for name in ("num", "seconds")
                },
            }
            for each in compare_kernels(self.first.kernels, self.second.kernels)
        ]
        return pa.Table.from_pylist(rows, schema=pa.schema(_KERNELS))

    def findings(self) -> pa.Table:
        """Return the findings of both; column ``of`` is ``first`` or ``second``."""
        tables = []
        for name, report in (("first", self.first), ("second", self.second)):
            found = findings_table(report)
            names = pa.chunked_array([[name] * found.num_rows], pa.string())
            tables.append(found.add_column(0, "of", names))
        return pa.concat_tables(tables)

    def figure_steps(self) -> go.Figure:
        """Draw the step times of both from their first step on, as the page Compare does."""
        from rankscope.dashboard.pages.compare import compared_steps_figure

        return compared_steps_figure(self.first, self.second, (self.first.run, self.second.run))

    def _repr_html_(self) -> str:
        """Return the difference in one sentence, the changed settings and the numbers."""
        tables = [table_html(one) for one in (self.settings, self.numbers()) if one.num_rows]
        return f"<p><b>{escape(repr(self)[1:-1])}</b></p>{''.join(tables)}"

    def __repr__(self) -> str:
        return (
            f"<{self.second.run} against {self.first.run}:"
            f" a step is {format_change(self.step_change.ratio)},"
            f" {format_count(self.settings.num_rows, 'setting')} changed>"
        )


def compare(
    first: str,
    second: str,
    *,
    first_steps: Steps | None = None,
    second_steps: Steps | None = None,
    store: str | None = None,
) -> Comparison:
    """Compare two runs, or two ranges of steps of one run.

    Example:
        >>> rankscope.compare("monday", "tuesday").numbers().to_pandas()
        >>> rankscope.compare("tuesday", "tuesday", first_steps=(0, 5), second_steps=(6, 12))

    Args:
        first: Run to compare with.
        second: Run that is compared.
        first_steps: First and last step of the first run that count. None: all.
        second_steps: The same of the second.
        store: URL of the store, as in `rankscope.open_run`.

    Raises:
        UnknownRunError: The store holds no run of one of these names.
        StoreError: The store could not be opened.
    """
    show_tables()
    with open_for_reading(store or default_store_url()) as opened:
        source = StoreSource(opened)
        reports = []
        for run, steps in ((first, first_steps), (second, second_steps)):
            begin, end = steps or (None, None)
            reports.append(analyze_run(source, run, first=begin, last=end))
        return compare_reports(source, reports[0], reports[1])


def compare_reports(source: SpanSource, first: RunReport, second: RunReport) -> Comparison:
    """Compare two reports; the settings of their runs are read."""
    settings = [_settings(source, one.run) for one in (first, second)]
    names = sorted(
        name
        for name in {*settings[0], *settings[1]}
        if settings[0].get(name) != settings[1].get(name)
    )
    table = {
        "setting": strings(names),
        "first": strings([settings[0].get(name) for name in names]),
        "second": strings([settings[1].get(name) for name in names]),
    }
    return Comparison(first=first, second=second, settings=pa.table(table))


def _optional_numbers(values: Sequence[float | None]) -> Column:
    known = np.array([value is not None for value in values], dtype=np.bool_)
    return optional_numbers(np.array([value or 0.0 for value in values]), known)


def _settings(source: SpanSource, run: str) -> dict[str, str]:
    """Return the settings of most ranks of the newest epoch."""
    manifests = source.context(run, first=0, last=0).manifests
    newest = max((one.epoch for one in manifests), default=0)
    return common_settings([one for one in manifests if one.epoch == newest])


def _numbers(report: RunReport) -> dict[str, float | None]:
    times = report.step_time_s
    found: dict[str, float | None] = {
        "step time, s": times.actual,
        "ideal step time, s": report.reachable_step_s,
        "slowdown S": report.slowdown,
        "launch slowdown": report.launch_slowdown,
        "MFU": None if report.mfu is None else report.mfu.mean,
        "ranks": float(report.world_size),
    }
    if report.waterfall is not None and times.actual is not None:
        for part, ratio in report.waterfall.mean_ratio.items():
            found[f"time.{part}, s"] = None if ratio is None else ratio * times.actual
    return found
