"""Ledger of the store: the cuts that were sent and stored, and other writers' attempts.

A cut is a range of rows of one segment. The ledger has one line for each range, in one of three
states: ``sent`` (its rows may be stored), ``stored`` (its rows are stored once) and ``repeated``
(its rows may be stored twice; reads remove duplicates). A ``repeated`` line without rows says the
same of its whole segment.

Several collectors may write to one store. Each records its attempt before it reads the attempts
of others, so of two writers at least one sees the other. This needs reads that return the newest
write: on replicated tables, a quorum of writes and sequential reads.
"""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrow_columns import to_numpy
from ..wire.codec import TABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pyarrow as pa

    from ..identity import Row
    from ..spool.cut import CutKey
    from ..wire.codec import CutBatch
    from .store import Store

SELECT_RANGES = """
SELECT run_id, epoch, rank, segment, first_row, end_row, sha256, state FROM ledger FINAL
WHERE (run_id, epoch, rank, segment) IN {segments:Array(Tuple(String, Int32, Int32, UInt64))}
AND end_row > transform(segment, {numbers:Array(UInt64)}, {firsts:Array(UInt32)}, toUInt32(0))
AND first_row < transform(segment, {numbers:Array(UInt64)}, {ends:Array(UInt32)}, toUInt32(0))
"""

SELECT_ATTEMPTS = """
SELECT DISTINCT run_id, epoch, rank, segment, first_row, end_row FROM attempts
WHERE (run_id, epoch, rank, segment) IN {segments:Array(Tuple(String, Int32, Int32, UInt64))}
AND end_row > transform(segment, {numbers:Array(UInt64)}, {firsts:Array(UInt32)}, toUInt32(0))
AND first_row < transform(segment, {numbers:Array(UInt64)}, {ends:Array(UInt32)}, toUInt32(0))
AND writer != {writer:String}
"""

SEGMENTS_PER_QUERY = 1_000
"""Keeps the parameters of a statement well below the engine's limit for a request (1 MiB)."""

MAX_WATERMARKS = 200_000
MAX_ROW = (1 << 32) - 1
WRITER_BYTES = 8
SENT = "sent"

UNKNOWN_HASH = ""
"""Hash of a range of a cut: the cut's own hash covers other bytes, so it must not make exactly
that range a conflict when a sender sends it."""

SegmentKey = tuple[str, int, int, int]
"""run_id, epoch, rank, segment."""


class CutState(StrEnum):
    """Result of storing a cut, spelled as in the ledger and in the answer to its sender."""

    STORED = "stored"
    """Its rows are stored, once."""

    REPEATED = "repeated"
    """Its rows are stored, perhaps twice: reads remove duplicates."""

    DUPLICATE = "duplicate"
    """Its rows were stored before; nothing was written."""

    CONFLICT = "conflict"
    """Other rows were stored under its key before; nothing was written."""


@dataclass(frozen=True, slots=True)
class Range:
    """Rows of one segment in the ledger or in another writer's attempt."""

    first_row: int
    end_row: int
    sha256: str = ""
    state: str = SENT

    def overlaps(self, first_row: int, end_row: int) -> bool:
        """Return whether two ranges share a row."""
        return self.first_row < end_row and first_row < self.end_row


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPart:
    """A line of the ledger: a cut, or a range of it that the store does not hold yet."""

    key: CutKey
    sha256: str
    """Hash of the whole cut; `UNKNOWN_HASH` for a range of one."""

    num_rows: dict[str, int]
    """By table."""

    num_torn: int


@dataclass(slots=True)
class CutPlan:
    """The rows of one cut to insert, and its state."""

    state: CutState
    parts: list[CutPart]


Plans = list[list[CutPlan]]
"""A plan for each cut of each batch."""


