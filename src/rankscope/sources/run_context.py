"""Hand what the store knows around a run's spans to the analysis."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rankscope.analysis.trace.context import (
    EventRecord,
    RankExit,
    RankManifest,
    RunContext,
    no_samples,
)
from rankscope.collector.read.runs import (
    read_events,
    read_exits,
    read_last_steps,
    read_microbatches,
    read_step_bounds,
)
from rankscope.collector.read.samples import read_samples
from rankscope.collector.spool.manifests import previous_run, read_manifests

from .arrow_tables import microbatch_table, sample_table

if TYPE_CHECKING:
    from rankscope.analysis.trace.context import MicrobatchTable, SampleTable
    from rankscope.collector.store.store import Row, Store

DIED = frozenset({"failed", "lost"})
MAX_EPOCHS = 16
"""Newest epochs with a crash whose last steps are looked up: each costs a query."""


def read_context(store: Store, run_id: str, *, first: int | None, last: int | None) -> RunContext:
    """Return what is known around the spans of steps ``first`` to ``last`` of a run."""
    previous = previous_run(store, run_id)
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
        return no_samples()
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
