"""Decoder of spool records into the store's columns, without a Python loop over rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from rankscope.tracer.span import KINDS, NONE, SPAN_COLUMNS
from rankscope.tracer.spool import COMM_OFFSET, HAS_COMM, NAME_CAPACITY, RECORD_BYTES, RecordType

from ..arrow_columns import coded_strings, numbers, optional_numbers, repeated_string, strings
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


def decode(
    records: Records, rows: NDArray[np.uint32], *, key: CutKey, names: Names, clock: ClockMap
) -> CutRows:
    """Decode committed records.

    A record that can't be a measurement (unknown type or kind, time out of range) goes to
    ``bad_rows`` with the reason.

    Args:
        records: Shape (rows,), dtype `RECORD`.
        rows: Row number of each record in its segment.
        key: Identity of the cut.
        names: The process's names.
        clock: Map of the host's monotonic clock to Unix time.
    """
    reason = _bad_reason(records)
    good = reason < 0
    is_span = good & (records["type"] == RecordType.SPAN)
    is_step = good & (records["type"] == RecordType.STEP)
    is_microbatch = good & (records["type"] == RecordType.MICROBATCH)
    spans, span_rows = (records, rows) if is_span.all() else (records[is_span], rows[is_span])
    return CutRows(
        spans=_spans(spans, span_rows, key=key, names=names, clock=clock),
        steps=_steps(records[is_step], rows[is_step], key=key, clock=clock),
        microbatches=_microbatches(records[is_microbatch], rows[is_microbatch], key=key),
        bad_rows=_bad_rows(records[~good], rows[~good], reason=reason[~good], key=key),
    )


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


def _spans(
    records: Records, rows: NDArray[np.uint32], *, key: CutKey, names: Names, clock: ClockMap
) -> pa.Table:
    flags = records["flags"]
    launch_ns = np.where(records["launch_ns"] == 0, records["start_ns"], records["launch_ns"])
    parent, has_parent = find_parent_rows(records, rows)
    computed = {
        "start_ns": numbers(clock.unix_ns(records["start_ns"])),
        "kind": coded_strings(records["kind"], [str(kind) for kind in KINDS]),
        "name": _named(records["name"], names),
        "track": _named(records["track"], names),
        "duration_ns": numbers(records["end_ns"] - records["start_ns"]),
        "launch_ns": numbers(np.where(launch_ns < 0, NONE, clock.unix_ns(launch_ns))),
        "parent_row": optional_numbers(parent, has_parent),
        "flags": numbers(flags & ~np.uint16(HAS_COMM)),
        "depth": numbers(np.minimum(records["depth"], MAX_DEPTH), np.int16),
        "row": numbers(rows),
    }
    has_comm = (flags & HAS_COMM) != 0
    named = _identity(len(records), key)
    for column in SPAN_COLUMNS:
        if column.offset is None:
            named[column.name] = computed[column.name]
            continue
        values = records[column.name]
        if column.offset >= COMM_OFFSET:
            values = np.where(has_comm, values, values.dtype.type(column.missing))
        named[column.name] = numbers(values)
    return pa.Table.from_arrays(list(named.values()), names=list(named))


def _steps(records: Records, rows: NDArray[np.uint32], *, key: CutKey, clock: ClockMap) -> pa.Table:
    start_ns = clock.unix_ns(records["start_ns"])
    named = {
        **_identity(len(records), key),
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
        "row": numbers(rows),
    }
    return pa.Table.from_arrays(list(named.values()), names=list(named))


def _microbatches(records: Records, rows: NDArray[np.uint32], *, key: CutKey) -> pa.Table:
    named = {
        **_identity(len(records), key),
        "step": numbers(records["step"]),
        "microbatch": numbers(records["microbatch"]),
        "num_tokens": numbers(records["num_tokens"]),
        "sum_squared_lengths": numbers(records["sum_squared_lengths"]),
        "sum_windowed_lengths": numbers(records["sum_windowed_lengths"] - 1),
        "row": numbers(rows),
    }
    return pa.Table.from_arrays(list(named.values()), names=list(named))


def _bad_rows(
    records: Records, rows: NDArray[np.uint32], *, reason: NDArray[np.int8], key: CutKey
) -> pa.Table:
    named = {
        **_identity(len(records), key),
        "row": numbers(rows),
        "reason": coded_strings(reason, BAD_REASONS),
        "record": strings([record.tobytes().hex() for record in records]),
    }
    return pa.Table.from_arrays(list(named.values()), names=list(named))


def _identity(num_rows: int, key: CutKey) -> dict[str, Any]:
    return {
        "run_id": repeated_string(key.run_id, num_rows),
        "epoch": numbers(np.full(num_rows, key.epoch, dtype=np.int32)),
        "rank": numbers(np.full(num_rows, key.rank, dtype=np.int32)),
        "segment": numbers(np.full(num_rows, key.segment, dtype=np.uint64)),
    }


def _named(ids: NDArray[np.uint32], names: Names) -> Any:  # noqa: ANN401  # an Arrow column
    """Return the column of names; an id beyond the name table is read as `OTHER_NAME`, id 0."""
    held = np.where(ids < NAME_CAPACITY, ids, 0)
    used = np.bincount(held) > 0
    codes = (np.cumsum(used) - 1).astype(np.int32)
    texts = names.texts(np.flatnonzero(used).tolist())
    return coded_strings(codes[held], [storable_name(text) for text in texts])


def find_parent_rows(
    records: Records, rows: NDArray[np.uint32]
) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """Return the parent row of each span, and whether it is known.

    A lane writes a span when it ends, so a parent follows its children: it is the next row that
    is one level less deep, if it contains the child in time. A parent in a later cut is unknown.

    Args:
        records: Shape (rows,): spans of one segment in row order.
        rows: Shape (rows,): their row numbers.
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
        parent[child[inside]] = rows[candidate[inside]]
        has_parent[child[inside]] = True
    return parent, has_parent
