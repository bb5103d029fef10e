"""Results of the analysis as Arrow tables, for notebooks: one row per step, rank, finding, ..."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rankscope.analysis.breakdown.mfu import rank_peak
from rankscope.analysis.breakdown.waterfall import PARTS
from rankscope.analysis.report.text import format_count
from rankscope.collector.arrow_columns import numbers, optional_numbers, to_numpy
from rankscope.tracer.span import KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from rankscope.analysis.breakdown.kind_times import KindTimes
    from rankscope.analysis.breakdown.waterfall import Waterfall
    from rankscope.analysis.drawing.timeline import StepTimeline
    from rankscope.analysis.report.report import RunReport
    from rankscope.analysis.trace.context import RankManifest
    from rankscope.analysis.trace.tables import RunInfo, RunSummary, StepTable

SHOWN_ROWS = 20
"""Rows of a table in a cell of a notebook; more would hide the next cell."""

_FINDINGS: dict[str, pa.DataType] = {
    "cause": pa.string(),
    "severity": pa.string(),
    "ranks": pa.list_(pa.int32()),
    "first_step": pa.int32(),
    "last_step": pa.int32(),
    "slowdown": pa.float64(),
    "recoverable_ratio": pa.float64(),
    "saved_s": pa.float64(),
    "confidence": pa.float64(),
    "evidence": pa.string(),
}
_STEPS: dict[str, pa.DataType] = {
    "step": pa.int32(),
    "start_ns": pa.int64(),
    "actual_s": pa.float64(),
    "ideal_s": pa.float64(),
    "slowdown": pa.float64(),
    "mfu": pa.float64(),
    "num_tokens": pa.int64(),
    "loss": pa.float64(),
}
_EVENTS: dict[str, pa.DataType] = {
    "epoch": pa.int32(),
    "rank": pa.int32(),
    "at_ns": pa.int64(),
    "kind": pa.string(),
    "text": pa.string(),
    "data": pa.string(),
}
_SETTINGS: dict[str, pa.DataType] = {
    "setting": pa.string(),
    "value": pa.string(),
    "num_ranks": pa.int32(),
}
_WAITS: dict[str, pa.DataType] = {
    "rank": pa.int32(),
    "on_rank": pa.int32(),
    "on_link": pa.string(),
    "ratio": pa.float64(),
}


def findings_table(report: RunReport) -> pa.Table:
    """Return one row per finding, the verdict's first; unknown values are null."""
    rows = []
    for finding in report.findings:
        row = asdict(finding)
        row["first_step"], row["last_step"] = row.pop("steps") or (None, None)
        rows.append(row | {"ranks": list(finding.ranks)})
    return pa.Table.from_pylist(rows, schema=pa.schema(_FINDINGS))


def step_times_table(report: RunReport, steps: StepTable) -> pa.Table:
    """Return one row per step: its time, the ideal time, MFU, tokens and loss of the whole job.

    ``start_ns`` is when the first rank began it, Unix time by the clocks of the hosts.
    ``num_tokens`` is the sum over the data-parallel and context-parallel positions, and ``loss``
    the mean over the ranks that reported one. Of a repeated step the last epoch counts.
    """
    places = _data_places(report)
    rows = []
    own = _rows_by_step(steps)
    for number, actual_s in sorted(report.actual_s_by_step.items()):
        rank_rows = own.get(number, slice(0, 0))
        loss = steps.loss[rank_rows]
        rows.append(
            {
                "step": number,
                "start_ns": min(steps.start_ns[rank_rows].tolist(), default=None),
                "actual_s": actual_s,
                "ideal_s": report.ideal_s_by_step.get(number),
                "slowdown": report.slowdown_by_step.get(number),
                "mfu": None if report.mfu is None else report.mfu.by_step.get(number),
                "num_tokens": _sum_tokens(places, steps, rank_rows),
                "loss": None if np.isnan(loss).all() else float(np.nanmean(loss)),
            }
        )
    return pa.Table.from_pylist(rows, schema=pa.schema(_STEPS))


