"""Write cuts into the store so that each row shows once, whatever dies in between."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ..arrow_columns import numbers, to_numpy
from ..spool.cut import CutKey, Resume
from ..wire.codec import TABLES, CutBatch
from .ledger import SENT, Ledger, Piece, Range, missing, segment_key
from .name_cap import NameCap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ..identity import Row
    from ..spool.cut import Cut
    from .ledger import SegmentKey
    from .store import Store

SELECT_STORED = """
SELECT
    segment,
    if(countIf(first_row > before) > 0, minIf(before, first_row > before), max(end_row)) AS end_row
FROM (
    SELECT segment, first_row, end_row, max(end_row) OVER (
        PARTITION BY segment ORDER BY first_row, end_row
        ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
    ) AS before
    FROM ledger FINAL
    WHERE run_id = {run_id:String} AND state != 'sent' AND first_row < end_row
) GROUP BY segment
"""

SELECT_UNANSWERED = """
SELECT epoch, rank, process, segment, first_row, end_row FROM ledger FINAL
WHERE run_id = {run_id:String} AND state = 'sent' ORDER BY epoch, rank, segment, first_row
"""

SELECT_FORMAT = """
SELECT argMax(source_format, revision) AS source_format, count() AS num_runs FROM runs
WHERE run_id = {run_id:String}
"""

SELECT_CLOCKS = """
SELECT host, boot_id, argMin(offset_ns, at_ns) AS offset_ns FROM clock GROUP BY host, boot_id
"""

WRITER_BYTES = 8

UNKNOWN_HASH = ""
"""Of a part of a cut: the cut's own hash is of other bytes, so it must refuse nobody who sends
exactly that part."""

MANY_PARTS = 64
"""More slices than this are copied together: the engine takes each for a block of its own, and
two thousand blocks of a hundred rows took several times as long as one."""


SELECT_TIMES = """
SELECT run_id, epoch, segment, row, any(start_ns) AS start_ns FROM spans
WHERE (run_id, epoch) IN {epochs:Array(Tuple(String, Int32))}
AND step BETWEEN {first_step:Int32} AND {last_step:Int32}
AND (run_id, epoch, segment) IN {segments:Array(Tuple(String, Int32, UInt64))}
GROUP BY run_id, epoch, segment, row
"""


class CutState(StrEnum):
    """What became of a cut; the spelling is the ledger's and the answer's."""

    STORED = "stored"
    """Its rows are there, once."""

    REPEATED = "repeated"
    """Its rows are there, perhaps twice: reads remove duplicates."""

    DUPLICATE = "duplicate"
    """Its rows were there before; nothing was written."""

    CONFLICT = "conflict"
    """Other rows were stored under its key before; nothing was written."""


@dataclass(slots=True)
class _Planned:
    """What is to be done with one cut."""

    state: CutState
    pieces: list[Piece]


class StoreWriter:
    """The sink that writes into a store of this process.

    A cut is noted in the ledger as ``sent`` before its rows go in and as ``stored`` after. One
    that is found ``sent`` may or may not have arrived: it is written again and noted as
    ``repeated``, and reads of that run remove duplicates from then on. So it is with a cut
    that another collector set out to store too.

    All that write to one store in one process share one writer; threads may.

    Args:
        store: An open store.
        unix_ns: Clock for when rows were written.
        ledger: The store's ledger; None: a new one.
    """

    def __init__(
        self,
        store: Store,
        *,
        unix_ns: Callable[[], int] = time.time_ns,
        ledger: Ledger | None = None,
    ) -> None:
        self._store = store
        self._unix_ns = unix_ns
        self._ledger = ledger or Ledger(store)
        self._names = NameCap(store)
        # Anew at each start: what an earlier life of this process set out to do is a rival's.
        self._writer = secrets.token_hex(WRITER_BYTES)

    def resume(self, run_id: str) -> Resume:
        """Return what the store holds of a run."""
        bound = {"run_id": run_id}
        stored = {row["segment"]: row["end_row"] for row in self._store.rows(SELECT_STORED, bound)}
        unanswered = tuple(
            CutKey(run_id=run_id, **row)
            for row in self._store.rows(SELECT_UNANSWERED, bound)
            if row["end_row"] > stored.get(row["segment"], 0)
        )
        found = self._store.rows(SELECT_FORMAT, bound)[0]
        return Resume(
            end_rows=stored,
            unanswered=unanswered,
            source_format=found["source_format"] if found["num_runs"] else None,
        )

    def clocks(self) -> list[Row]:
        """Return the host clocks that the store knows."""
        return self._store.rows(SELECT_CLOCKS)

    def upsert(self, table: str, rows: Sequence[Row]) -> None:
        """Store descriptions; a row replaces the one with the same identity."""
        self._store.insert_rows(table, rows)

    def ingest(self, cuts: Sequence[Cut]) -> None:
        """Store the rows of these cuts in one insert a table."""
        self.store([CutBatch.from_cut(cut) for cut in cuts])

    def store(self, batches: Sequence[CutBatch]) -> list[list[CutState]]:
        """Store the rows of all these cuts in one insert a table.

        Returns:
            What became of each cut, by batch; all is durable.

        Raises:
            StoreError: The store failed. None of the cuts counts as stored; come again with all.
        """
        # A rival in this process is waited for, one elsewhere is seen by its attempt.
        with self._ledger.alone(key for batch in batches for key in batch.keys):
            plans = self._stored(batches)
        return [[plan.state for plan in of_batch] for of_batch in plans]

    def _stored(self, batches: Sequence[CutBatch]) -> list[list[_Planned]]:
        plans = self._plan(batches)
        fresh = _pieces(plans, CutState.STORED)
        self._ledger.note(fresh, state=SENT, revision=1, at_ns=self._unix_ns())
        self._look_for_rivals(plans)
        again = _pieces(plans, CutState.REPEATED)
        self._ledger.doubt(again, at_ns=self._unix_ns())
        self._insert(batches, plans)
        at_ns = self._unix_ns()
        stored = _pieces(plans, CutState.STORED)
        self._ledger.note(stored, state=CutState.STORED, revision=2, at_ns=at_ns)
        self._ledger.note(again, state=CutState.REPEATED, revision=3, at_ns=at_ns)
        return plans

    def _plan(self, batches: Sequence[CutBatch]) -> list[list[_Planned]]:
        held = self._ledger.held(key for batch in batches for key in batch.keys)
        return [
            [_planned(batch, place, held) for place in range(len(batch.keys))] for batch in batches
        ]

    def _look_for_rivals(self, plans: list[list[_Planned]]) -> None:
        """Turn what another collector is storing too into a repetition."""
        if not self._ledger.has_rivals:
            return
        pieces = [piece for plan in _flat(plans) for piece in plan.pieces]
        if not pieces:
            return
        self._ledger.attempt(pieces, writer=self._writer, at_ns=self._unix_ns())
        rivals = self._ledger.rivals(pieces, writer=self._writer)
        for plan in _flat(plans):
            if plan.state is CutState.STORED and _is_rivalled(plan.pieces, rivals):
                plan.state = CutState.REPEATED

    def _insert(self, batches: Sequence[CutBatch], plans: list[list[_Planned]]) -> None:
        for table in TABLES:
            parts = [
                part
                for batch, of_batch in zip(batches, plans, strict=True)
                for part in _new_rows(batch, of_batch, table)
                if part.num_rows
            ]
            if not parts:
                continue
            whole = pa.concat_tables(parts).unify_dictionaries()
            if len(parts) > MANY_PARTS:
                whole = whole.combine_chunks()
            if table == "spans":
                whole = self._names.capped(whole)
                again = (piece.key for piece in _pieces(plans, CutState.REPEATED))
                whole = with_first_times(self._store, whole, again)
            self._store.insert_arrow(table, whole)


def _pieces(plans: list[list[_Planned]], state: CutState) -> list[Piece]:
    return [piece for plan in _flat(plans) if plan.state is state for piece in plan.pieces]


def _flat(plans: list[list[_Planned]]) -> Iterable[_Planned]:
    return (plan for of_batch in plans for plan in of_batch)


def _planned(batch: CutBatch, place: int, held: dict[SegmentKey, list[Range]]) -> _Planned:
    """Decide on one cut, and put what it will hold among what is held."""
    key, sha256 = batch.keys[place], batch.sha256[place]
    known = held.setdefault(segment_key(key), [])
    overlapping = [part for part in known if part.overlaps(key.first_row, key.end_row)]
    settled = [part for part in overlapping if part.state != SENT]
    for part in settled:
        if (part.first_row, part.end_row) == (key.first_row, key.end_row):
            is_same = part.sha256 in {sha256, UNKNOWN_HASH}
            state = CutState.DUPLICATE if is_same else CutState.CONFLICT
            return _Planned(state, [])
    gaps = missing(key.first_row, key.end_row, settled)
    if not gaps:
        return _Planned(CutState.DUPLICATE, [])
    is_again = len(settled) < len(overlapping)
    state = CutState.REPEATED if is_again else CutState.STORED
    if gaps == [(key.first_row, key.end_row)]:
        known.append(Range(key.first_row, key.end_row, sha256, state))
        return _Planned(state, [_whole_piece(batch, place)])
    known += [Range(first, end, UNKNOWN_HASH, state) for first, end in gaps]
    return _Planned(state, [_part_piece(batch, place, first, end) for first, end in gaps])


def _whole_piece(batch: CutBatch, place: int) -> Piece:
    key = batch.keys[place]
    num_rows = {table: int(ends[place + 1] - ends[place]) for table, ends in batch.offsets.items()}
    # A sender that left rows out without a word would make the account say that all are there.
    num_missing = key.end_row - key.first_row - sum(num_rows.values())
    return Piece(
        key=key,
        sha256=batch.sha256[place],
        num_rows=num_rows,
        num_torn=max(batch.num_torn[place], num_missing),
    )


def _part_piece(batch: CutBatch, place: int, first_row: int, end_row: int) -> Piece:
    num_rows = {
        table: int(_within(batch.rows(table, place), first_row, end_row).sum()) for table in TABLES
    }
    return Piece(
        key=replace(batch.keys[place], first_row=first_row, end_row=end_row),
        sha256=UNKNOWN_HASH,
        num_rows=num_rows,
        num_torn=max(0, end_row - first_row - sum(num_rows.values())),
    )


def _new_rows(batch: CutBatch, plans: list[_Planned], table: str) -> list[pa.Table]:
    """Return the rows of a batch that are to go in: as they are, where that is all of them."""
    if all(
        [(piece.key.first_row, piece.key.end_row) for piece in plan.pieces]
        == [(key.first_row, key.end_row)]
        for key, plan in zip(batch.keys, plans, strict=True)
    ):
        return [batch.tables[table]]
    parts: list[pa.Table] = []
    for place, plan in enumerate(plans):
        rows = batch.rows(table, place)
        if not plan.pieces or not rows.num_rows:
            continue
        is_new = np.zeros(rows.num_rows, dtype=bool)
        for piece in plan.pieces:
            is_new |= _within(rows, piece.key.first_row, piece.key.end_row)
        parts += [rows] if is_new.all() else _runs(rows, is_new)
    return parts


def _within(rows: pa.Table, first_row: int, end_row: int) -> Any:  # noqa: ANN401  # numpy booleans
    if not rows.num_rows:
        return np.zeros(0, dtype=bool)
    row = to_numpy(rows["row"])
    return (row >= first_row) & (row < end_row)


def _runs(rows: pa.Table, kept: Any) -> list[pa.Table]:  # noqa: ANN401  # numpy booleans
    """Return the slices of neighbouring rows that are kept."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], kept, [False]]).astype(np.int8)))
    bounds = edges.tolist()
    return [
        rows.slice(first, end - first)
        for place, (first, end) in enumerate(pairwise(bounds))
        if place % 2 == 0
    ]


def _is_rivalled(pieces: Iterable[Piece], rivals: dict[SegmentKey, list[Range]]) -> bool:
    return any(
        part.overlaps(piece.key.first_row, piece.key.end_row)
        for piece in pieces
        for part in rivals.get(segment_key(piece.key), ())
    )


def with_first_times(store: Store, spans: pa.Table, again: Iterable[CutKey]) -> pa.Table:
    """Return the spans with the times of those rows that the store holds already.

    Args:
        store: Where they may be.
        spans: What is to go in, of any cuts.
        again: The cuts among them that may be there.

    Raises:
        StoreError: The store could not be read.
    """
    segments = sorted({(key.run_id, key.epoch, key.segment) for key in again})
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
