from __future__ import annotations

from typing import TYPE_CHECKING

import chdb
import pytest

from rankscope.collector.errors import StoreQueryError
from rankscope.collector.store.native_revision import split_type, with_revision

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Query = Callable[[str], bytes]

GO_REVISION = 54_460
"""``client_protocol_version`` of clickhouse-go 2."""

NOTE = bytes([1, 0, 2, 255, 255, 255, 255, 0])


@pytest.fixture(scope="module")
def query() -> Iterator[Query]:
    """Return a function that returns the native blocks of a result, of 5 rows each."""
    connection = chdb.connect(":memory:")  # type: ignore[no-untyped-call]
    connection.query("SET max_block_size = 5")
    yield lambda sql: bytes(connection.query(sql, "Native").bytes())
    connection.close()


def test_a_block_gets_a_block_info_and_each_column_a_serialization_byte() -> None:
    one_row = b"\x02\x01" + b"\x01n\x05UInt8" + b"\x07" + b"\x01s\x06String" + b"\x02hi"

    assert bytes(with_revision(memoryview(one_row), GO_REVISION)) == (
        NOTE + b"\x02\x01" + b"\x01n\x05UInt8" + b"\0\x07" + b"\x01s\x06String" + b"\0\x02hi"
    )


def test_an_older_client_gets_unchanged_blocks() -> None:
    block = memoryview(b"\x01\x01\x01n\x05UInt8\x07")

    assert with_revision(block, 54_405) is block
    assert bytes(with_revision(memoryview(b""), GO_REVISION)) == b""


@pytest.mark.parametrize(
    "expression",
    [
        "number",
        "toString(number)",
        "toFixedString('abc', 5)",
        "toNullable(toString(number))",
        "if(number = 1, NULL, number)",
        "toLowCardinality(toString(number % 2))",
        "toLowCardinality(if(number = 1, NULL, toString(number)))",
        "range(number)",
        "arrayMap(x -> toLowCardinality(toString(x)), range(number))",
        "[range(number), [7]]",
        "(number, toString(number), [number])",
        "CAST((1, 'x'), 'Tuple(a UInt8, `b c, (d` String)')",
        "map(toString(number), [number])",
        "map(toLowCardinality('k'), toNullable(1))",
        "toDateTime64(number, 3, 'Europe/Berlin')",
        "toDateTime(number, 'UTC')",
        "toDate(number)",
        "toDecimal64(number, 3)",
        "toDecimal256(number, 3)",
        "toUUID('00000000-0000-0000-0000-000000000001')",
        "CAST('a, (b', 'Enum8(\\'a, (b\\' = 1)')",
        "toInt256(number)",
        "toIntervalDay(number)",
        "number > 1",
        "toIPv6('::1')",
        "emptyArrayString()",
        "NULL",
    ],
)
def test_the_length_of_a_column_is_known_for_every_supported_type(
    query: Query, expression: str
) -> None:
    sql = f"SELECT {expression} AS value, 'end' AS mark FROM numbers(5)"
    blocks = query(sql)

    found = bytes(with_revision(memoryview(blocks), GO_REVISION))

    # A block of this column alone, with the same rows, gives the bytes of its values.
    alone = query(f"SELECT {expression} AS value FROM numbers(5)")
    head_bytes = alone.index(b"value") + len(b"value")
    head_bytes += 1 + alone[head_bytes]
    values = alone[head_bytes:]
    mark = b"\x04mark\x06String\0" + 5 * b"\x03end"
    assert found == NOTE + b"\x02\x05" + alone[2:head_bytes] + b"\0" + values + mark


def test_each_block_gets_a_block_info(query: Query) -> None:
    blocks = query("SELECT number FROM numbers(12)")

    assert blocks.count(b"UInt64") == 3
    assert bytes(with_revision(memoryview(blocks), GO_REVISION)).count(NOTE) == 3


def test_a_type_without_a_known_length_is_refused(query: Query) -> None:
    blocks = query("SELECT uniqState(number) AS s FROM numbers(3)")

    with pytest.raises(StoreQueryError, match="AggregateFunction has no Native form here: cast it"):
        with_revision(memoryview(blocks), GO_REVISION)


@pytest.mark.parametrize(
    ("text", "name", "inner"),
    [
        ("UInt8", "UInt8", []),
        ("DateTime64(3, 'UTC')", "DateTime64", ["3", "'UTC'"]),
        ("Tuple(a UInt8, `b c` Array(String))", "Tuple", ["UInt8", "Array(String)"]),
        ("Map(String, Tuple(UInt8, x Int8))", "Map", ["String", "Tuple(UInt8, x Int8)"]),
    ],
)
def test_a_type_is_split_into_name_and_arguments(text: str, name: str, inner: list[str]) -> None:
    assert split_type(text) == (name, inner)
