"""Runs of a store as the analysis reads them."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rankscope.analysis.trace.account import INVALID, TORN, RecordAccount, account_records
from rankscope.analysis.trace.context import (
    EventRecord,
    KernelRecord,
    RankExit,
    RankManifest,
    RunContext,
    SampleTable,
    empty_samples,
)
from rankscope.analysis.trace.errors import DeletedRunError, UnknownRunError
from rankscope.analysis.trace.tables import (
    EpochInfo,
    GroupInfo,
    RankInfo,
    RankMemory,
    RunInfo,
    RunSummary,
)
from rankscope.collector.bounds import COORD_AXES, FLOPS
from rankscope.collector.identity import MAX_INT64
from rankscope.collector.read.kernels import read_step_kernels
from rankscope.collector.read.reports import read_comparable_mfu
from rankscope.collector.read.runs import (
    DIED,
    list_runs,
    read_events,
    read_exits,
    read_manifests,
    read_previous_run,
    read_run,
    read_run_names,
    read_version,
)
from rankscope.collector.read.samples import read_samples
from rankscope.collector.read.spans import read_spans
from rankscope.collector.read.steps import (
    read_last_steps,
    read_microbatches,
    read_step_bounds,
    read_steps,
)
from rankscope.collector.retention.deletion import was_deleted
from rankscope.collector.store.placements import read_notes
from rankscope.tracer.span import NONE
from rankscope.tracer.spool import KEPT_REASONS, drop_name
from rankscope.tracer.topology import Coords, Layout

from .arrow_tables import microbatch_table, sample_table, span_table, step_table
from .frames import find_own_frame, read_frames

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rankscope.analysis.trace.tables import SpanTable, StepTable
    from rankscope.collector.identity import Row
    from rankscope.collector.read.runs import RunRows
    from rankscope.collector.store.store import Store

CONTEXT_LINE = "\nDuring handling of the above exception, another exception occurred:\n"
"""Of Python, in a traceback."""

KEPT = frozenset(map(drop_name, KEPT_REASONS))
AROUND_NS = 10_000_000_000
"""Samples and lines of logs come up to some seconds after the end of a process."""

SUMMARY = (
    "run_id", "source_format", "state", "world_size", "num_spans", "num_steps", "started_ns",
    "num_rows",
)  # fmt: skip
RANK = (
    "rank", "host", "local_rank", "switch", "rack", "rail", "device_name", "dtype",
    "peak_flops_per_s", "exit_state",
)  # fmt: skip
"""Fields of `RunSummary` and `RankInfo` that are columns of the store."""

MAX_EPOCHS = 16
"""Newest crashed epochs whose last steps are read: each takes a query."""


class StoreSource:
    """The runs of a store, as a `analysis.trace.tables.SpanSource`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def runs(self) -> tuple[RunSummary, ...]:
        """Return every run, the newest first."""
        notes = read_notes(self._store)
        return tuple(
            RunSummary(
                **{name: row[name] for name in SUMMARY},
                layout=Layout(**row["layout"]),
                warnings=(notes[row["run_id"]],) if row["run_id"] in notes else (),
            )
            for row in list_runs(self._store)
        )

    def run_info(self, run_id: str) -> RunInfo:
        """Return the description of a run.

        Raises:
            UnknownRunError: The store holds no run of this name.
            DeletedRunError: The run was deleted.
        """
        rows = read_run(self._store, run_id)
        if not rows.epochs:
            raise self._unknown(run_id)
        return build_run_info(run_id, rows)

    def version(self, run_id: str) -> object:
        """Return what changes with the epochs, ranks, exits, groups and events of a run.

        Counts of records do not change it.
        """
        return read_version(self._store, run_id)

    def steps(self, run_id: str, *, first: int | None = None, last: int | None = None) -> StepTable:
        """Return the step rows with ``first <= step <= last`` (None: no limit).

        Raises:
            UnknownRunError: The store holds no run of this name.
        """
        table = read_steps(self._store, run_id, first=first, last=last)
        if not table.num_rows:
            self._check_known(run_id)
        return step_table(table)

    def spans(self, run_id: str, *, first: int | None = None, last: int | None = None) -> SpanTable:
        """Return the spans of these steps, without spans outside any step.

        Raises:
            UnknownRunError: The store holds no run of this name.
        """
        table = read_spans(self._store, run_id, first=first, last=last)
        if not table.num_rows:
            self._check_known(run_id)
        return span_table(table)

    def context(
        self, run_id: str, *, first: int | None = None, last: int | None = None
    ) -> RunContext:
        """Return the context of these steps; empty for an unknown run."""
        return read_context(self._store, run_id, first=first, last=last)

    def _check_known(self, run_id: str) -> None:
        if run_id not in read_run_names(self._store):
            raise self._unknown(run_id)

    def _unknown(self, run_id: str) -> UnknownRunError:
        kind = DeletedRunError if was_deleted(self._store, run_id) else UnknownRunError
        return kind(run_id, read_run_names(self._store))


