"""Codec of cuts: one compressed Arrow IPC stream with one row per cut.

`decode_batch` is the inverse of `encode_cuts`. It keeps the rows of all cuts together, so that a
request of a thousand small cuts costs a few calls instead of thousands.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from rankscope.tracer.span import NONE

from ..arrow_columns import (
    coded_strings,
    numbers,
    optional_numbers,
    repeated_string,
    strings,
    to_numpy,
)
from ..errors import WireError
from ..spool.cut import Cut, CutKey
from ..spool.records import CutRows
from .schema import (
    KEY_COLUMNS,
    OLDEST_VERSION,
    ROW_RANK,
    SCHEMA_KEY,
    SCHEMA_VERSION,
    WIRE_TABLES,
    WireColumn,
    cuts_schema,
    struct_type,
    wire_columns,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Column = pa.Array[Any]

MIB = 1 << 20
VERSION_FORM = re.compile(r"[0-9]{1,9}")
ZSTD_LEVEL = 1
"""The fastest level: a body is read once, seconds later."""


TABLES = tuple(WIRE_TABLES)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLimits:
    """Limits of one body."""

    max_wire_bytes: int = 32 * MIB
    max_inflated_bytes: int = 256 * MIB
    max_rows: int = 2_000_000
    max_cuts: int = 800
    """The answer has 72 bytes per cut, and an agent reads 64 KiB of it."""


DEFAULT_LIMITS = WireLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class CutBatch:
    """Cuts with their rows, by table and in the order of the cuts."""

    keys: tuple[CutKey, ...]
    sha256: tuple[str, ...]
    num_torn: tuple[int, ...]
    tables: dict[str, pa.Table]
    """Rows of each of `TABLES`, in the columns of the store."""

    offsets: dict[str, NDArray[np.int64]]
    """Shape (cuts + 1,): first row of each cut, by table."""

    unknown_columns: tuple[str, ...] = ()
    """Columns of a newer sender that this version ignores."""

    @classmethod
    def from_cut(cls, cut: Cut) -> CutBatch:
        """Return the batch of one cut."""
        tables = {table: getattr(cut.rows, table) for table in TABLES}
        return cls(
            keys=(cut.key,),
            sha256=(cut.sha256,),
            num_torn=(cut.num_torn,),
            tables=tables,
            offsets={
                table: np.array([0, rows.num_rows], dtype=np.int64)
                for table, rows in tables.items()
            },
        )

    @property
    def num_rows(self) -> int:
        """Number of rows of all tables."""
        return sum(table.num_rows for table in self.tables.values())

    @property
    def num_bytes(self) -> int:
        """Memory of the rows."""
        return sum(table.nbytes for table in self.tables.values())

    def rows(self, table: str, index: int) -> pa.Table:
        """Return the rows of one cut as a slice, without a copy."""
        first, end = self.offsets[table][index : index + 2].tolist()
        return self.tables[table].slice(first, end - first)

    def cut(self, index: int) -> Cut:
        """Return one cut; its rows are slices, without a copy."""
        return Cut(
            key=self.keys[index],
            sha256=self.sha256[index],
            num_torn=self.num_torn[index],
            rows=CutRows(**{table: self.rows(table, index) for table in TABLES}),
        )


def encode_cuts(cuts: Sequence[Cut]) -> bytes:
    """Return the body with these cuts, in this order."""
    keys: dict[str, Column] = {
        "run_id": strings([cut.key.run_id for cut in cuts]),
        "epoch": numbers(np.array([cut.key.epoch for cut in cuts], dtype=np.int32)),
        "rank": numbers(np.array([cut.key.rank for cut in cuts], dtype=np.int32)),
        "process": strings([cut.key.process for cut in cuts]),
        "segment": numbers(np.array([cut.key.segment for cut in cuts], dtype=np.uint64)),
        "first_row": numbers(np.array([cut.key.first_row for cut in cuts], dtype=np.uint32)),
        "end_row": numbers(np.array([cut.key.end_row for cut in cuts], dtype=np.uint32)),
        "sha256": strings([cut.sha256 for cut in cuts]),
        "num_torn": numbers(np.array([cut.num_torn for cut in cuts], dtype=np.uint32)),
    }
    has_ranks = any(cut.key.rank == NONE for cut in cuts)
    nested = [
        _nested(table, [getattr(cut.rows, table) for cut in cuts], has_ranks=has_ranks)
        for table in WIRE_TABLES
    ]
    schema = cuts_schema(has_ranks=has_ranks)
    batch = pa.RecordBatch.from_arrays([*keys.values(), *nested], schema=schema)
    options = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=ZSTD_LEVEL))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def decode_batch(body: bytes, *, limits: WireLimits = DEFAULT_LIMITS) -> CutBatch:
    """Return the cuts of a body in its order, with their rows together.

    Args:
        body: Result of `encode_cuts`, or any bytes of a client.

    Raises:
        WireError: The body is rejected; ``status`` is the status of the answer.
    """
    try:
        reader = pa.ipc.open_stream(body)
        _check_version(reader.schema)
        unknown = _unknown_columns(reader.schema)
        whole = _read_all(reader, limits)
        return _decoded(whole, unknown=unknown, limits=limits)
    except MemoryError as error:
        raise WireError(413, "decoding the body needs more memory than there is") from error
    except (pa.ArrowException, ValueError, OverflowError, OSError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise WireError(422, f"the body is not a valid Arrow stream: {line}") from error


def _check_version(schema: pa.Schema) -> None:
    text = (schema.metadata or {}).get(SCHEMA_KEY, b"").decode("ascii", "replace")
    if not VERSION_FORM.fullmatch(text):
        raise WireError(422, f"the stream has no {SCHEMA_KEY.decode()} that is a number")
    if not OLDEST_VERSION <= int(text) <= SCHEMA_VERSION:
        raise WireError(
            422,
            f"the stream has schema version {int(text)}, this collector reads"
            f" {OLDEST_VERSION} to {SCHEMA_VERSION}: upgrade the older of the two",
            supported=(OLDEST_VERSION, SCHEMA_VERSION),
        )


def _nested(table: str, parts: Sequence[pa.Table], *, has_ranks: bool) -> Column:
    """Return the column of a table: for each cut the list of its rows."""
    columns = wire_columns(table, has_ranks=has_ranks)
    names = [column.name for column in columns]
    offsets = np.zeros(len(parts) + 1, dtype=np.int32)
    np.cumsum([part.num_rows for part in parts], out=offsets[1:])
    kept = [fill_columns(part, columns).select(names) for part in parts if part.num_rows]
    if kept:
        whole = pa.concat_tables(kept).unify_dictionaries()
        arrays = [_one_chunk(whole[name]) for name in names]
    else:
        arrays = [empty_column(column) for column in columns]
    item_type = struct_type(table, has_ranks=has_ranks)
    items: Any = pa.StructArray.from_arrays(arrays, fields=list(item_type))
    list_type: Any = pa.list_(pa.field("item", item_type, nullable=False))
    starts: Any = numbers(offsets)
    return cast("Column", pa.ListArray.from_arrays(starts, items, type=list_type))


def fill_columns(rows: pa.Table, columns: Sequence[WireColumn]) -> pa.Table:
    """Return the rows with the default of each column that their source does not have."""
    for column in columns:
        if column.name not in rows.column_names and (
            column.default is not None or column.may_be_null
        ):
            rows = rows.append_column(column.name, _default_column(column, rows.num_rows))
    return rows


def empty_column(column: WireColumn) -> Column:
    """Return a column without rows."""
    if pa.types.is_dictionary(column.arrow_type):
        return repeated_string("", 0)
    if pa.types.is_string(column.arrow_type):
        return strings([])
    return numbers(np.empty(0, dtype=column.arrow_type.to_pandas_dtype()))


def _one_chunk(column: pa.ChunkedArray[Any]) -> Column:
    joined: Any = column.combine_chunks()
    return cast("Column", joined.chunk(0) if isinstance(joined, pa.ChunkedArray) else joined)


def _unknown_columns(schema: pa.Schema) -> tuple[str, ...]:
    known = {column.name for column in KEY_COLUMNS} | WIRE_TABLES.keys()
    found = [name for name in schema.names if name not in known]
    for table, columns in WIRE_TABLES.items():
        place = schema.get_field_index(table)
        if place < 0:
            continue
        item = _item_type(schema.field(place), table)
        names = {ROW_RANK.name, *(column.name for column in columns)}
        fields = [item.field(index).name for index in range(item.num_fields)]
        found += [f"{table}.{name}" for name in fields if name not in names]
    return tuple(found)


def _item_type(field: pa.Field[Any], table: str) -> pa.StructType:
    arrow_type: Any = field.type
    if not (pa.types.is_list(arrow_type) and pa.types.is_struct(arrow_type.value_type)):
        raise WireError(422, f"column {table} is {arrow_type}, expected a list of structs")
    found: pa.StructType = arrow_type.value_type
    return found


def _read_all(reader: pa.RecordBatchStreamReader, limits: WireLimits) -> pa.Table:
    batches: list[pa.RecordBatch] = []
    num_cuts = num_bytes = 0
    for batch in reader:
        num_cuts += batch.num_rows
        if num_cuts > limits.max_cuts:
            raise WireError(413, f"the body has more than {limits.max_cuts} cuts: send fewer")
        num_bytes += batch.get_total_buffer_size()
        if num_bytes > limits.max_inflated_bytes:
            raise WireError(
                413, f"the body inflates to more than {limits.max_inflated_bytes} bytes: send fewer"
            )
        # The code below follows offsets and indices, which come from the client.
        batch.validate(full=True)
        batches.append(batch)
    return pa.Table.from_batches(batches, schema=reader.schema)


def _decoded(whole: pa.Table, *, unknown: tuple[str, ...], limits: WireLimits) -> CutBatch:
    keys = {column.name: _key_column(whole, column) for column in KEY_COLUMNS}
    columns = ("run_id", "epoch", "rank", "process", "segment", "first_row", "end_row")
    cut_keys = tuple(
        CutKey(**dict(zip(columns, row, strict=True)))
        for row in zip(*(keys[name] for name in columns), strict=True)
    )
    tables: dict[str, pa.Table] = {}
    offsets: dict[str, NDArray[np.int64]] = {}
    num_rows = 0
    for table in WIRE_TABLES:
        items, ends = _items(whole, table)
        num_rows += int(ends[-1])
        if num_rows > limits.max_rows:
            raise WireError(413, f"the body has more than {limits.max_rows} rows: send fewer")
        offsets[table] = ends
        tables[table] = _table(items, table, keys=keys, ends=ends)
    return CutBatch(
        keys=cut_keys,
        sha256=tuple(keys["sha256"]),
        num_torn=tuple(keys["num_torn"]),
        tables=tables,
        offsets=offsets,
        unknown_columns=unknown,
    )


def _key_column(whole: pa.Table, column: WireColumn) -> list[Any]:
    place = whole.schema.get_field_index(column.name)
    if place < 0:
        if column.default is None:
            raise WireError(422, f"the stream has no column {column.name}")
        return [column.default] * whole.num_rows
    values: list[Any] = _converted(whole.column(place), column, label=column.name).to_pylist()
    return values


def _items(whole: pa.Table, table: str) -> tuple[dict[str, pa.ChunkedArray[Any]], NDArray[Any]]:
    """Return the columns of a nested table, and the first row of each cut."""
    place = whole.schema.get_field_index(table)
    if place < 0:  # a sender without rows of this table may leave it out
        return {}, np.zeros(whole.num_rows + 1, dtype=np.int64)
    item = _item_type(whole.schema.field(place), table)
    lengths: list[NDArray[Any]] = []
    parts: list[Any] = []
    for chunk in cast("list[Any]", whole.column(place).chunks):
        if chunk.null_count or chunk.values.null_count:
            raise WireError(422, f"column {table} has nulls")
        lengths.append(np.diff(to_numpy(chunk.offsets)))
        parts.append(chunk.flatten())
    ends = np.zeros(whole.num_rows + 1, dtype=np.int64)
    np.cumsum(np.concatenate(lengths) if lengths else [], out=ends[1:])
    names = [item.field(index).name for index in range(item.num_fields)]
    if len(set(names)) < len(names):
        raise WireError(422, f"column {table} has a column twice")
    columns = {
        name: pa.chunked_array(
            [part.flatten()[index] for part in parts], type=item.field(index).type
        )
        for index, name in enumerate(names)
    }
    return columns, ends


def _table(
    items: dict[str, pa.ChunkedArray[Any]],
    table: str,
    *,
    keys: dict[str, list[Any]],
    ends: NDArray[np.int64],
) -> pa.Table:
    counts = np.diff(ends)
    num_rows = int(ends[-1])
    named: dict[str, Any] = {
        "run_id": coded_strings(
            np.repeat(np.arange(len(counts), dtype=np.int32), counts), keys["run_id"]
        ),
        "epoch": numbers(np.repeat(np.array(keys["epoch"], dtype=np.int32), counts)),
        "rank": numbers(_ranks(items, table, cut_ranks=keys["rank"], counts=counts)),
        "segment": numbers(np.repeat(np.array(keys["segment"], dtype=np.uint64), counts)),
    }
    for column in WIRE_TABLES[table]:
        found = items.get(column.name)
        if found is None and num_rows and column.default is None and not column.may_be_null:
            raise WireError(422, f"the stream has no column {table}.{column.name}")
        named[column.name] = (
            _default_column(column, num_rows)
            if found is None
            else _converted(found, column, label=f"{table}.{column.name}")
        )
    return pa.Table.from_arrays(list(named.values()), names=list(named))


def _ranks(
    items: dict[str, pa.ChunkedArray[Any]],
    table: str,
    *,
    cut_ranks: list[int],
    counts: NDArray[np.int64],
) -> NDArray[np.int32]:
    """Return the rank of each row: the cut's, or the row's own if the cut has several ranks."""
    ranks = np.repeat(np.array(cut_ranks, dtype=np.int32), counts)
    if ROW_RANK.name not in items:
        return ranks
    own = to_numpy(_converted(items[ROW_RANK.name], ROW_RANK, label=f"{table}.rank"))
    return np.where(ranks == NONE, own, ranks).astype(np.int32)


def _default_column(column: WireColumn, num_rows: int) -> Column:
    """Return the column of a sender that does not have it."""
    arrow_type: Any = column.arrow_type
    if pa.types.is_dictionary(arrow_type) or pa.types.is_string(arrow_type):
        return empty_column(column)
    dtype = np.dtype(arrow_type.to_pandas_dtype())
    if column.default is None:
        return optional_numbers(np.zeros(num_rows, dtype=dtype), np.zeros(num_rows, dtype=bool))
    return numbers(np.full(num_rows, column.default, dtype=dtype))


def _converted(found: pa.ChunkedArray[Any], column: WireColumn, *, label: str) -> Any:  # noqa: ANN401  # Arrow
    """Return a column in the store's type.

    Raises:
        WireError: 422 if it has another type, or nulls that are not allowed.
        pa.ArrowInvalid: A value does not fit the type.
    """
    if found.null_count and not column.may_be_null:
        raise WireError(422, f"column {label} has nulls")
    found_type, wanted = found.type, column.arrow_type
    if found_type == wanted:
        return found
    if _is_text(found_type) and _is_text(wanted):
        plain = found.cast(pa.string())
        return plain.dictionary_encode() if pa.types.is_dictionary(wanted) else plain
    if pa.types.is_integer(found_type) and pa.types.is_integer(wanted):
        return found.cast(wanted, safe=True)
    if pa.types.is_floating(found_type) and pa.types.is_floating(wanted):
        return found.cast(wanted, safe=True)
    raise WireError(422, f"column {label} is {found_type}, expected {wanted}")


def _is_text(arrow_type: pa.DataType) -> bool:
    if pa.types.is_dictionary(arrow_type):
        return _is_text(cast("Any", arrow_type).value_type)
    return pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type)
