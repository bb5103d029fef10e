"""Hand the store's columns to the analysis."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rankscope.analysis.trace.context import (
    EventRecord,
    MicrobatchTable,
    RankExit,
    RankManifest,
    RunContext,
    SampleTable,
    empty_samples,
)
from rankscope.analysis.trace.errors import DeletedRunError, UnknownRunError
from rankscope.analysis.trace.tables import EpochInfo, GroupInfo, RankInfo, RunInfo, RunSummary
from rankscope.collector.read.runs import (
    list_runs,
    read_events,
    read_exits,
    read_manifests,
    read_previous_run,
    read_run,
    read_run_names,
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
from rankscope.collector.spool.descriptions import COORD_AXES
from rankscope.tracer.spool import KEPT_REASONS
from rankscope.tracer.topology import Coords, Layout

from .arrow_tables import microbatch_table, sample_table, span_table, step_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rankscope.analysis.trace.tables import SpanTable, StepTable
    from rankscope.collector.identity import Row
    from rankscope.collector.read.runs import RunRows
    from rankscope.collector.store.store import Store

KEPT = frozenset(reason.name.lower().replace("_", "-") for reason in KEPT_REASONS)


class StoreSource:
    """The runs of one store, as `analysis.trace.tables.SpanSource` wants them."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def runs(self) -> tuple[RunSummary, ...]:
        """Return every run, the newest first."""
        return tuple(_summary(row) for row in list_runs(self._store))

    def run_info(self, run_id: str) -> RunInfo:
        """Return what is known of a run besides its spans.

        Raises:
            UnknownRunError: The store holds no run of that name.
            DeletedRunError: It does so no more.
        """
        rows = read_run(self._store, run_id)
        if not rows.epochs:
            raise self._unknown(run_id)
        return run_info_of(run_id, rows)

    def steps(self, run_id: str, *, first: int | None = None, last: int | None = None) -> StepTable:
        """Return the step rows with ``first <= step <= last`` (either end open when None).

        Raises:
            UnknownRunError: The store holds no run of that name.
        """
        table = read_steps(self._store, run_id, first=first, last=last)
        if not table.num_rows:
            self._check_known(run_id)
        return step_table(table)

    def spans(self, run_id: str, *, first: int | None = None, last: int | None = None) -> SpanTable:
        """Return the spans of these steps; spans outside any step are left out.

        Raises:
            UnknownRunError: The store holds no run of that name.
        """
        table = read_spans(self._store, run_id, first=first, last=last)
        if not table.num_rows:
            self._check_known(run_id)
        return span_table(table)

    def context(
        self, run_id: str, *, first: int | None = None, last: int | None = None
    ) -> RunContext:
        """Return what is known around the spans of these steps; empty for an unknown run."""
        return read_context(self._store, run_id, first=first, last=last)

    def _check_known(self, run_id: str) -> None:
        if run_id not in read_run_names(self._store):
            raise self._unknown(run_id)

    def _unknown(self, run_id: str) -> UnknownRunError:
        kind = DeletedRunError if was_deleted(self._store, run_id) else UnknownRunError
        return kind(run_id, read_run_names(self._store))


def _summary(row: Row) -> RunSummary:
    return RunSummary(
        run_id=row["run_id"],
        source_format=row["source_format"],
        state=row["state"],
        world_size=row["world_size"],
        layout=Layout(**row["layout"]),
        num_spans=row["num_spans"],
        num_steps=row["num_steps"],
        started_ns=row["started_ns"],
        num_rows=row["num_rows"],
    )