def build_run_info(run_id: str, rows: RunRows) -> RunInfo:
    """Return the description of a run from its rows of the small tables."""
    newest = rows.epochs[-1]
    coords = _find_coords(rows)
    flops_per_token, model = newest["flops_per_token"], _document(newest["model"])
    config = _document(newest["manifest"]).get("config")
    return RunInfo(
        run_id=run_id,
        source_format=newest["source_format"],
        layout=Layout() if coords is None else Layout(**newest["layout"]),
        world_size=newest["world_size"],
        epochs=tuple(_epoch_info(row["epoch"], rows, coords) for row in rows.epochs),
        model=str(model.get("name") or ""),
        flops_per_token=flops_per_token,
        flops_per_squared_length=_positive(model.get("flops_per_squared_length")),
        flops_per_windowed_length=_positive(model.get("flops_per_windowed_length")),
        recomputed_flops_per_token=_number(model.get("recomputed_flops_per_token")),
        recomputed_attention_ratio=_number(model.get("recomputed_attention_ratio")),
        unknown_flops=str(model.get("unknown_flops") or ""),
        num_parameters=_bytes(model.get("num_parameters")),
        shape=_sizes(model.get("shape")),
        flops_convention=newest["flops_convention"] if flops_per_token is not None else "",
        paced=any(row["paced"] for row in rows.epochs),
        pace_overrun_ratio=_overrun_ratio(rows.pace),
        accounts=_accounts(rows),
        clock_error_ns=_clock_error_ns(newest["source_format"], rows),
        imported=str(config.get("imported") or "") if isinstance(config, dict) else "",
        warnings=_warnings(rows, has_coords=coords is not None),
    )


def _accounts(rows: RunRows) -> dict[tuple[int, int], RecordAccount]:
    """Return the account of each (epoch, rank).

    Cuts with several ranks, of imported and simulated runs, are counted under rank -1. The whole
    epoch then has one account of that rank.
    """
    shared = {row["epoch"] for row in rows.account if row["rank"] == NONE}
    published: dict[tuple[int, int], int | None] = {}
    dropped: dict[tuple[int, int], Counter[str]] = {}
    stored: Counter[tuple[int, int]] = Counter()
    for row in rows.ranks:
        key = (row["epoch"], NONE if row["epoch"] in shared else row["rank"])
        dropped.setdefault(key, Counter()).update(
            {reason: count for reason, count in row["dropped"].items() if reason not in KEPT}
        )
        before, produced = published.get(key, 0), row.get("produced")
        published[key] = None if before is None or produced is None else before + produced
    for row in rows.account:
        key = (row["epoch"], NONE if row["epoch"] in shared else row["rank"])
        dropped.setdefault(key, Counter()).update({TORN: row["num_torn"], INVALID: row["num_bad"]})
        stored[key] += row["num_spans"] + row["num_steps"] + row["num_microbatches"]
    return {
        key: account_records(published=published.get(key), stored=stored[key], dropped=lost)
        for key, lost in sorted(dropped.items())
    }


def _warnings(rows: RunRows, *, has_coords: bool) -> tuple[str, ...]:
    warnings = [
        f"{row['num_rows']} invalid records were stored in table bad_rows: {row['reason']}"
        for row in rows.bad
    ]
    warnings += [f"descriptions were left out: {text}" for text in rows.invalid]
    warnings += rows.notes
    warnings += [_format_expired(row) for row in rows.expired]
    warnings += [
        f"rows {row['gap_first']}..{row['gap_last']} of segment {row['segment']:016x}"
        f" of rank {row['rank']} (epoch {row['epoch']}) are missing, but later rows arrived"
        for row in rows.gaps
    ]
    if rows.gaps and (num_more := rows.gaps[0]["num_gaps"] - len(rows.gaps)):
        warnings.append(f"{num_more} more ranges of rows are missing")
    if not has_coords:
        missing = "coordinates of its ranks" if rows.epochs[-1]["layout"] else "parallel layout"
        warnings.append(
            f"the job declared no {missing}: each rank is treated as its own worker (dp = rank),"
            " and MFU is unknown"
        )
    return tuple(warnings)


def _format_expired(row: Row) -> str:
    kept = zip(row["kept_first"], row["kept_last"], strict=True)
    steps = " and ".join(f"{first}-{last}" for first, last in kept)
    text = f"the spans of epoch {row['epoch']} up to step {row['last_step']} have expired"
    return f"{text}, except those of steps {steps} around findings" if steps else text


