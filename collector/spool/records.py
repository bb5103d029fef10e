"""Decoder of spool records into the store's columns, without a Python loop over rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from rankscope.tracer.span import KINDS, NONE, SPAN_COLUMNS
from rankscope.tracer.spool import COMM_OFFSET, HAS_COMM, NAME_CAPACITY, RECORD_BYTES, RecordType

from ..arrow_columns import coded_strings, numbers, optional_numbers, strings
from ..names import storable_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ..clock.map import ClockMap
    from .cut import CutKey

    Records = NDArray[np.void]

# Offset and type in the record, of the columns that a record holds as they are stored.
_SPAN_FIELDS = {
    column.name: (column.dtype, column.offset)
    for column in SPAN_COLUMNS
    if column.offset is not None
}

_FIELDS: dict[str, tuple[str, int]] = {
    **_SPAN_FIELDS,
    "type": ("u1", 0),
    "kind": ("u1", 1),
    "flags": ("<u2", 2),
    "name": ("<u4", 4),
    "track": ("<u4", 20),
    "start_ns": ("<i8", 24),
    "end_ns": ("<i8", 32),
    "depth": ("<u2", 40),
    "commit": ("<u8", 48),
    "launch_ns": ("<i8", 56),
    # second half of a step
    "num_tokens": ("<i8", 64),
    "loss": ("<f8", 72),
    "peak_memory_bytes": ("<i8", 80),
    "left_out": ("<u4", 88),
    "peak_reserved_bytes": ("<i8", 96),
    "num_alloc_retries": ("<i8", 104),
    # second half of a micro-batch, beside num_tokens
    "sum_squared_lengths": ("<i8", 72),
    "sum_windowed_lengths": ("<i8", 80),
    "num_elements": ("<i8", 88),
}

RECORD = np.dtype(
    {
        "names": list(_FIELDS),
        "formats": [form for form, _ in _FIELDS.values()],
        "offsets": [offset for _, offset in _FIELDS.values()],
        "itemsize": RECORD_BYTES,
    }
)
"""One record of `tracer.spool` as a numpy type; the second halves of the types overlap."""

_BYTES = np.dtype(f"V{RECORD_BYTES}")

MAX_DURATION_NS = 30 * 24 * 3600 * 10**9
"""Thirty days. A longer span comes from a broken clock."""

MAX_START_NS = 1 << 62

MAX_PARENT_DEPTH = 1_024
"""Deeper spans get no parent: each level costs one pass over the rows."""

MAX_DEPTH = 32_767
"""Largest value of the column; deeper spans get this value."""

BAD_REASONS = (
    "unknown record type",
    "unknown kind",
    "begins before the clock",
    "begins beyond the clock's range",
    "ends before it begins",
    "lasts more than 30 days",
)


class Names(Protocol):
    """The interned names of one process."""

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each id."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CutRows:
    """Rows of one cut, by table of the store."""

    spans: pa.Table
    steps: pa.Table
    microbatches: pa.Table
    bad_rows: pa.Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Committed records of one cut, which are decoded together with those of other cuts."""

    key: CutKey
    records: Records
    """Shape (rows,), dtype `RECORD`."""

    rows: NDArray[np.uint32]
    """Shape (rows,): row number of each record in its segment."""

    names: Names
    """The process's names."""

    clock: ClockMap
    """Map of the host's monotonic clock to Unix time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Joint:
    """Records of one type, of all parts and in their order."""

    parts: Sequence[Part]
    records: Records
    rows: NDArray[np.uint32]
    counts: NDArray[np.int64]
    """Shape (parts,): records of each part."""

    def only(self, chosen: NDArray[np.bool_]) -> _Joint:
        """Return some of the records."""
        if chosen.all():
            return self
        counts = np.bincount(self.part_of[chosen], minlength=len(self.parts))
        records, rows = self.records[chosen], self.rows[chosen]
        return _Joint(parts=self.parts, records=records, rows=rows, counts=counts)

    @property
    def part_of(self) -> NDArray[np.int64]:
        """Part of each record."""
        return np.repeat(np.arange(len(self.parts)), self.counts)

    def unix_ns(self, at_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a time of each record as Unix time."""
        mapped = np.empty_like(at_ns)
        ends = np.cumsum(self.counts).tolist()
        for part, count, end in zip(self.parts, self.counts.tolist(), ends, strict=True):
            if count:
                mapped[end - count : end] = part.clock.unix_ns(at_ns[end - count : end])
        return mapped

    def slices(self, table: pa.Table) -> list[pa.Table]:
        """Return the rows of each part, without a copy."""
        ends = np.cumsum(self.counts).tolist()
        none = table.slice(0, 0)
        return [
            table.slice(end - count, count) if count else none
            for end, count in zip(ends, self.counts.tolist(), strict=True)
        ]