def run_info_of(run_id: str, rows: RunRows) -> RunInfo:
    """Return what rows of the small tables tell of a run."""
    newest = rows.epochs[-1]
    places = _places(rows)
    flops_per_token = newest["flops_per_token"]
    return RunInfo(
        run_id=run_id,
        source_format=newest["source_format"],
        layout=Layout() if places is None else Layout(**newest["layout"]),
        world_size=newest["world_size"],
        epochs=tuple(_epoch_info(row["epoch"], rows, places) for row in rows.epochs),
        model=json.loads(newest["model"] or "{}").get("name", ""),
        flops_per_token=flops_per_token,
        flops_convention=newest["flops_convention"] if flops_per_token is not None else "",
        paced=any(row["paced"] for row in rows.epochs),
        pace_overrun_ratio=_overrun_ratio(rows.pace),
        num_dropped=sum(
            count
            for row in rows.ranks
            for reason, count in row["dropped"].items()
            if reason not in KEPT
        ),
        num_torn=sum(row["num_torn"] for row in rows.account),
        clock_error_ns=_clock_error_ns(newest["source_format"], rows),
        warnings=_warnings(rows, is_placed=places is not None),
    )


def _warnings(rows: RunRows, *, is_placed: bool) -> tuple[str, ...]:
    found = [f"{row['num_rows']} records were set aside: {row['reason']}" for row in rows.bad]
    found += [_expired_words(row) for row in rows.expired]
    found += _gap_words(rows.gaps)
    if not is_placed:
        untold = (
            "told its parallel layout but not where its ranks stand in it (coords)"
            if rows.epochs[-1]["layout"]
            else "did not tell its parallel layout"
        )
        found.append(
            f"the job {untold}: each rank is taken for a worker of its own,"
            " whose number stands as its dp, and there is no MFU"
        )
    return tuple(found)


def _expired_words(row: Row) -> str:
    kept = zip(row["kept_first"], row["kept_last"], strict=True)
    but = " and ".join(f"{first}-{last}" for first, last in kept)
    return f"the spans of epoch {row['epoch']} up to step {row['last_step']} are kept no longer" + (
        f", but those of the steps around findings: {but}" if but else ""
    )


def _gap_words(gaps: list[Row]) -> list[str]:
    told = [
        f"missing rows {row['gap_first']}..{row['gap_last']} of segment {row['segment']:016x}"
        f" of rank {row['rank']} (epoch {row['epoch']}): later ones came"
        for row in gaps
    ]
    num_more = gaps[0]["num_gaps"] - len(gaps) if gaps else 0
    return [*told, f"{num_more} more ranges of rows are missing"] if num_more else told


def _places(rows: RunRows) -> Mapping[tuple[int, int], Coords] | None:
    """Return where each (epoch, rank) stands; None where one is unknown: the layout is then no use.

    An epoch that ended before its tracer had found the layout has the newest one's places, if it
    was as large: the analysis takes those for all epochs.
    """
    newest = rows.epochs[-1]
    if newest["world_size"] > 1 and not newest["layout"]:
        return None
    size = {row["epoch"]: row["world_size"] for row in rows.epochs}
    told = {_key(row): _coords(row) for row in rows.ranks}
    found = {}
    for (epoch, rank), coords in told.items():
        is_alike = size.get(epoch) == newest["world_size"]
        place = told.get((newest["epoch"], rank)) if coords is None and is_alike else coords
        if place is None:
            return None
        found[epoch, rank] = place
    return found


def _key(row: Row) -> tuple[int, int]:
    return row["epoch"], row["rank"]


