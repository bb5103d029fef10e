"""Screening of a decoded body: impossible rows are moved to ``bad_rows``, with the reason.

The other rows are kept. Texts are made safe to store and to show, as those of a spool are.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rankscope.tracer.span import KINDS, NONE

from ..arrow_columns import coded_strings, numbers, strings, to_codes, to_numpy
from ..bounds import MAX_WORLD_SIZE
from ..errors import RunNameError, WireError
from ..identity import check_run_name
from ..names import storable_name
from ..spool.records import MAX_DURATION_NS, MAX_START_NS
from ..wire.codec import TABLES, CutBatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..spool.cut import CutKey

TEXT_COLUMNS = {"spans": ("kind", "name", "track"), "bad_rows": ("reason",)}
PROCESS_FORM = re.compile(r"[A-Za-z0-9._-]{1,64}")
SHA256_FORM = re.compile(r"[0-9a-f]{64}")

REASONS = (
    "row outside its cut",
    "row given twice",
    "unknown kind",
    "begins before the clock",
    "begins beyond the clock's range",
    "ends before it begins",
    "lasts more than 30 days",
    "of no rank",
)
"""Reasons for a bad row, besides `collector.spool.records.BAD_REASONS`. The first that applies is
recorded."""

MAX_SHOWN_ROWS = 1_000
"""Bad rows of one body whose content is kept; further ones keep their reason only."""

MAX_RECORD_LETTERS = 1_024


def screen(batch: CutBatch) -> CutBatch:
    """Return the batch with its bad rows in ``bad_rows`` and its texts made safe.

    Raises:
        WireError: 422; the key of a cut is invalid.
    """
    for place, key in enumerate(batch.keys):
        _check_key(key, sha256=batch.sha256[place], num_torn=batch.num_torn[place])
    tables = {table: _with_safe_texts(batch.tables[table], table) for table in TABLES}
    reasons = {table: _row_reasons(tables[table], table, batch) for table in TABLES}
    if all((reason < 0).all() for reason in reasons.values()):
        return replace(batch, tables=tables)
    return _with_bad_rows(replace(batch, tables=tables), reasons)


def _check_key(key: CutKey, *, sha256: str, num_torn: int) -> None:
    try:
        check_run_name(key.run_id)
    except RunNameError as error:
        raise WireError(422, str(error)) from error
    if not PROCESS_FORM.fullmatch(key.process):
        raise WireError(422, "a cut's process must have 1 to 64 letters, digits, '.', '_', '-'")
    if not SHA256_FORM.fullmatch(sha256):
        raise WireError(422, "a cut's sha256 must have 64 hexadecimal digits")
    if key.epoch < 0 or not NONE <= key.rank < MAX_WORLD_SIZE:
        raise WireError(422, f"a cut has epoch {key.epoch} and rank {key.rank}")
    if not 0 <= num_torn <= key.end_row - key.first_row or key.end_row == key.first_row:
        raise WireError(
            422,
            f"a cut has rows {key.first_row} to {key.end_row}, {num_torn} of them torn:"
            " this is not a range",
        )


def _with_safe_texts(rows: pa.Table, table: str) -> pa.Table:
    """Return the rows with storable texts; ClickHouse needs each once in a dictionary."""
    for name in TEXT_COLUMNS.get(table, ()):
        codes, texts = to_codes(rows[name])
        column = coded_strings(codes, [storable_name(text) for text in texts])
        rows = rows.set_column(rows.schema.get_field_index(name), name, column)
    if table == "bad_rows":
        texts = tuple(_record_text(text) for text in rows["record"].to_pylist())
        rows = rows.set_column(rows.schema.get_field_index("record"), "record", strings(texts))
    return rows


def _record_text(text: Any) -> str:  # noqa: ANN401  # Arrow's text
    """Return a bad record's text, unchanged if it is printable and not too long."""
    found = str(text)
    if found.isascii() and found.isprintable() and len(found) <= MAX_RECORD_LETTERS:
        return found
    return storable_name(found)


def _row_reasons(rows: pa.Table, table: str, batch: CutBatch) -> NDArray[np.int8]:
    """Return the index in `REASONS` of each row's first reason; -1 for a good row."""
    reason = np.full(rows.num_rows, -1, dtype=np.int8)
    if not rows.num_rows:
        return reason
    checks = [*_row_number_checks(rows, table, batch), *_value_checks(rows, table)]
    if table != "bad_rows":
        rank = to_numpy(rows["rank"])
        checks.append((7, (rank < 0) | (rank >= MAX_WORLD_SIZE)))
    for number, is_bad in reversed(checks):
        reason[is_bad] = number
    return reason