def decode(parts: Sequence[Part]) -> list[CutRows]:
    """Decode the records of cuts; together, thousands of small ones take as long as a few.

    A record that can't be a measurement (unknown type or kind, time out of range) goes to
    ``bad_rows`` with the reason.

    Args:
        parts: At least one.

    Returns:
        The rows of each part: slices of tables that they share.
    """
    joint = _Joint(
        parts=parts,
        # As bytes: numpy would copy the fields of a record one after the other.
        records=np.concatenate([part.records.view(_BYTES) for part in parts]).view(RECORD),
        rows=np.concatenate([part.rows for part in parts]),
        counts=np.array([len(part.rows) for part in parts]),
    )
    reason = _bad_reason(joint.records)
    is_good, kind = reason < 0, joint.records["type"]
    spans = joint.only(is_good & (kind == RecordType.SPAN))
    steps = joint.only(is_good & (kind == RecordType.STEP))
    microbatches = joint.only(is_good & (kind == RecordType.MICROBATCH))
    bad = joint.only(~is_good)
    tables = zip(
        spans.slices(_spans(spans)),
        steps.slices(_steps(steps)),
        microbatches.slices(_microbatches(microbatches)),
        bad.slices(_bad_rows(bad, reason[~is_good])),
        strict=True,
    )
    return [
        CutRows(spans=spans, steps=steps, microbatches=microbatches, bad_rows=bad_rows)
        for spans, steps, microbatches, bad_rows in tables
    ]


def _bad_reason(records: Records) -> NDArray[np.int8]:
    """Return the index of each record's first fault in `BAD_REASONS`; -1 if it has none."""
    start_ns, end_ns = records["start_ns"], records["end_ns"]
    is_known = (records["type"] >= RecordType.SPAN) & (records["type"] <= RecordType.MICROBATCH)
    faults = (
        ~is_known,
        (records["type"] == RecordType.SPAN) & (records["kind"] >= len(KINDS)),
        start_ns < 0,
        start_ns > MAX_START_NS,
        end_ns < start_ns,
        end_ns - start_ns > MAX_DURATION_NS,
    )
    reason = np.full(len(records), -1, dtype=np.int8)
    for place in reversed(range(len(faults))):
        reason[faults[place]] = place
    return reason


def _spans(spans: _Joint) -> pa.Table:
    records = spans.records
    flags = records["flags"]
    launch_ns = np.where(records["launch_ns"] == 0, records["start_ns"], records["launch_ns"])
    parent, has_parent = find_parent_rows(records, spans.rows, segment=spans.part_of)
    computed = {
        "start_ns": numbers(spans.unix_ns(records["start_ns"])),
        "kind": coded_strings(records["kind"], [str(kind) for kind in KINDS]),
        "name": _named(records["name"], spans),
        "track": _named(records["track"], spans),
        "duration_ns": numbers(records["end_ns"] - records["start_ns"]),
        "launch_ns": numbers(np.where(launch_ns < 0, NONE, spans.unix_ns(launch_ns))),
        "parent_row": optional_numbers(parent, has_parent),
        "flags": numbers(flags & ~np.uint16(HAS_COMM)),
        "depth": numbers(np.minimum(records["depth"], MAX_DEPTH), np.int16),
        "row": numbers(spans.rows),
    }
    has_comm = (flags & HAS_COMM) != 0
    named = _identity(spans)
    for column in SPAN_COLUMNS:
        if column.offset is None:
            named[column.name] = computed[column.name]
            continue
        values = records[column.name]
        if column.offset >= COMM_OFFSET:
            values = np.where(has_comm, values, values.dtype.type(column.missing))
        named[column.name] = numbers(values)
    return pa.Table.from_arrays(list(named.values()), names=list(named))