def _find_coords(rows: RunRows) -> Mapping[tuple[int, int], Coords] | None:
    """Return the coordinates by (epoch, rank); None if any are unknown, as the layout is useless.

    An epoch that ended before its tracer had found the layout gets the coordinates of the newest
    epoch, if it had as many ranks: the analysis uses those for all epochs.
    """
    newest = rows.epochs[-1]
    if newest["world_size"] > 1 and not newest["layout"]:
        return None
    size = {row["epoch"]: row["world_size"] for row in rows.epochs}
    declared = {_key(row): _coords(row) for row in rows.ranks}
    found = {}
    for (epoch, rank), coords in declared.items():
        if coords is None and size.get(epoch) == newest["world_size"]:
            coords = declared.get((newest["epoch"], rank))  # noqa: PLW2901
        if coords is None:
            return None
        found[epoch, rank] = coords
    return found


def _key(row: Row) -> tuple[int, int]:
    return row["epoch"], row["rank"]


def _epoch_info(
    epoch: int, rows: RunRows, coords: Mapping[tuple[int, int], Coords] | None
) -> EpochInfo:
    latest = {row["rank"]: row for row in rows.ranks if row["epoch"] == epoch}
    errors = {(row["host"], row["boot_id"]): row["clock_error_ns"] for row in rows.clocks}
    return EpochInfo(
        epoch=epoch,
        ranks=tuple(
            _rank_info(
                row,
                Coords(dp=row["rank"]) if coords is None else coords[_key(row)],
                clock_error_ns=errors.get((row["host"], row["boot_id"]), -1),
            )
            for row in latest.values()
        ),
        groups=tuple(
            GroupInfo(
                group_id=row["group_id"],
                kind=row["kind"],
                name=row["name"],
                members=tuple(sorted(row["members"])),
            )
            for row in rows.groups
            if row["epoch"] == epoch
        ),
    )


def _coords(row: Row) -> Coords | None:
    if any(row[axis] < 0 for axis in COORD_AXES):
        return None
    return Coords(**{axis: row[axis] for axis in COORD_AXES})


def _rank_info(row: Row, coords: Coords, *, clock_error_ns: int) -> RankInfo:
    memory = _document(row["memory"])
    return RankInfo(
        **{name: row[name] for name in RANK},
        coords=coords,
        # Ranks of an unknown host share its clock unless their communications contradict that.
        clock=f"{row['host']} {row['boot_id']}" if row["host"] else f"rank {row['rank']}",
        clock_error_ns=clock_error_ns if clock_error_ns >= 0 else None if row["host"] else 0,
        memory=RankMemory(
            **{field.name: _bytes(memory.get(field.name)) for field in fields(RankMemory)}
        ),
    )


def _overrun_ratio(pace: list[Row]) -> float | None:
    """Return the largest ratio of overrun pieces of any rank; None if no rank reported any."""
    reports = [_document(row["data"]) for row in pace]
    ratios = [
        _positive(data.get("num_overruns")) / _positive(data.get("num_segments"))
        for data in reports
        if _positive(data.get("num_segments"))
    ]
    return max(ratios, default=None)


def _clock_error_ns(source_format: str, rows: RunRows) -> int | None:
    """Return the largest error between the clocks of two ranks: the sum of the two largest bounds.

    0 if all ranks share the clock of one host; None if the bound of any clock is unknown.
    """
    clocks = {(row["host"], row["boot_id"]) for row in rows.ranks}
    if source_format == "rankscope" and len(clocks) == 1:
        return 0
    errors = {(row["host"], row["boot_id"]): row["clock_error_ns"] for row in rows.clocks}
    known = sorted(errors.get(clock, -1) for clock in clocks)
    return sum(known[-2:]) if known and known[0] >= 0 else None


def read_context(store: Store, run_id: str, *, first: int | None, last: int | None) -> RunContext:
    """Return the context of steps ``first`` to ``last`` of a run."""
    previous = read_previous_run(store, run_id)
    ended = read_exits(store, run_id)
    epochs = sorted({row["epoch"] for row in ended if row["exit_state"] in DIED})
    steps = {epoch: read_last_steps(store, run_id, epoch) for epoch in epochs[-MAX_EPOCHS:]}
    exits = sorted(
        (to_exit(row, steps.get(row["epoch"], {}).get(row["rank"])) for row in ended),
        key=lambda found: (found.at_ns is None, found.at_ns or 0),
    )
    return RunContext(
        microbatches=microbatch_table(read_microbatches(store, run_id, first=first, last=last)),
        samples=_samples(store, run_id, first=first, last=last, exits=exits),
        events=tuple(to_event(row) for row in read_events(store, run_id)),
        kernels=kernel_records(store, run_id, first=first, last=last),
        manifests=_manifests(store, run_id),
        exits=tuple(exits),
        previous_manifests=() if previous is None else _manifests(store, previous),
        previous_mfu=None if previous is None else read_comparable_mfu(store, run_id, previous),
    )