def _epoch_info(
    epoch: int, rows: RunRows, places: Mapping[tuple[int, int], Coords] | None
) -> EpochInfo:
    latest = {row["rank"]: row for row in rows.ranks if row["epoch"] == epoch}
    return EpochInfo(
        epoch=epoch,
        ranks=tuple(
            _rank_info(row, Coords(dp=row["rank"]) if places is None else places[_key(row)])
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


def _rank_info(row: Row, coords: Coords) -> RankInfo:
    return RankInfo(
        rank=row["rank"],
        coords=coords,
        host=row["host"],
        local_rank=row["local_rank"],
        switch=row["switch"],
        rack=row["rack"],
        rail=row["rail"],
        device_name=row["device_name"],
        dtype=row["dtype"],
        peak_flops_per_s=row["peak_flops_per_s"],
        exit_state=row["exit_state"],
    )


def _overrun_ratio(pace: list[Row]) -> float | None:
    """Return the worst rank's share of overrun segments; None where nobody told."""
    told = [json.loads(row["data"] or "{}") for row in pace]
    ratios = [
        data["num_overruns"] / data["num_segments"] for data in told if data.get("num_segments")
    ]
    return max(ratios, default=None)


def _clock_error_ns(source_format: str, rows: RunRows) -> int | None:
    """Return the largest error between two ranks' clocks: the two largest bounds together.

    0 where all ranks share one host's clock; None where nobody measured one of them.
    """
    clocks = {(row["host"], row["boot_id"]) for row in rows.ranks}
    if source_format == "rankscope" and len(clocks) == 1:
        return 0
    errors = {(row["host"], row["boot_id"]): row["clock_error_ns"] for row in rows.clocks}
    known = sorted(errors.get(clock, -1) for clock in clocks)
    return sum(known[-2:]) if known and known[0] >= 0 else None


def read_context(store: Store, run_id: str, *, first: int | None, last: int | None) -> RunContext:
    """Return what is known around the spans of steps ``first`` to ``last`` of a run."""
    previous = read_previous_run(store, run_id)
    return RunContext(
        microbatches=_microbatches(store, run_id, first=first, last=last),
        samples=_samples(store, run_id, first=first, last=last),
        events=tuple(event_of(row) for row in read_events(store, run_id)),
        manifests=_manifests(store, run_id),
        exits=_exits(store, run_id),
        previous_manifests=() if previous is None else _manifests(store, previous),
    )


def _microbatches(
    store: Store, run_id: str, *, first: int | None, last: int | None
) -> MicrobatchTable:
    table = read_microbatches(store, run_id, first=first, last=last)
    return microbatch_table(table)


def _samples(store: Store, run_id: str, *, first: int | None, last: int | None) -> SampleTable:
    bounds = read_step_bounds(store, run_id, first=first, last=last)
    if bounds is None:
        return empty_samples()
    table = read_samples(store, run_id, first_ns=bounds[0], last_ns=bounds[1])
    return sample_table(table)


def event_of(row: Row) -> EventRecord:
    """Return a row of ``events``."""
    return EventRecord(
        epoch=row["epoch"],
        rank=row["rank"],
        at_ns=row["at_ns"],
        kind=row["kind"],
        text=row["text"],
        data=_document(row["data"]),
    )


def _manifests(store: Store, run_id: str) -> tuple[RankManifest, ...]:
    return tuple(
        RankManifest(epoch=epoch, rank=rank, settings=settings)
        for epoch, rank, settings in read_manifests(store, run_id)
    )


def _exits(store: Store, run_id: str) -> tuple[RankExit, ...]:
    rows = read_exits(store, run_id)
    epochs = sorted({row["epoch"] for row in rows if row["exit_state"] in DIED})
    steps = {epoch: read_last_steps(store, run_id, epoch) for epoch in epochs[-MAX_EPOCHS:]}
    exits = [exit_of(row, steps.get(row["epoch"], {}).get(row["rank"])) for row in rows]
    return tuple(sorted(exits, key=lambda found: (found.at_ns is None, found.at_ns or 0)))


def exit_of(row: Row, last_step: int | None) -> RankExit:
    """Return how a process ended: its row of ``ranks``, with its exit event's data."""
    data = _document(row["data"])
    exception = data.get("exception") or {}
    step = data.get("step", last_step) if row["exit_state"] in DIED else None
    return RankExit(
        epoch=row["epoch"],
        rank=row["rank"],
        state=row["exit_state"],
        at_ns=row["exit_ns"],
        exception=str(exception.get("type") or ""),
        message=str(exception.get("message") or ""),
        step=step if isinstance(step, int) and step >= 0 else None,
    )


def _document(text: str) -> dict[str, Any]:
    if not text:
        return {}
    found = json.loads(text)
    return found if isinstance(found, dict) else {}


MAX_EPOCHS = 16
"""Newest epochs with a crash whose last steps are looked up: each costs a query."""


DIED = frozenset({"failed", "lost"})
