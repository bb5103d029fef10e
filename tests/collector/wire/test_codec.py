from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from rankscope.collector.arrow_columns import numbers, optional_numbers, repeated_string, strings
from rankscope.collector.errors import WireError
from rankscope.collector.spool.cut import Cut, CutKey
from rankscope.collector.spool.records import CutRows
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.wire.codec import WireLimits, decode_batch, empty_column, encode_cuts
from rankscope.collector.wire.schema import WIRE_TABLES, cuts_schema
from rankscope.tracer.span import SpanKind
from tests.support.collector.kept_cuts import KeptCuts, decode_cuts
from tests.support.collector.spool_builder import SpoolBuilder

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def cuts(tmp_path: Path) -> list[Cut]:
    """Return two cuts of a real spool: one with all kinds of rows, and one with spans only."""
    first = SpoolBuilder(tmp_path, run_id="run")
    first.span("fwd", start_ns=5, duration_ns=7, step=1, microbatch=2)
    first.span(
        "all-reduce",
        kind=SpanKind.DP_COMM,
        start_ns=9,
        duration_ns=1,
        comm=(2**64 - 1, 3, 4, 5, 6, 7),
    )
    first.step(1, start_ns=0, duration_ns=100, num_tokens=9, loss=0.5, left_out=3)
    first.microbatch(2, step=1, num_tokens=4, sum_squared_lengths=16)
    first.span("broken", start_ns=-5)
    first.end()
    second = SpoolBuilder(tmp_path, run_id="run", rank=1)
    second.span("outer\u202e", start_ns=1, duration_ns=9, depth=0)
    second.end()
    sink = KeptCuts()
    tail = SpoolTail(tmp_path, sink)
    tail.poll()
    tail.close()
    return sorted(sink.cuts, key=lambda cut: cut.key.rank)


def rows_of(cut: Cut) -> dict[str, Any]:
    return {
        table: [
            {k: repr(v) for k, v in row.items()} for row in getattr(cut.rows, table).to_pylist()
        ]
        for table in WIRE_TABLES
    }


def test_decoding_is_the_inverse_of_encoding(cuts: list[Cut]) -> None:
    back = decode_cuts(encode_cuts(cuts))

    assert [cut.rows.spans.num_rows for cut in cuts] == [2, 1]
    assert [cut.rows.bad_rows.num_rows for cut in cuts] == [1, 0]
    for sent, found in zip(cuts, back, strict=True):
        assert found.key == sent.key
        assert (found.sha256, found.num_torn) == (sent.sha256, sent.num_torn)
        assert rows_of(found) == rows_of(sent)
        for table in WIRE_TABLES:
            assert getattr(found.rows, table).schema == getattr(sent.rows, table).schema


def test_a_body_may_have_no_cuts(cuts: list[Cut]) -> None:
    assert decode_cuts(encode_cuts([])) == []


def test_a_cut_without_any_row_keeps_its_range(cuts: list[Cut]) -> None:
    """A cut may have torn rows only."""
    empty = Cut(
        key=cuts[0].key,
        sha256="00",
        num_torn=3,
        rows=CutRows(**{table: getattr(cuts[0].rows, table).slice(0, 0) for table in WIRE_TABLES}),
    )

    (found,) = decode_cuts(encode_cuts([empty]))

    assert (found.key, found.num_torn) == (empty.key, 3)
    assert found.rows.spans.num_rows == 0
    assert found.rows.spans.schema == empty.rows.spans.schema


def test_a_cut_of_several_ranks_has_the_rank_of_each_row(cuts: list[Cut]) -> None:
    """Simulated and imported runs are cut by step, not by rank."""
    spans = pa.concat_tables([cut.rows.spans for cut in cuts])
    rows = CutRows(
        spans=spans, steps=cuts[0].rows.steps, microbatches=cuts[0].rows.microbatches,
        bad_rows=cuts[0].rows.steps.slice(0, 0),
    )  # fmt: skip
    several = Cut(key=replace(cuts[0].key, rank=-1), sha256="00", num_torn=0, rows=rows)

    back, other = decode_cuts(encode_cuts([several, cuts[1]]))

    assert back.rows.spans["rank"].to_pylist() == [0, 0, 1]
    assert back.rows.spans["name"].to_pylist() == spans["name"].to_pylist()
    assert back.rows.steps["rank"].to_pylist() == [0]
    assert other.rows.spans["rank"].to_pylist() == [1]