def kernel_records(
    store: Store, run_id: str, *, first: int | None, last: int | None, rank: int = NONE
) -> tuple[KernelRecord, ...]:
    """Return the kernels of steps ``first`` to ``last``, of all ranks or of one."""
    rows = read_step_kernels(store, run_id, first=first, last=last, rank=rank)
    return tuple(KernelRecord(**row) for row in rows)


def _samples(
    store: Store, run_id: str, *, first: int | None, last: int | None, exits: Sequence[RankExit]
) -> SampleTable:
    """Return the samples of these steps; with the last ones, those until its processes died."""
    bounds = read_step_bounds(store, run_id, first=first, last=last)
    if bounds is None:
        return empty_samples()
    died = (ended.at_ns for ended in exits if ended.state in DIED and last is None)
    until_ns = max([bounds[1], *(at_ns + AROUND_NS for at_ns in died if at_ns is not None)])
    table = read_samples(store, run_id, first_ns=bounds[0], last_ns=until_ns)
    return sample_table(table)


def to_event(row: Row) -> EventRecord:
    """Return the event of a row of table ``events``."""
    data = _document(row["data"])
    return EventRecord(
        epoch=row["epoch"],
        rank=row["rank"],
        at_ns=row["at_ns"],
        kind=row["kind"],
        text=row["text"],
        data=data,
        place=find_own_frame(read_frames(row["kind"], data)),
    )


def _manifests(store: Store, run_id: str) -> tuple[RankManifest, ...]:
    return tuple(
        RankManifest(epoch=epoch, rank=rank, settings=settings)
        for epoch, rank, settings in read_manifests(store, run_id)
    )


def to_exit(row: Row, last_step: int | None) -> RankExit:
    """Return the end of a process from its row of table ``ranks`` and the data of its exit event.

    Args:
        last_step: The last step of the rank; used if the event has no step.
    """
    data = _document(row["data"])
    exception = data.get("exception")
    exception = exception if isinstance(exception, dict) else {}
    step = data.get("step", last_step) if row["exit_state"] in DIED else None
    return RankExit(
        epoch=row["epoch"],
        rank=row["rank"],
        state=row["exit_state"],
        at_ns=row["exit_ns"],
        at_error_ns=_whole(data.get("at_error_ns")),
        exception=str(exception.get("type") or ""),
        message=str(exception.get("message") or ""),
        origin=_origin(exception),
        step=step if isinstance(step, int) and step >= 0 else None,
        recorded_ns=_whole(data.get("recorded_ns")) or None,
        exit_code=code if isinstance(code := data.get("exit_code"), int) else None,
    )


def _whole(value: object) -> int:
    """Return a number of an event's data; 0 if it is missing or malformed."""
    return value if isinstance(value, int) else 0


def _positive(value: Any) -> float:  # noqa: ANN401  # any JSON value
    """Return a number of a job's document; 0 if it is missing, malformed or out of bounds."""
    return float(value) if value is not None and FLOPS.find_problem(value) is None else 0.0


def _number(value: Any) -> float | None:  # noqa: ANN401
    """Return a number of a job's document, which may be 0; None if it is none."""
    return 0.0 if type(value) in {int, float} and value == 0 else _positive(value) or None


def _bytes(value: Any) -> int | None:  # noqa: ANN401
    """Return a count of a job's document; None if it is none."""
    return value if type(value) is int and 0 <= value <= MAX_INT64 else None


def _sizes(value: Any) -> dict[str, object]:  # noqa: ANN401
    """Return the sizes and settings of a job's document that are numbers or booleans."""
    document = value if isinstance(value, dict) else {}
    return {
        name: size
        for name, size in document.items()
        if type(size) is bool or _bytes(size) is not None
    }


def _origin(exception: Row) -> str:
    """Return the first exception in whose handler a later one was raised; "" if there is none."""
    contexts = exception.get("contexts")
    if isinstance(contexts, list) and contexts and isinstance(contexts[-1], dict):
        return f"{contexts[-1].get('type', '')}: {contexts[-1].get('message', '')}"
    # Other writers have the traceback alone. Behind its frames, which are indented, is the text.
    first, found, _ = str(exception.get("traceback") or "").partition(CONTEXT_LINE)
    return re.split(r"(?m)^  .*\n", first)[-1].strip() if found else ""


def _document(text: str) -> dict[str, Any]:
    """Return the document of a text; empty if it is none."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
