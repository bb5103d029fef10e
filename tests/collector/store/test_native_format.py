"""Results in the native format: a streamed result equals one that is read whole."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest

from rankscope.collector.arrow_columns import to_codes, to_numpy
from rankscope.collector.errors import StoreQueryError
from rankscope.collector.store.native_format import read_native_blocks

if TYPE_CHECKING:
    import pyarrow as pa

    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.parametrize("store", ["embedded"], indirect=True)

NUM_ROWS = 70_000
"""More than one block; a block has at most 65,409 rows."""

SELECT = """
SELECT
    toInt8(number % 7 - 3) AS small, toUInt16(number) AS flags, toInt64(number) * -1000003 AS wide,
    cityHash64(number) AS hash, number / 4 AS share,
    toLowCardinality(concat('name', toString(intDiv(number, 5000)))) AS name
FROM numbers({rows:UInt64})
ORDER BY number
"""


class Trickle:
    """A stream that returns a few bytes at a time, as a network may."""

    def __init__(self, data: bytes, *, at_most: int) -> None:
        self._stream = io.BytesIO(data)
        self._at_most = at_most

    def read(self, size: int, /) -> bytes:
        return self._stream.read(min(size, self._at_most))


def columns_of(table: pa.Table) -> dict[str, list[object]]:
    codes, names = to_codes(table["name"])
    numbers = [name for name in table.column_names if name != "name"]
    found: dict[str, list[object]] = {name: to_numpy(table[name]).tolist() for name in numbers}
    return {**found, "name": [names[code] for code in codes]}


@pytest.mark.parametrize("expected", [NUM_ROWS, 2 * NUM_ROWS, 1])
def test_a_streamed_result_equals_the_whole_one_for_any_expected_size(
    store: Store, expected: int
) -> None:
    whole = store.arrow(SELECT, {"rows": NUM_ROWS})

    found = store.stream_arrow(SELECT, {"rows": NUM_ROWS}, num_rows=expected)

    assert found.num_rows == NUM_ROWS
    assert found.column_names == whole.column_names
    assert {
        name: column.num_chunks
        for name, column in zip(found.column_names, found.columns, strict=True)
    } == dict.fromkeys(found.column_names, 1)
    assert columns_of(found) == columns_of(whole)


def test_results_of_several_parameters_follow_each_other(store: Store) -> None:
    parts = [{"rows": rows} for rows in (3, 0, 70_000)]

    found = columns_of(store.stream_arrow(SELECT, *parts, num_rows=70_003))

    expected = [columns_of(store.arrow(SELECT, part)) for part in parts]
    assert found == {name: [row for part in expected for row in part[name]] for name in found}


def test_an_empty_result_has_its_columns(store: Store) -> None:
    found = store.stream_arrow(SELECT, {"rows": 0}, num_rows=0)

    assert found.num_rows == 0
    assert found.schema.equals(store.arrow(SELECT, {"rows": 0}).schema)


def test_a_column_of_an_unsupported_type_is_named(store: Store) -> None:
    with pytest.raises(StoreQueryError, match=r"column kinds has type Array\(UInt8\)"):
        store.stream_arrow("SELECT [1, 2] AS kinds", num_rows=1)


def test_the_store_works_after_a_failed_stream(store: Store) -> None:
    with pytest.raises(StoreQueryError):
        store.stream_arrow("SELECT * FROM nowhere", num_rows=1)
    with pytest.raises(StoreQueryError):
        store.stream_arrow("SELECT throwIf(number > 66000) AS a FROM numbers(70000)", num_rows=1)

    assert store.rows("SELECT 1 AS one") == [{"one": 1}]


def test_small_reads_give_the_same_columns(store: Store) -> None:
    with store._client().raw_stream(SELECT, parameters={"rows": NUM_ROWS}, fmt="Native") as stream:
        data = stream.read()

    found = read_native_blocks([Trickle(data, at_most=1000)], num_rows=NUM_ROWS)

    assert columns_of(found) == columns_of(store.arrow(SELECT, {"rows": NUM_ROWS}))


@pytest.mark.parametrize("num_bytes", [1, 30, 1000, 400_000])
def test_a_result_that_is_cut_short_is_an_error(store: Store, num_bytes: int) -> None:
    with store._client().raw_stream(SELECT, parameters={"rows": 100_000}, fmt="Native") as stream:
        data = stream.read()

    with pytest.raises(StoreQueryError, match="cut short"):
        read_native_blocks([io.BytesIO(data[:num_bytes])], num_rows=1)