def test_a_column_that_rows_do_not_have_gets_its_default(cuts: list[Cut]) -> None:
    """Simulated steps have no column ``left_out``."""
    rows = replace(cuts[0].rows, steps=cuts[0].rows.steps.drop_columns(["left_out"]))

    (back,) = decode_cuts(encode_cuts([replace(cuts[0], rows=rows)]))

    assert back.rows.steps["left_out"].to_pylist() == [0]


def test_a_batch_has_the_offsets_of_each_cut(cuts: list[Cut]) -> None:
    batch = decode_batch(encode_cuts([*cuts, *cuts]))

    assert batch.offsets["spans"].tolist() == [0, 2, 3, 5, 6]
    assert batch.tables["spans"].num_rows == 6
    assert batch.unknown_columns == ()


# --- other senders


def restreamed(body: bytes, table: pa.Table | None = None, **changes: Any) -> bytes:  # noqa: ANN401 -- columns
    """Return the body rewritten: with another version, or fewer or more columns."""
    whole = pa.ipc.open_stream(body).read_all() if table is None else table
    for name in changes.get("without", ()):
        whole = whole.drop_columns([name])
    for name, column in changes.get("extra", {}).items():
        whole = whole.append_column(name, column)
    metadata = changes.get("metadata", {b"rankscope.schema": b"1"})
    whole = whole.replace_schema_metadata(metadata)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, whole.schema) as writer:
        writer.write_table(whole)
    return sink.getvalue().to_pybytes()


def without_item(body: bytes, table: str, *names: str, extra: str | None = None) -> bytes:
    """Return the body without some columns of a nested table, or with one more."""
    whole = pa.ipc.open_stream(body).read_all()
    lists: Any = whole[table].combine_chunks()
    items = lists.values
    kept = [name for name in [field.name for field in items.type] if name not in names]
    arrays = [items.field(name) for name in kept]
    if extra is not None:
        kept.append(extra)
        arrays.append(numbers(np.arange(len(items), dtype=np.int64)))
    nested = pa.ListArray.from_arrays(lists.offsets, pa.StructArray.from_arrays(arrays, names=kept))
    place = whole.schema.get_field_index(table)
    return restreamed(body, whole.set_column(place, table, nested))


def test_columns_that_an_older_sender_does_not_have_get_their_default(cuts: list[Cut]) -> None:
    body = without_item(encode_cuts(cuts), "steps", "left_out", "loss")
    body = without_item(body, "spans", "seq", "group_id", "parent_row")

    first = decode_cuts(body)[0]

    (step,) = first.rows.steps.to_pylist()
    assert step["left_out"] == 0
    assert math.isnan(step["loss"])
    assert [row["seq"] for row in first.rows.spans.to_pylist()] == [-1, -1]
    assert [row["group_id"] for row in first.rows.spans.to_pylist()] == [0, 0]
    assert [row["parent_row"] for row in first.rows.spans.to_pylist()] == [None, None]


def test_unknown_columns_of_a_newer_sender_are_ignored_and_listed(cuts: list[Cut]) -> None:
    body = without_item(encode_cuts(cuts), "spans", extra="power_w")
    body = restreamed(body, extra={"agent": pa.array(["a", "b"])})

    batch = decode_batch(body)

    assert batch.unknown_columns == ("agent", "spans.power_w")
    assert batch.tables["spans"].column_names == cuts[0].rows.spans.column_names


