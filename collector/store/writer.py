"""Writer of cuts: each row shows once, whatever process dies in between."""

from __future__ import annotations

import time
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rankscope.tracer.span import FLIGHT_RECORDER

from ..arrow_columns import numbers, optional_numbers, to_numpy
from ..wire.codec import TABLES, CutBatch
from .ledger import CutState, Ledger, parts_of, rows_within
from .name_quota import NameQuota
from .owners import SERVER, Owners
from .placements import Placements
from .resume import read_resume

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..identity import Row
    from ..spool.cut import Cut, CutKey, Placement, ProcessFacts, Resume
    from .ledger import CutPlan, Plans
    from .store import Store

SELECT_CLOCKS = """
SELECT host, boot_id, argMin(offset_ns, at_ns) AS offset_ns FROM clock GROUP BY host, boot_id
"""

SELECT_TIMES = """
SELECT run_id, epoch, segment, row, any(start_ns) AS start_ns FROM spans
WHERE (run_id, epoch) IN {epochs:Array(Tuple(String, Int32))}
AND step BETWEEN {first_step:Int32} AND {last_step:Int32}
AND (run_id, epoch, segment) IN {segments:Array(Tuple(String, Int32, UInt64))}
GROUP BY run_id, epoch, segment, row
"""

SIGNS = frozenset({"stalled", "lost", "exit", FLIGHT_RECORDER})
"""Kinds of events that say of a process that it does not go on."""

DAY_NS = 86_400_000_000_000

MANY_SLICES = 64
"""More slices than this are copied together: the engine makes a block of each, and two thousand
blocks of a hundred rows took several times as long as one."""


