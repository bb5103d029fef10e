from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from rankscope.collector.gateway.errors import QueryError
from rankscope.collector.gateway.native_blocks import split_type, with_revision
from rankscope.collector.gateway.session import ReadOnlySession
from rankscope.collector.store.store import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

GO_REVISION = 54_460
"""``client_protocol_version`` of clickhouse-go 2."""

NOTE = bytes([1, 0, 2, 255, 255, 255, 255, 0])


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReadOnlySession]:
    with open_store(f"chdb://{tmp_path_factory.mktemp('store')}") as store:
        assert store.path is not None
        opened = ReadOnlySession(store.path, {"max_block_size": 5})
        yield opened
        opened.close()


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
    handle: ReadOnlySession, expression: str
) -> None:
    sql = f"SELECT {expression} AS value, 'end' AS mark FROM numbers(5)"
    blocks = handle.run(sql, "Native")

    found = bytes(with_revision(memoryview(blocks), GO_REVISION))

    # A block of this column alone, with the same rows, gives the bytes of its values.
    alone = handle.run(f"SELECT {expression} AS value FROM numbers(5)", "Native")
    head_bytes = alone.index(b"value") + len(b"value")
    head_bytes += 1 + alone[head_bytes]
    values = alone[head_bytes:]
    mark = b"\x04mark\x06String\0" + 5 * b"\x03end"
    assert found == NOTE + b"\x02\x05" + alone[2:head_bytes] + b"\0" + values + mark


def test_each_block_gets_a_block_info(handle: ReadOnlySession) -> None:
    blocks = handle.run("SELECT number FROM numbers(12)", "Native")

    assert blocks.count(b"UInt64") == 3
    assert bytes(with_revision(memoryview(blocks), GO_REVISION)).count(NOTE) == 3


def test_a_type_without_a_known_length_is_refused(handle: ReadOnlySession) -> None:
    blocks = handle.run("SELECT uniqState(number) AS s FROM numbers(3)", "Native")

    with pytest.raises(QueryError, match="AggregateFunction has no Native form here: cast it"):
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