def test_a_column_without_a_default_is_required(cuts: list[Cut]) -> None:
    with pytest.raises(WireError, match=r"no column spans\.start_ns") as caught:
        decode_cuts(without_item(encode_cuts(cuts), "spans", "start_ns"))
    assert caught.value.status == 422


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({b"rankscope.schema": b"2"}, "schema version 2, this collector reads 1 to 1"),
        ({b"rankscope.schema": b"0"}, "schema version 0, this collector reads 1 to 1"),
        ({b"rankscope.schema": b"one"}, "has no rankscope.schema"),
        ({}, "has no rankscope.schema"),
    ],
)
def test_another_version_is_rejected_with_both_versions(
    cuts: list[Cut], metadata: dict[bytes, bytes], message: str
) -> None:
    with pytest.raises(WireError, match=message) as caught:
        decode_cuts(restreamed(encode_cuts(cuts), metadata=metadata))
    assert caught.value.status == 422


def test_other_types_with_the_same_values_are_accepted(cuts: list[Cut]) -> None:
    whole = pa.ipc.open_stream(encode_cuts(cuts)).read_all()
    wide = whole.set_column(1, "epoch", whole["epoch"].cast(pa.int64()))
    coded = wide.set_column(0, "run_id", wide["run_id"].dictionary_encode())

    assert [cut.key for cut in decode_cuts(restreamed(b"", coded))] == [cut.key for cut in cuts]


@pytest.mark.parametrize(
    ("epoch", "message"),
    [
        (numbers(np.array([2**40, 0])), "not in range|out of bounds"),
        (strings(["a", "b"]), "epoch is string, expected int32"),
    ],
)
def test_a_value_that_does_not_fit_its_column_is_rejected(
    cuts: list[Cut], epoch: pa.Array[Any], message: str
) -> None:
    whole = pa.ipc.open_stream(encode_cuts(cuts)).read_all()
    with pytest.raises(WireError, match=message) as caught:
        decode_cuts(restreamed(b"", whole.set_column(1, "epoch", epoch)))
    assert caught.value.status == 422


def test_nulls_in_a_column_without_nulls_are_rejected(cuts: list[Cut]) -> None:
    whole = pa.ipc.open_stream(encode_cuts(cuts)).read_all()
    holed = optional_numbers(np.array([1, 2], dtype=np.int32), np.array([True, False]))
    with pytest.raises(WireError, match="epoch has nulls"):
        decode_cuts(restreamed(b"", whole.set_column(1, "epoch", holed)))


# --- bodies that are too large or no Arrow stream


def many_rows(num_rows: int) -> Cut:
    """Return a cut of equal rows, which compress to almost nothing."""
    key = CutKey(run_id="r", epoch=0, rank=0, process="p", segment=1, first_row=0, end_row=num_rows)
    tables: dict[str, pa.Table] = {}
    for table, columns in WIRE_TABLES.items():
        rows = num_rows if table == "spans" else 0
        named = {
            column.name: empty_column(column)
            if not rows
            else repeated_string("x", rows)
            if pa.types.is_dictionary(column.arrow_type)
            else numbers(np.zeros(rows, dtype=column.arrow_type.to_pandas_dtype()))
            for column in columns
        }
        tables[table] = pa.Table.from_arrays(list(named.values()), names=list(named))
    return Cut(key=key, sha256=hashlib.sha256().hexdigest(), num_torn=0, rows=CutRows(**tables))


def test_a_body_that_inflates_too_much_is_rejected() -> None:
    body = encode_cuts([many_rows(100_000)])
    assert len(body) < 100_000

    with pytest.raises(WireError, match="inflates to more than 1000000 bytes") as caught:
        decode_batch(body, limits=WireLimits(max_inflated_bytes=1_000_000))

    assert caught.value.status == 413
    assert len(decode_cuts(body)) == 1


def test_too_many_cuts_or_rows_are_rejected(cuts: list[Cut]) -> None:
    body = encode_cuts(cuts)
    with pytest.raises(WireError, match="more than 1 cuts") as caught:
        decode_batch(body, limits=WireLimits(max_cuts=1))
    assert caught.value.status == 413
    with pytest.raises(WireError, match="more than 2 rows") as caught:
        decode_batch(body, limits=WireLimits(max_rows=2))
    assert caught.value.status == 413


def test_the_written_schema_is_the_declared_one(cuts: list[Cut]) -> None:
    assert pa.ipc.open_stream(encode_cuts(cuts)).schema.equals(cuts_schema(), check_metadata=True)
