"""Which rows the store already holds, and who else is about to store them.

A cut is a range of rows of one segment. The ledger has one line for each range that was
``sent`` (its rows may be there), ``stored`` (they are there once) or ``repeated`` (they are
there, perhaps twice; reads remove duplicates). A ``repeated`` line of no rows says the same
of all its segment. Many collectors may write one store: each puts
an attempt before it looks for those of others, so of two at least one sees the other. The
attempts must be read as they were last written; on replicated tables that takes a quorum of
writes and sequential reads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ..identity import Row
    from ..spool.cut import CutKey
    from .store import Store

SELECT_HELD = """
SELECT run_id, epoch, rank, segment, first_row, end_row, sha256, state FROM ledger FINAL
WHERE (run_id, epoch, rank, segment) IN {segments:Array(Tuple(String, Int32, Int32, UInt64))}
AND end_row > transform(segment, {numbers:Array(UInt64)}, {firsts:Array(UInt32)}, toUInt32(0))
AND first_row < transform(segment, {numbers:Array(UInt64)}, {ends:Array(UInt32)}, toUInt32(0))
"""

SELECT_RIVALS = """
SELECT DISTINCT run_id, epoch, rank, segment, first_row, end_row FROM attempts
WHERE (run_id, epoch, rank, segment) IN {segments:Array(Tuple(String, Int32, Int32, UInt64))}
AND end_row > transform(segment, {numbers:Array(UInt64)}, {firsts:Array(UInt32)}, toUInt32(0))
AND first_row < transform(segment, {numbers:Array(UInt64)}, {ends:Array(UInt32)}, toUInt32(0))
AND writer != {writer:String}
"""

SEGMENTS_A_QUERY = 1_000
"""So that the statement's parameters stay well below the engine's limit for a request (1 MiB)."""

MAX_MARKS = 200_000
MAX_ROW = (1 << 32) - 1
SENT = "sent"
REPEATED = "repeated"

SegmentKey = tuple[str, int, int, int]
"""run_id, epoch, rank, segment."""


Found = TypeVar("Found")

COUNT_DOUBTFUL = """
SELECT count() AS num_doubtful FROM ledger
WHERE run_id = {run_id:String} AND state = 'repeated'
"""


@dataclass(frozen=True, slots=True)
class Range:
    """Rows of one segment of which the ledger, or another writer, knows."""

    first_row: int
    end_row: int
    sha256: str = ""
    state: str = SENT

    def overlaps(self, first_row: int, end_row: int) -> bool:
        """Return whether it shares a row with another range."""
        return self.first_row < end_row and first_row < self.end_row


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Rows that go in by one insert: a cut, or what of it the store does not hold yet."""

    key: CutKey
    sha256: str
    """Of the cut that it is; empty where it is a part of one."""

    num_rows: dict[str, int]
    """By table."""

    num_torn: int