def _row_number_checks(
    rows: pa.Table, table: str, batch: CutBatch
) -> list[tuple[int, NDArray[Any]]]:
    counts = np.diff(batch.offsets[table])
    first = np.repeat(np.array([key.first_row for key in batch.keys], dtype=np.int64), counts)
    end = np.repeat(np.array([key.end_row for key in batch.keys], dtype=np.int64), counts)
    row = to_numpy(rows["row"]).astype(np.int64)
    is_outside = (row < first) | (row >= end)
    is_next = np.diff(row, prepend=-1) > 0
    is_next[batch.offsets[table][:-1][counts > 0]] = True  # first row of a cut
    is_twice = np.zeros(len(row), dtype=bool)
    if not is_next.all():
        cut = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        is_twice[:] = True
        is_twice[np.unique((cut << 32) | row, return_index=True)[1]] = False
    return [(0, is_outside), (1, is_twice)]


def _value_checks(rows: pa.Table, table: str) -> list[tuple[int, NDArray[Any]]]:
    if table not in {"spans", "steps"}:
        return []
    start_ns = to_numpy(rows["start_ns"])
    if table == "spans":
        duration_ns = to_numpy(rows["duration_ns"])
        codes, texts = to_codes(rows["kind"])
        known = {str(kind) for kind in KINDS}
        is_unknown = np.array([text not in known for text in texts], dtype=bool)[codes]
    else:
        end_ns = to_numpy(rows["end_ns"])
        # As unsigned: the difference of two int64 may not fit one.
        is_backward = end_ns < start_ns
        span = end_ns.astype(np.uint64) - start_ns.astype(np.uint64)
        duration_ns = np.where(is_backward, -1, np.minimum(span, np.uint64(2**62))).astype(np.int64)
        is_unknown = np.zeros(rows.num_rows, dtype=bool)
    return [
        (2, is_unknown),
        (3, start_ns < 0),
        (4, start_ns > MAX_START_NS),
        (5, duration_ns < 0),
        (6, duration_ns > MAX_DURATION_NS),
    ]


def _with_bad_rows(batch: CutBatch, reasons: dict[str, NDArray[np.int8]]) -> CutBatch:
    """Return the batch with the bad rows of its tables moved to ``bad_rows``."""
    num_cuts = len(batch.keys)
    tables: dict[str, pa.Table] = {}
    offsets: dict[str, NDArray[np.int64]] = {}
    moved: list[tuple[NDArray[np.int64], pa.Table]] = []
    for table in TABLES:
        is_bad = reasons[table] >= 0
        cut = np.repeat(np.arange(num_cuts, dtype=np.int64), np.diff(batch.offsets[table]))
        rows = batch.tables[table]
        bad = _taken(rows, is_bad)
        if table != "bad_rows":
            tables[table] = _taken(rows, ~is_bad)
            offsets[table] = _ends(cut[~is_bad], num_cuts)
            moved.append((cut[is_bad], _bad_rows(bad, reasons[table][is_bad])))
        else:  # bad rows of the sender's own are kept unchanged
            moved.append((cut, rows))
    joined = np.concatenate([cuts for cuts, _ in moved])
    whole = pa.concat_tables([rows for _, rows in moved]).unify_dictionaries().combine_chunks()
    order = np.argsort(joined, kind="stable")
    tables["bad_rows"] = whole.take(numbers(order))
    offsets["bad_rows"] = _ends(joined[order], num_cuts)
    return replace(batch, tables=tables, offsets=offsets)


def _taken(rows: pa.Table, mask: NDArray[np.bool_]) -> pa.Table:
    return rows.take(numbers(np.flatnonzero(mask)))


def _ends(cuts: NDArray[np.int64], num_cuts: int) -> NDArray[np.int64]:
    ends = np.zeros(num_cuts + 1, dtype=np.int64)
    np.cumsum(np.bincount(cuts, minlength=num_cuts), out=ends[1:])
    return ends


def _bad_rows(rows: pa.Table, reason: NDArray[np.int8]) -> pa.Table:
    shown = rows.slice(0, MAX_SHOWN_ROWS)
    content = shown.drop_columns(["run_id", "epoch", "rank", "segment"]).to_pylist()
    records = [json.dumps(row, default=str)[:MAX_RECORD_LETTERS] for row in content]
    records += [""] * (rows.num_rows - len(records))
    named: dict[str, Any] = {name: rows[name] for name in ("run_id", "epoch", "rank", "segment")}
    named |= {
        "row": rows["row"],
        "reason": coded_strings(reason, REASONS),
        "record": strings(records),
    }
    return pa.Table.from_arrays(list(named.values()), names=list(named))