class Ledger:
    """The ledger of one store.

    All writers of a process must share one ledger: it serialises them, and caches what it has read.

    Args:
        is_shared: Whether other processes may write to the store; None: all but an embedded store,
            which has a single owner.
    """

    def __init__(self, store: Store, *, is_shared: bool | None = None) -> None:
        self._store = store
        self.is_shared = store.path is None if is_shared is None else is_shared
        # New at each start: attempts of this process before a restart are another writer's.
        self._writer = secrets.token_hex(WRITER_BYTES)
        self._locked: set[SegmentKey] = set()
        self._unlocked = threading.Condition()
        # Row of each segment from which on the ledger is known to hold nothing.
        self._watermarks: OrderedDict[SegmentKey, int] | None = (
            None if self.is_shared else OrderedDict()
        )

    @contextmanager
    def plan(self, batches: Sequence[CutBatch], *, unix_ns: Callable[[], int]) -> Iterator[Plans]:
        """Return what of the batches is new, and record that it is about to be stored.

        For the duration of the block, other writers of this process are excluded from the segments
        of these batches. The block inserts the rows, and calls `record` when they are durable.
        """
        with self._locked_segments(key for batch in batches for key in batch.keys):
            known = self._read_ranges(key for batch in batches for key in batch.keys)
            plans = [
                [_plan_cut(batch, place, known) for place in range(len(batch.keys))]
                for batch in batches
            ]
            self._write(parts_of(plans, CutState.STORED), state=SENT, revision=1, at_ns=unix_ns())
            if self.is_shared:
                self._find_other_writers(plans, at_ns=unix_ns())
            repeated = parts_of(plans, CutState.REPEATED)
            self._write_repeated_segments(repeated, at_ns=unix_ns())
            yield plans

    def record(self, plans: Plans, *, at_ns: int) -> None:
        """Record that the rows of these plans are durable."""
        for state, revision in ((CutState.STORED, 2), (CutState.REPEATED, 3)):
            self._write(parts_of(plans, state), state=state, revision=revision, at_ns=at_ns)

    @contextmanager
    def _locked_segments(self, keys: Iterable[CutKey]) -> Iterator[None]:
        """Exclude this process's other writers from the segments of these cuts.

        Two writers that store one row at once see nothing of each other in the store. If their
        clocks differ (the server's own tail and an agent on one spool), the row would have two
        times, and show twice for ever.
        """
        segments = {segment_key(key) for key in keys}
        with self._unlocked:
            self._unlocked.wait_for(lambda: self._locked.isdisjoint(segments))
            self._locked |= segments
        try:
            yield
        finally:
            with self._unlocked:
                self._locked -= segments
                self._unlocked.notify_all()

    def _read_ranges(self, keys: Iterable[CutKey]) -> dict[SegmentKey, list[Range]]:
        """Return the ledger's ranges that overlap these cuts, by segment.

        An embedded store has no other writer: once a segment was read, rows behind its last range
        need no query.
        """
        wanted = _row_bounds(key for key in keys if not self._is_behind_watermark(key))
        if self._watermarks is not None:
            wanted = {segment: (first_row, MAX_ROW) for segment, (first_row, _) in wanted.items()}
        found: dict[SegmentKey, list[Range]] = {}
        for row in self._overlapping(SELECT_RANGES, wanted):
            found.setdefault(_row_segment_key(row), []).append(
                Range(row["first_row"], row["end_row"], row["sha256"], row["state"])
            )
        for segment in wanted:
            end_row = max((part.end_row for part in found.get(segment, ())), default=0)
            self._raise_watermark(segment, end_row)
        return found

    def _write(self, parts: Sequence[CutPart], *, state: str, revision: int, at_ns: int) -> None:
        """Write a line for each part; a line of a higher revision replaces one of a lower."""
        self._insert(parts, state=state, revision=revision, at_ns=at_ns)
        for part in parts:
            self._raise_watermark(segment_key(part.key), part.key.end_row)

    def _write_repeated_segments(self, parts: Sequence[CutPart], *, at_ns: int) -> None:
        """Write that the segments of these parts may hold rows twice, as lines without rows.

        Must come before the rows: if it came after them, two crashes in a row would leave two
        copies that no reader knows of.
        """
        lines = {
            segment_key(part.key): CutPart(
                key=replace(part.key, first_row=MAX_ROW, end_row=MAX_ROW),
                sha256="",
                num_rows=dict.fromkeys(TABLES, 0),
                num_torn=0,
            )
            for part in parts
        }
        self._insert(list(lines.values()), state=CutState.REPEATED, revision=3, at_ns=at_ns)

    def _find_other_writers(self, plans: Plans, *, at_ns: int) -> None:
        """Record this writer's attempts; plan as repeated what another is about to store."""
        parts = [part for plan in chain.from_iterable(plans) for part in plan.parts]
        if not parts:
            return
        self._store.insert_rows(
            "attempts",
            [
                {
                    **_identity(part.key),
                    "sha256": part.sha256,
                    "writer": self._writer,
                    "at_ns": at_ns,
                }
                for part in parts
            ],
        )
        others: dict[SegmentKey, list[Range]] = {}
        bounds = _row_bounds(part.key for part in parts)
        for row in self._overlapping(SELECT_ATTEMPTS, bounds, writer=self._writer):
            attempt = Range(row["first_row"], row["end_row"])
            others.setdefault(_row_segment_key(row), []).append(attempt)
        for plan in chain.from_iterable(plans):
            if plan.state is CutState.STORED and any(
                attempt.overlaps(part.key.first_row, part.key.end_row)
                for part in plan.parts
                for attempt in others.get(segment_key(part.key), ())
            ):
                plan.state = CutState.REPEATED

    def _insert(self, parts: Sequence[CutPart], *, state: str, revision: int, at_ns: int) -> None:
        if not parts:
            return
        self._store.insert_rows(
            "ledger",
            [
                {
                    **_identity(part.key),
                    "process": part.key.process,
                    "sha256": part.sha256,
                    "num_spans": part.num_rows["spans"],
                    "num_steps": part.num_rows["steps"],
                    "num_microbatches": part.num_rows["microbatches"],
                    "num_torn": part.num_torn,
                    "num_bad": part.num_rows["bad_rows"],
                    "state": state,
                    "at_ns": at_ns,
                    "revision": revision,
                }
                for part in parts
            ],
        )

    def _overlapping(
        self, sql: str, wanted: dict[SegmentKey, tuple[int, int]], **bound: str
    ) -> Iterable[Row]:
        segments = list(wanted)
        for begin in range(0, len(segments), SEGMENTS_PER_QUERY):
            asked = segments[begin : begin + SEGMENTS_PER_QUERY]
            # Two runs may have the same segment number: both are then asked for the rows of either.
            firsts: dict[int, int] = {}
            ends: dict[int, int] = {}
            for segment in asked:
                number, (first_row, end_row) = segment[-1], wanted[segment]
                firsts[number] = min(firsts.get(number, first_row), first_row)
                ends[number] = max(ends.get(number, end_row), end_row)
            yield from self._store.rows(
                sql,
                {
                    **bound,
                    "segments": asked,
                    "numbers": list(firsts),
                    "firsts": list(firsts.values()),
                    "ends": list(ends.values()),
                },
            )

    def _is_behind_watermark(self, key: CutKey) -> bool:
        if self._watermarks is None:
            return False
        watermark = self._watermarks.get(segment_key(key))
        return watermark is not None and key.first_row >= watermark

    def _raise_watermark(self, segment: SegmentKey, end_row: int) -> None:
        if self._watermarks is None:
            return
        self._watermarks[segment] = max(self._watermarks.pop(segment, 0), end_row)
        while len(self._watermarks) > MAX_WATERMARKS:
            self._watermarks.popitem(last=False)


