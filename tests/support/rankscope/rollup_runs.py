"""A small run in a store, and its expected rollups."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any

from rankscope.analysis.breakdown.kind_times import sum_kind_times
from rankscope.analysis.drawing.timeline import read_timeline
from rankscope.server.rollups import Rollups
from rankscope.sources.store_source import StoreSource
from rankscope.tracer.span import KINDS, NONE

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store

RANKS = (0, 1)
GROUP = 7
SELECT_ROLLUPS = """
SELECT epoch, step, rank, kind, num_spans, num_unsplit, busy_ns, wait_ns, transfer_ns, exposed_ns
FROM rollups FINAL WHERE run_id = {run_id:String} ORDER BY epoch, step, rank, kind
"""
MS = 1_000_000
NUM_STEPS = 3
_NUMBERS = itertools.count()


def new_number() -> int:
    """Return a number that is unique in this process."""
    return next(_NUMBERS)


def untimed_rollups(store: Store, **options: Any) -> Rollups:  # noqa: ANN401 -- those of Rollups
    """Return rollups whose turns never run out of time, because their clock stops."""
    return Rollups(store, monotonic_ns=lambda: 0, **options)


def describe(store: Store, run_id: str, *, state: str = "ended") -> None:
    """Store the run and its group."""
    store.insert_rows(
        "runs",
        [
            {
                "run_id": run_id, "state": state, "source_format": "rankscope", "world_size": 2,
                "layout": {"dp": 2}, "created_ns": time.time_ns(),
                "revision": 1 + (state == "ended"),
            }
        ],
    )  # fmt: skip
    store.insert_rows(
        "groups",
        [{"run_id": run_id, "group_id": GROUP, "kind": "dp-comm", "members": list(RANKS)}],
    )


def span_rows(run_id: str, *, num_steps: int = NUM_STEPS) -> list[dict[str, Any]]:
    """Return a forward and an all-reduce of each rank and step; rank 1 computes longer."""
    rows = []
    for step, rank in itertools.product(range(num_steps), RANKS):
        begin, own = step * 100 * MS, (40 + 30 * rank + step) * MS
        whole = {"run_id": run_id, "step": step, "rank": rank, "segment": rank + 1}
        forward = {"kind": "forward", "start_ns": begin, "duration_ns": own, "seq": NONE}
        comm = {
            "kind": "dp-comm", "start_ns": begin + own, "duration_ns": 90 * MS - own,
            "seq": step, "group_id": GROUP,
        }  # fmt: skip
        for place, one in enumerate((forward, comm)):
            ends = {"src_rank": NONE, "dst_rank": NONE}
            rows.append({**whole, **one, **ends, "row": 2 * step + place})
    return rows


def put(store: Store, run_id: str, rows: list[dict[str, Any]]) -> None:
    """Store spans as one cut, which is marked as repeated: some rows may be stored twice."""
    store.insert_rows("spans", rows)
    cut = {"run_id": run_id, "segment": new_number(), "num_spans": len(rows), "revision": 2}
    store.insert_rows("ledger", [{**cut, "state": "repeated"}])


def read_rolled_up(store: Store, run_id: str) -> list[dict[str, Any]]:
    """Return the stored rollups of a run."""
    return store.rows(SELECT_ROLLUPS, {"run_id": run_id})


def computed_anew(store: Store, run_id: str) -> list[dict[str, Any]]:
    """Compute the rollups of a run from all of its spans."""
    found = []
    source = StoreSource(store)
    for step in sorted(set(source.spans(run_id).step.tolist())):
        times = sum_kind_times(read_timeline(source, run_id, epoch=0, step=step))
        for place in range(len(times)):
            numbers = {
                name: int(getattr(times, name)[place])
                for name in (
                    "num_spans", "num_unsplit", "busy_ns", "wait_ns", "transfer_ns", "exposed_ns"
                )
            }  # fmt: skip
            found.append(
                {
                    "epoch": 0, "step": step, "rank": int(times.rank[place]),
                    "kind": KINDS[int(times.kind[place])].value, **numbers,
                }
            )  # fmt: skip
    return sorted(found, key=lambda row: (row["step"], row["rank"], row["kind"]))