def _rows_by_step(steps: StepTable) -> dict[int, slice]:
    """Return the rows of each step; of a repeated step, those of its last epoch."""
    changes = (np.diff(steps.step) != 0) | (np.diff(steps.epoch) != 0)
    borders = [0, *(np.flatnonzero(changes) + 1).tolist(), len(steps)]
    return {
        int(steps.step[begin]): slice(begin, end) for begin, end in pairwise(borders) if end > begin
    }


def _data_places(report: RunReport) -> NDArray[np.int64]:
    """Return a number for each rank, equal for ranks that have the same tokens; -1 if unknown."""
    found = np.full(max(report.coords, default=-1) + 1, -1, dtype=np.int64)
    numbers: dict[tuple[int, int], int] = {}
    for rank, place in report.coords.items():
        found[rank] = numbers.setdefault((place.dp, place.cp), len(numbers))
    return found


def _sum_tokens(places: NDArray[np.int64], steps: StepTable, own: slice) -> int | None:
    rank, tokens = steps.rank[own], steps.num_tokens[own]
    known = (tokens >= 0) & (rank < len(places))
    if not known.any():
        return None
    most = np.zeros(places.max() + 1, dtype=np.int64)
    np.maximum.at(most, places[rank[known]], tokens[known])
    return int(most.sum())


def rank_steps_table(steps: pa.Table) -> pa.Table:
    """Return the steps of each rank with their duration; an unknown loss is null."""
    loss = to_numpy(steps["loss"])
    place = steps.column_names.index("loss")
    duration_ns = to_numpy(steps["end_ns"]) - to_numpy(steps["start_ns"])
    known = steps.set_column(place, "loss", optional_numbers(loss, ~np.isnan(loss)))
    return known.append_column("duration_ns", numbers(duration_ns))


def ranks_table(info: RunInfo, slowdown: dict[int, float | None]) -> pa.Table:
    """Return one row per traced rank: place, host, device and its peak, state, slowdown (S)."""
    return pa.Table.from_pylist(
        [
            {
                "rank": rank,
                **asdict(found.coords),
                "host": found.host,
                "local_rank": found.local_rank,
                "device_name": found.device_name,
                "peak_flops_per_s": rank_peak(found),
                "exit_state": found.exit_state,
                "slowdown": slowdown.get(rank),
            }
            for rank, found in sorted(info.ranks.items())
        ]
    )


def waits_table(report: RunReport) -> pa.Table:
    """Return who waits for whom: shares of the step time, the largest first."""
    rows = [
        {
            "rank": one.rank,
            "on_rank": on.rank,
            "on_link": None if on.link is None else report.name_waited_for(on),
            "ratio": on.ratio,
        }
        for one in report.starved
        for on in one.waits_on
    ]
    return pa.Table.from_pylist(
        sorted(rows, key=lambda row: -row["ratio"]), schema=pa.schema(_WAITS)
    )


def waterfall_table(waterfall: Waterfall) -> pa.Table:
    """Return one row per rank and step: its time, and the parts that sum to it exactly, in ns."""
    ranks, steps = waterfall.total_ns.shape
    columns: dict[str, Any] = {
        "rank": np.repeat(waterfall.ranks, steps),
        "step": np.tile(np.array(waterfall.steps, dtype=np.int32), ranks),
        "total_ns": waterfall.total_ns.ravel(),
    }
    columns |= {f"{part}_ns": waterfall.of(part).ravel() for part in PARTS}
    return pa.table(columns)


def kind_times_table(times: KindTimes) -> pa.Table:
    """Return one row per rank and kind of span of a step, in ns; see `KindTimes`."""
    names = ("rank", "num_spans", "busy_ns", "wait_ns", "transfer_ns", "exposed_ns")
    columns: dict[str, Any] = {name: getattr(times, name) for name in names}
    kinds = [KINDS[code].value for code in times.kind.tolist()]
    return pa.table(columns).add_column(1, "kind", pa.chunked_array([kinds], pa.string()))


def communications_table(timelines: Iterable[StepTimeline]) -> pa.Table:
    """Return one row per communication of a step and rank; see `StepTimeline`."""
    return pa.concat_tables(map(_communications_of_step, timelines))