def parts_of(plans: Plans, state: CutState) -> list[CutPart]:
    """Return what is to be inserted of the cuts that have this state."""
    return [
        part for plan in chain.from_iterable(plans) if plan.state is state for part in plan.parts
    ]


def rows_within(rows: pa.Table, first_row: int, end_row: int) -> Any:  # noqa: ANN401  # numpy booleans
    """Return which rows are within a range of row numbers."""
    if not rows.num_rows:
        return np.zeros(0, dtype=bool)
    row = to_numpy(rows["row"])
    return (row >= first_row) & (row < end_row)


def _plan_cut(batch: CutBatch, place: int, known: dict[SegmentKey, list[Range]]) -> CutPlan:
    """Plan one cut, and add what it will store to the known ranges."""
    key, sha256 = batch.keys[place], batch.sha256[place]
    ranges = known.setdefault(segment_key(key), [])
    overlapping = [part for part in ranges if part.overlaps(key.first_row, key.end_row)]
    stored = [part for part in overlapping if part.state != SENT]
    for part in stored:
        if (part.first_row, part.end_row) == (key.first_row, key.end_row):
            is_same = part.sha256 in {sha256, UNKNOWN_HASH}
            return CutPlan(CutState.DUPLICATE if is_same else CutState.CONFLICT, [])
    missing = missing_ranges(key.first_row, key.end_row, stored)
    if not missing:
        return CutPlan(CutState.DUPLICATE, [])
    is_repeated = len(stored) < len(overlapping)
    state = CutState.REPEATED if is_repeated else CutState.STORED
    if missing == [(key.first_row, key.end_row)]:
        ranges.append(Range(key.first_row, key.end_row, sha256, state))
        return CutPlan(state, [_whole_cut(batch, place)])
    ranges += [Range(first, end, UNKNOWN_HASH, state) for first, end in missing]
    return CutPlan(state, [_part_of_cut(batch, place, first, end) for first, end in missing])