def _steps(steps: _Joint) -> pa.Table:
    records = steps.records
    start_ns = steps.unix_ns(records["start_ns"])
    named = {
        **_identity(steps),
        "step": numbers(records["step"]),
        "start_ns": numbers(start_ns),
        # The duration does not pass through the clock map.
        "end_ns": numbers(start_ns + (records["end_ns"] - records["start_ns"])),
        "num_tokens": numbers(records["num_tokens"]),
        "loss": numbers(records["loss"]),
        "peak_memory_bytes": numbers(records["peak_memory_bytes"]),
        "left_out": numbers(records["left_out"]),
        # Stored plus one: older tracers wrote zeros there.
        "peak_reserved_bytes": numbers(records["peak_reserved_bytes"] - 1),
        "num_alloc_retries": numbers(records["num_alloc_retries"] - 1),
        "row": numbers(steps.rows),
    }
    return pa.Table.from_arrays(list(named.values()), names=list(named))


def _microbatches(microbatches: _Joint) -> pa.Table:
    records = microbatches.records
    named = {
        **_identity(microbatches),
        "step": numbers(records["step"]),
        "microbatch": numbers(records["microbatch"]),
        "num_tokens": numbers(records["num_tokens"]),
        "sum_squared_lengths": numbers(records["sum_squared_lengths"]),
        "sum_windowed_lengths": numbers(records["sum_windowed_lengths"] - 1),
        "num_elements": numbers(records["num_elements"] - 1),
        "row": numbers(microbatches.rows),
    }
    return pa.Table.from_arrays(list(named.values()), names=list(named))


def _bad_rows(bad: _Joint, reason: NDArray[np.int8]) -> pa.Table:
    named = {
        **_identity(bad),
        "row": numbers(bad.rows),
        "reason": coded_strings(reason, BAD_REASONS),
        "record": strings([record.tobytes().hex() for record in bad.records]),
    }
    return pa.Table.from_arrays(list(named.values()), names=list(named))


def _identity(joint: _Joint) -> dict[str, Any]:
    keys, part_of = [part.key for part in joint.parts], joint.part_of
    return {
        "run_id": coded_strings(part_of, [key.run_id for key in keys]),
        "epoch": numbers(np.array([key.epoch for key in keys], dtype=np.int32)[part_of]),
        "rank": numbers(np.array([key.rank for key in keys], dtype=np.int32)[part_of]),
        "segment": numbers(np.array([key.segment for key in keys], dtype=np.uint64)[part_of]),
    }


def _named(ids: NDArray[np.uint32], joint: _Joint) -> Any:  # noqa: ANN401  # an Arrow column
    """Return the column of names; an id beyond the name table is read as `OTHER_NAME`, id 0."""
    held = np.where(ids < NAME_CAPACITY, ids, 0).astype(np.int64)
    pairs, codes = np.unique(joint.part_of * NAME_CAPACITY + held, return_inverse=True)
    owners, used = np.divmod(pairs, NAME_CAPACITY)
    ends = np.cumsum(np.bincount(owners, minlength=len(joint.parts)))[:-1]
    texts = [
        storable_name(text)
        for part, own in zip(joint.parts, np.split(used, ends), strict=True)
        for text in part.names.texts(own.tolist())
    ]
    return coded_strings(codes, texts)


def find_parent_rows(
    records: Records, rows: NDArray[np.uint32], *, segment: NDArray[np.int64]
) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """Return the parent row of each span, and whether it is known.

    A lane writes a span when it ends, so a parent follows its children: it is the next row that
    is one level less deep, if it contains the child in time. A parent in a later cut is unknown.

    Args:
        records: Shape (rows,): spans of segments, those of one in row order and together.
        rows: Shape (rows,): their row numbers.
        segment: Shape (rows,): a number of their segment that grows.
    """
    start_ns, depth = records["start_ns"], records["depth"]
    end_ns = records["end_ns"]
    parent = np.zeros(len(records), dtype=np.uint32)
    has_parent = np.zeros(len(records), dtype=bool)
    for level in np.flatnonzero(np.bincount(depth, minlength=1)[: MAX_PARENT_DEPTH + 1])[1:]:
        outer = np.flatnonzero(depth == level - 1)
        if not len(outer):
            continue
        child = np.flatnonzero(depth == level)
        place = np.searchsorted(outer, child)
        child, place = child[place < len(outer)], place[place < len(outer)]
        candidate = outer[place]
        inside = (start_ns[candidate] <= start_ns[child]) & (end_ns[candidate] >= end_ns[child])
        inside &= segment[candidate] == segment[child]
        parent[child[inside]] = rows[candidate[inside]]
        has_parent[child[inside]] = True
    return parent, has_parent