class Ledger:
    """The ledger of one store, shared by all that write to it from this process.

    Args:
        store: An open store.
        has_rivals: Whether other processes may write it; None: unless it is embedded, which
            has a single owner.
    """

    def __init__(self, store: Store, *, has_rivals: bool | None = None) -> None:
        self._store = store
        self.has_rivals = store.path is None if has_rivals is None else has_rivals
        self._under_way: set[SegmentKey] = set()
        self._done = threading.Condition()
        self._marks: OrderedDict[SegmentKey, int] | None = (
            None if self.has_rivals else OrderedDict()
        )

    @contextmanager
    def alone(self, keys: Iterable[CutKey]) -> Iterator[None]:
        """Keep this process's other writers from these cuts' segments until the block ends.

        Two that stored one row at once would see nothing of each other's in the store. Where
        their clocks differ (the server's own tail and an agent on one spool) the row would have
        two times, and show twice for ever.
        """
        segments = {segment_key(key) for key in keys}
        with self._done:
            self._done.wait_for(lambda: self._under_way.isdisjoint(segments))
            self._under_way |= segments
        try:
            yield
        finally:
            with self._done:
                self._under_way -= segments
                self._done.notify_all()

    def held(self, keys: Iterable[CutKey]) -> dict[SegmentKey, list[Range]]:
        """Return what the ledger says of these rows, by segment.

        An embedded store has no other writer: once all of a segment was looked at, what
        begins behind its last row is not looked up.
        """
        wanted = _spread(key for key in keys if not self._is_behind_all(key))
        if self._marks is not None:
            wanted = {segment: (first_row, MAX_ROW) for segment, (first_row, _) in wanted.items()}
        held: dict[SegmentKey, list[Range]] = {}
        for row in self._overlapping(SELECT_HELD, wanted):
            held.setdefault(_segment_key(row), []).append(
                Range(row["first_row"], row["end_row"], row["sha256"], row["state"])
            )
        for segment in wanted:
            self._mark(segment, max((part.end_row for part in held.get(segment, ())), default=0))
        return held

    def note(self, pieces: Sequence[Piece], *, state: str, revision: int, at_ns: int) -> None:
        """Write the pieces' lines; a line of a higher revision replaces one of a lower."""
        self._insert(pieces, state=state, revision=revision, at_ns=at_ns)
        for piece in pieces:
            self._mark(segment_key(piece.key), piece.key.end_row)

    def _insert(self, pieces: Sequence[Piece], *, state: str, revision: int, at_ns: int) -> None:
        if not pieces:
            return
        self._store.insert_rows(
            "ledger",
            [
                {
                    **_identity(piece.key),
                    "process": piece.key.process,
                    "sha256": piece.sha256,
                    "num_spans": piece.num_rows["spans"],
                    "num_steps": piece.num_rows["steps"],
                    "num_microbatches": piece.num_rows["microbatches"],
                    "num_torn": piece.num_torn,
                    "num_bad": piece.num_rows["bad_rows"],
                    "state": state,
                    "at_ns": at_ns,
                    "revision": revision,
                }
                for piece in pieces
            ],
        )

    def doubt(self, pieces: Sequence[Piece], *, at_ns: int) -> None:
        """Say that rows of these pieces' segments may be there twice from now on.

        Noted before a repetition goes in, as lines without rows: were it noted after, two
        deaths in a row would leave two copies of which no reader knows.
        """
        nothing = dict.fromkeys(("spans", "steps", "microbatches", "bad_rows"), 0)
        lines = {
            segment_key(piece.key): Piece(
                key=replace(piece.key, first_row=MAX_ROW, end_row=MAX_ROW),
                sha256="",
                num_rows=nothing,
                num_torn=0,
            )
            for piece in pieces
        }
        self._insert(list(lines.values()), state=REPEATED, revision=3, at_ns=at_ns)

    def attempt(self, pieces: Sequence[Piece], *, writer: str, at_ns: int) -> None:
        """Say that this writer sets out to store these pieces."""
        self._store.insert_rows(
            "attempts",
            [
                {**_identity(piece.key), "sha256": piece.sha256, "writer": writer, "at_ns": at_ns}
                for piece in pieces
            ],
        )

    def rivals(self, pieces: Sequence[Piece], *, writer: str) -> dict[SegmentKey, list[Range]]:
        """Return the ranges that other writers set out to store, by segment."""
        found: dict[SegmentKey, list[Range]] = {}
        for row in self._overlapping(
            SELECT_RIVALS, _spread(piece.key for piece in pieces), writer=writer
        ):
            found.setdefault(_segment_key(row), []).append(Range(row["first_row"], row["end_row"]))
        return found

    def _overlapping(
        self, sql: str, wanted: dict[SegmentKey, tuple[int, int]], **bound: str
    ) -> Iterable[Row]:
        segments = list(wanted)
        for begin in range(0, len(segments), SEGMENTS_A_QUERY):
            part = segments[begin : begin + SEGMENTS_A_QUERY]
            # Two runs may number a segment alike: then both are asked for the rows of either.
            firsts: dict[int, int] = {}
            ends: dict[int, int] = {}
            for place in part:
                number, (first_row, end_row) = place[-1], wanted[place]
                firsts[number] = min(firsts.get(number, first_row), first_row)
                ends[number] = max(ends.get(number, end_row), end_row)
            yield from self._store.rows(
                sql,
                {
                    **bound,
                    "segments": part,
                    "numbers": list(firsts),
                    "firsts": list(firsts.values()),
                    "ends": list(ends.values()),
                },
            )

    def _is_behind_all(self, key: CutKey) -> bool:
        if self._marks is None:
            return False
        mark = self._marks.get(segment_key(key))
        return mark is not None and key.first_row >= mark

    def _mark(self, segment: SegmentKey, end_row: int) -> None:
        """Remember how far the ledger is noted for a segment."""
        if self._marks is None:
            return
        self._marks[segment] = max(self._marks.pop(segment, 0), end_row)
        while len(self._marks) > MAX_MARKS:
            self._marks.popitem(last=False)


def segment_key(key: CutKey) -> SegmentKey:
    """Return which segment a cut is of."""
    return (key.run_id, key.epoch, key.rank, key.segment)


def missing(first_row: int, end_row: int, settled: Iterable[Range]) -> list[tuple[int, int]]:
    """Return the parts of a range that no settled range covers, in order."""
    found: list[tuple[int, int]] = []
    at = first_row
    for part in sorted(settled, key=lambda held: held.first_row):
        if part.first_row >= end_row:
            break
        if part.first_row > at:
            found.append((at, part.first_row))
        at = max(at, part.end_row)
    if at < end_row:
        found.append((at, end_row))
    return found


def _spread(keys: Iterable[CutKey]) -> dict[SegmentKey, tuple[int, int]]:
    """Return the least and largest row that is asked about, by segment."""
    wanted: dict[SegmentKey, tuple[int, int]] = {}
    for key in keys:
        place = segment_key(key)
        first_row, end_row = wanted.get(place, (key.first_row, key.end_row))
        wanted[place] = (min(first_row, key.first_row), max(end_row, key.end_row))
    return wanted


def _identity(key: CutKey) -> dict[str, Any]:
    return {
        "run_id": key.run_id,
        "epoch": key.epoch,
        "rank": key.rank,
        "segment": key.segment,
        "first_row": key.first_row,
        "end_row": key.end_row,
    }


def _segment_key(row: Row) -> SegmentKey:
    return (row["run_id"], row["epoch"], row["rank"], row["segment"])


def may_repeat(store: Store, run_id: str) -> bool:
    """Return whether the ledger knows of a cut of this run that may be stored twice."""
    return bool(store.rows(COUNT_DOUBTFUL, {"run_id": run_id})[0]["num_doubtful"])


def each_once(
    store: Store,
    run_id: str,
    ask: Callable[[str], Found],
    *,
    plain: str,
    once: str,
) -> Found:
    """Return what ``plain`` selects if no row of the run can be there twice, else ``once``.

    A repetition is noted before it goes in, so one that came while ``plain`` was read is
    known afterwards.

    Args:
        store: The store.
        run_id: The run that is asked about.
        ask: Runs a statement.
        plain: Reads rows as they lie there.
        once: Reads the same without duplicates, which takes longer.
    """
    if not may_repeat(store, run_id):
        found = ask(plain)
        if not may_repeat(store, run_id):
            return found
    return ask(once)