class StoreWriter:
    """The sink that writes into a store opened by this process. Threads may share it.

    A cut is recorded in the ledger as ``sent`` before its rows are inserted and as ``stored``
    after. A cut found as ``sent`` may have been stored or not: it is inserted again and recorded
    as ``repeated``, and from then on reads of that run remove duplicates. The same is done if
    another collector is about to store the cut.

    All that write to one store in one process must share one writer, or one ledger.

    Args:
        ledger: The store's ledger; None: a new one.
        owner: Owner of the runs of processes that `place` is called for without another.
    """

    def __init__(
        self,
        store: Store,
        *,
        unix_ns: Callable[[], int] = time.time_ns,
        ledger: Ledger | None = None,
        owner: str = SERVER,
    ) -> None:
        self._store = store
        self._unix_ns = unix_ns
        self._ledger = ledger or Ledger(store)
        self._names = NameQuota(store)
        self._placements = Placements(store, unix_ns=unix_ns)
        self._owner = owner
        self.owners = Owners(store, unix_ns=unix_ns)
        self.num_signs: Counter[str] = Counter()
        """Events of `SIGNS` that were stored, by run."""

    def place(
        self,
        processes: Sequence[ProcessFacts],
        may_write: Callable[[str], bool] | None = None,
    ) -> list[Placement | None]:
        """Return where each process is stored, as `Placements.place` decides.

        Args:
            may_write: Returns whether their sender may write to a run; None: the server's own.
        """
        return self._placements.place(
            processes, may_write or (lambda run_id: self.owners.may_write(run_id, self._owner))
        )

    def resume(self, run_id: str) -> Resume:
        """Return what the store holds of a run."""
        return read_resume(self._store, run_id)

    def clocks(self) -> list[Row]:
        """Return the first known clock of each host and boot."""
        return self._store.rows(SELECT_CLOCKS)

    def upsert(self, table: str, rows: Sequence[Row]) -> None:
        """Store descriptions; a row replaces the one with the same identity."""
        self._store.insert_rows(table, rows)
        if table == "events":
            self.num_signs.update(row["run_id"] for row in rows if row["kind"] in SIGNS)

    def ingest(self, cuts: Sequence[Cut]) -> None:
        """Store the rows of cuts with one insert per table."""
        self.store([CutBatch.from_cut(cut) for cut in cuts])

    def store(self, batches: Sequence[CutBatch]) -> list[list[CutState]]:
        """Store the rows of all cuts with one insert per table.

        Returns:
            The state of each cut, by batch. All rows are durable.

        Raises:
            StoreError: The store failed. No cut counts as stored: send all of them again.
        """
        with self._ledger.plan(batches, unix_ns=self._unix_ns) as plans:
            self._insert(batches, plans)
            self._ledger.record(plans, at_ns=self._unix_ns())
        return [[plan.state for plan in batch_plans] for batch_plans in plans]

    def _insert(self, batches: Sequence[CutBatch], plans: Plans) -> None:
        for table in TABLES:
            slices = [
                rows
                for batch, batch_plans in zip(batches, plans, strict=True)
                for rows in _planned_rows(batch, batch_plans, table)
                if rows.num_rows
            ]
            if not slices:
                continue
            whole = pa.concat_tables(slices).unify_dictionaries()
            if len(slices) > MANY_SLICES:
                whole = whole.combine_chunks()
            if table == "spans":
                whole = self._names.limit(whole)
                repeated = (part.key for part in parts_of(plans, CutState.REPEATED))
                whole = with_first_times(self._store, whole, repeated)
                whole = with_day(whole, today=self._unix_ns() // DAY_NS)
            if table == "steps":
                whole = with_unknown_loss(whole)
            self._store.insert_arrow(table, whole)


def with_first_times(store: Store, spans: pa.Table, repeated: Iterable[CutKey]) -> pa.Table:
    """Return the spans with the stored times of those rows that the store holds already.

    A row that is sent again after a collector's death may be stored already. If its sender now
    maps the host's clock differently (an agent that lost its journal, or a second agent on a copy
    of the spool), its time differs; as `start_ns` is in the sort key, both copies would show for
    ever. So a stored row keeps its time, and the copies are one.

    Args:
        repeated: The cuts among them that may be stored already.

    Raises:
        StoreError: The store could not be read.
    """
    segments = sorted({(key.run_id, key.epoch, key.segment) for key in repeated})
    if not segments or not spans.num_rows:
        return spans
    step = to_numpy(spans["step"])
    rows = store.rows(
        SELECT_TIMES,
        {
            "epochs": sorted({(run_id, epoch) for run_id, epoch, _ in segments}),
            "segments": segments,
            "first_step": int(step.min()),
            "last_step": int(step.max()),
        },
    )
    if not rows:
        return spans
    first = {
        (row["run_id"], row["epoch"], row["segment"], row["row"]): row["start_ns"] for row in rows
    }
    identity = (spans[name].to_pylist() for name in ("run_id", "epoch", "segment", "row"))
    own = to_numpy(spans["start_ns"]).tolist()
    start_ns = [
        first.get(row, at) for row, at in zip(zip(*identity, strict=True), own, strict=True)
    ]
    place = spans.schema.get_field_index("start_ns")
    return spans.set_column(place, "start_ns", numbers(np.array(start_ns, dtype=np.int64)))


def with_day(spans: pa.Table, *, today: int) -> pa.Table:
    """Return the spans with their day, with which they expire.

    It is that of their begin, which is the table's default; of a trace that is imported long after,
    or of a host whose clock is wrong, it is the day of their arrival.

    Args:
        today: Day of their arrival, since 1970.
    """
    day = to_numpy(spans["start_ns"]) // DAY_NS
    is_near = np.abs(day - today) <= 1
    if is_near.all():
        return spans
    return spans.append_column("day", numbers(np.where(is_near, day, today), np.int32))


def with_unknown_loss(steps: pa.Table) -> pa.Table:
    """Return the steps with null where a loss is NaN, as the spool has an unknown one."""
    if steps["loss"].null_count:
        return steps
    loss = to_numpy(steps["loss"])
    place = steps.schema.get_field_index("loss")
    return steps.set_column(place, "loss", optional_numbers(loss, ~np.isnan(loss)))


def _planned_rows(batch: CutBatch, plans: list[CutPlan], table: str) -> list[pa.Table]:
    """Return the rows of a batch to insert, without a copy if that is all of them."""
    if all(
        [(part.key.first_row, part.key.end_row) for part in plan.parts]
        == [(key.first_row, key.end_row)]
        for key, plan in zip(batch.keys, plans, strict=True)
    ):
        return [batch.tables[table]]
    slices: list[pa.Table] = []
    for place, plan in enumerate(plans):
        rows = batch.rows(table, place)
        if not plan.parts or not rows.num_rows:
            continue
        is_new = np.zeros(rows.num_rows, dtype=bool)
        for part in plan.parts:
            is_new |= rows_within(rows, part.key.first_row, part.key.end_row)
        slices += [rows] if is_new.all() else _true_slices(rows, is_new)
    return slices


def _true_slices(rows: pa.Table, mask: Any) -> list[pa.Table]:  # noqa: ANN401  # numpy booleans
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    bounds = edges.tolist()
    return [
        rows.slice(first, end - first)
        for place, (first, end) in enumerate(pairwise(bounds))
        if place % 2 == 0
    ]
