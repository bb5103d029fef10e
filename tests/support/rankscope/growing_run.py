"""A simulated run in a store that grows, as that of a live job does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .incident_runs import store_run

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store

RUN = "live"
WHOLE = "whole"
NUM_STEPS = 12

COPY = """
INSERT INTO {table} SELECT * REPLACE ({changes}) FROM (
    SELECT * FROM {table} FINAL WHERE run_id = 'whole' AND {condition}
)
"""


def begin_run(store: Store, *faults: str, num_steps: int) -> None:
    """Store a running job with its first steps."""
    store_run(store, WHOLE, *faults, num_steps=NUM_STEPS)
    for table in ("ranks", "groups", "manifests", "ledger"):
        store.command(_copy(table))
    _add_steps(store, 0, num_steps)
    store.command(_copy("runs", state="running"))


def end_run(store: Store, *, num_stored: int) -> None:
    """Store the other steps, and end the job."""
    _add_steps(store, num_stored, NUM_STEPS)
    store.command(_copy("runs", state="ended"))


def _add_steps(store: Store, begin: int, end: int) -> None:
    for table in ("spans", "steps", "microbatches"):
        store.command(_copy(table, condition=f"step >= {begin} AND step < {end}"))


def _copy(table: str, *, state: str | None = None, condition: str = "1") -> str:
    changes = f"'{RUN}' AS run_id"
    if state is not None:
        changes += f", '{state}' AS state, toUnixTimestamp64Nano(now64(9)) AS created_ns"
    return COPY.format(table=table, changes=changes, condition=condition)