def _communications_of_step(timeline: StepTimeline) -> pa.Table:
    rows = np.flatnonzero(timeline.communication)
    spans, wait_ns = timeline.spans, timeline.wait_ns[rows]
    known = wait_ns >= 0
    names = ("step", "rank", "start_ns", "duration_ns", "group_id", "seq", "src_rank", "dst_rank")
    columns: dict[str, Any] = {name: getattr(spans, name)[rows] for name in names}
    columns["kind"] = pa.array([KINDS[code].value for code in spans.kind[rows].tolist()])
    columns["name"] = pa.array([spans.names[code] for code in spans.name[rows].tolist()])
    columns["num_bytes"] = optional_numbers(spans.num_bytes[rows], spans.num_bytes[rows] >= 0)
    columns["wait_ns"] = optional_numbers(wait_ns, known)
    columns["transfer_ns"] = optional_numbers(timeline.transfer_ns[rows], known)
    columns["last_rank"] = optional_numbers(timeline.last_rank[rows], known)
    return pa.table(columns)


def events_table(events: Iterable[dict[str, Any]]) -> pa.Table:
    """Return one row per event; its rank is null if it is about the whole job."""
    rows = [row | {"rank": row["rank"] if row["rank"] >= 0 else None} for row in events]
    return pa.Table.from_pylist(rows, schema=pa.schema(_EVENTS))


def settings_table(manifests: Sequence[RankManifest]) -> pa.Table:
    """Return one row per setting and value of the newest epoch, with the number of its ranks."""
    newest = max((one.epoch for one in manifests), default=0)
    counts = Counter(
        item for one in manifests if one.epoch == newest for item in one.settings.items()
    )
    rows = [
        {"setting": name, "value": value, "num_ranks": num}
        for (name, value), num in sorted(counts.items())
    ]
    return pa.Table.from_pylist(rows, schema=pa.schema(_SETTINGS))


def with_steps(samples: pa.Table, steps: StepTable) -> pa.Table:
    """Return samples with the step that had begun last; null before the first."""
    order = np.argsort(steps.start_ns, kind="stable")
    if not len(order):
        return samples.append_column("step", pa.nulls(samples.num_rows, pa.int32()))
    newest = np.maximum.accumulate(steps.epoch[order].astype(np.int64) << 32 | steps.step[order])
    place = np.searchsorted(steps.start_ns[order], to_numpy(samples["at_ns"]), side="right") - 1
    step = (newest[np.maximum(place, 0)] & 0xFFFFFFFF).astype(np.int32)
    return samples.append_column("step", optional_numbers(step, place >= 0))


def runs_table(runs: Iterable[RunSummary]) -> pa.Table:
    """Return one row per run, in their order."""
    found = tuple(runs)
    names = ("source_format", "state", "world_size", "num_spans", "num_steps")
    columns: dict[str, Any] = {"run": pa.array([run.run_id for run in found], pa.string())}
    columns |= {name: [getattr(run, name) for run in found] for name in names}
    started = pa.array([run.started_ns for run in found], pa.int64())
    columns["started"] = started.cast(pa.timestamp("ns", tz="UTC"))
    columns["layout"] = [json.dumps(run.layout.to_dict()) for run in found]
    return pa.table(columns)


def show_tables() -> None:
    """Make a notebook show Arrow tables as tables, unless it has a form for them already.

    Without one, it shows the schema and the columns, each as a list.
    """
    interactive = sys.modules.get("IPython")
    shell = None if interactive is None else interactive.get_ipython()
    if shell is None:
        return
    forms = shell.display_formatter.formatters["text/html"]
    if pa.Table not in forms:
        forms.for_type(pa.Table, table_html)


def table_html(table: pa.Table) -> str:
    """Return the first rows of a table as HTML, all texts escaped."""
    head = "".join(f"<th>{escape(name)}</th>" for name in table.column_names)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(_cell(value))}</td>' for value in row.values())}</tr>"
        for row in table.slice(0, SHOWN_ROWS).to_pylist()
    )
    size = f"{format_count(table.num_rows, 'row')}, {format_count(table.num_columns, 'column')}"
    return f"<table><tr>{head}</tr>{rows}</table><p>{size}</p>"


def _cell(value: object) -> str:
    """Return a value as text: four digits of a fraction, nothing for an unknown one."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