def _whole_cut(batch: CutBatch, place: int) -> CutPart:
    key = batch.keys[place]
    num_rows = {table: int(ends[place + 1] - ends[place]) for table, ends in batch.offsets.items()}
    # Rows that the sender left out without reporting them count as torn: otherwise the account
    # would say that all rows of the range are stored.
    num_missing = key.end_row - key.first_row - sum(num_rows.values())
    return CutPart(
        key=key,
        sha256=batch.sha256[place],
        num_rows=num_rows,
        num_torn=max(batch.num_torn[place], num_missing),
    )


def _part_of_cut(batch: CutBatch, place: int, first_row: int, end_row: int) -> CutPart:
    num_rows = {
        table: int(rows_within(batch.rows(table, place), first_row, end_row).sum())
        for table in TABLES
    }
    return CutPart(
        key=replace(batch.keys[place], first_row=first_row, end_row=end_row),
        sha256=UNKNOWN_HASH,
        num_rows=num_rows,
        num_torn=max(0, end_row - first_row - sum(num_rows.values())),
    )


def segment_key(key: CutKey) -> SegmentKey:
    """Return the segment of a cut."""
    return (key.run_id, key.epoch, key.rank, key.segment)


def missing_ranges(first_row: int, end_row: int, stored: Iterable[Range]) -> list[tuple[int, int]]:
    """Return the parts of a range that no stored range covers, in order."""
    missing: list[tuple[int, int]] = []
    at = first_row
    for part in sorted(stored, key=lambda part: part.first_row):
        if part.first_row >= end_row:
            break
        if part.first_row > at:
            missing.append((at, part.first_row))
        at = max(at, part.end_row)
    if at < end_row:
        missing.append((at, end_row))
    return missing


def _row_bounds(keys: Iterable[CutKey]) -> dict[SegmentKey, tuple[int, int]]:
    """Return the smallest first row and the largest end row of the cuts, by segment."""
    bounds: dict[SegmentKey, tuple[int, int]] = {}
    for key in keys:
        segment = segment_key(key)
        first_row, end_row = bounds.get(segment, (key.first_row, key.end_row))
        bounds[segment] = (min(first_row, key.first_row), max(end_row, key.end_row))
    return bounds


def _identity(key: CutKey) -> dict[str, Any]:
    return {
        "run_id": key.run_id,
        "epoch": key.epoch,
        "rank": key.rank,
        "segment": key.segment,
        "first_row": key.first_row,
        "end_row": key.end_row,
    }


def _row_segment_key(row: Row) -> SegmentKey:
    return (row["run_id"], row["epoch"], row["rank"], row["segment"])
