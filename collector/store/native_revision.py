"""Native blocks of newer protocol revisions, for Grafana's data source over HTTP.

Grafana's ClickHouse plugin uses the Go driver, which always asks for the format Native over HTTP
and names its revision (``client_protocol_version``). The embedded engine writes revision 0 only.
From revision 54454 on, a block info precedes each block, and a byte after each column's type says
whether its serialization is a special one (never, here). To insert that byte, the length of each
column must be known: it follows from its type and the number of rows. Clients of older revisions,
such as clickhouse-connect, read revision 0.

Source: ``NativeWriter``, ``BlockInfo`` and the ``serializeBinaryBulk`` methods of ClickHouse.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ..errors import StoreQueryError
from .native_format import INDEX_WIDTHS, LOW_CARDINALITY_HAS_KEYS, NativeCursor

if TYPE_CHECKING:
    from collections.abc import Iterator

SPECIAL_SERIALIZATION_REVISION = 54_454

BLOCK_INFO = bytes([1, 0, 2, 255, 255, 255, 255, 0])
"""Field 1: is_overflows, false. Field 2: bucket number, -1 for none. Field 0: the end."""

NO_SPECIAL_SERIALIZATION = b"\0"

WIDTHS = {
    "Bool": 1, "Int8": 1, "UInt8": 1, "Enum8": 1, "Nothing": 1, "Int16": 2, "UInt16": 2,
    "Enum16": 2, "Date": 2, "BFloat16": 2, "Int32": 4, "UInt32": 4, "Float32": 4, "Date32": 4,
    "DateTime": 4, "IPv4": 4, "Decimal32": 4, "Time": 4, "Int64": 8, "UInt64": 8, "Float64": 8,
    "DateTime64": 8, "Time64": 8, "Decimal64": 8, "Int128": 16, "UInt128": 16, "UUID": 16,
    "IPv6": 16, "Decimal128": 16, "Int256": 32, "UInt256": 32, "Decimal256": 32,
}  # fmt: skip
"""Bytes of a value, for types of fixed width."""

DECIMAL_WIDTHS = ((9, 4), (18, 8), (38, 16), (76, 32))
"""Largest precision of a ``Decimal(P, S)`` for each width."""

PART = re.compile(r"'(?:[^'\\]|\\.)*'|`(?:[^`\\]|\\.)*`|[(), ]|[^'`(), ]+")


def with_revision(body: memoryview, revision: int) -> memoryview:
    """Return native blocks of revision 0 in the form of a client's revision.

    Raises:
        StoreQueryError: The length of a column of this type is not known.
    """
    if revision < SPECIAL_SERIALIZATION_REVISION:
        return body
    return memoryview(b"".join(_pieces(body)))


def _pieces(body: memoryview) -> Iterator[bytes | memoryview]:
    reader = _Reader(body)
    while reader.at < len(body):
        begin = reader.at
        num_columns, num_rows = reader.varint(), reader.varint()
        yield BLOCK_INFO
        yield body[begin : reader.at]
        for _ in range(num_columns):
            begin = reader.at
            reader.text()
            column_type = reader.text()
            yield body[begin : reader.at]
            yield NO_SPECIAL_SERIALIZATION
            begin = reader.at
            if num_rows:
                reader.skip_prefix(column_type)
                reader.skip(column_type, num_rows)
            yield body[begin : reader.at]


class _Reader(NativeCursor):
    """Cursor that skips the values of native columns."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self.at = 0

    def take(self, num_bytes: int) -> memoryview:
        self.at += num_bytes
        return self._body[self.at - num_bytes : self.at]

    def skip_prefix(self, column_type: str) -> None:
        """Skip a column's prefix: a version for each LowCardinality in its type."""
        name, inner = split_type(column_type)
        if name == "LowCardinality":
            self.at += 8
        elif name in {"Array", "Nullable", "Tuple", "Map"}:
            for part in inner:
                self.skip_prefix(part)
        elif name == "SimpleAggregateFunction":
            self.skip_prefix(inner[-1])

    def skip(self, column_type: str, num_rows: int) -> None:
        """Skip the values of a column. An inner column may have none."""
        name, inner = split_type(column_type)
        width = _width(name, inner)
        if not num_rows:
            return
        if width is not None:
            self.at += width * num_rows
        elif name == "String":
            for _ in range(num_rows):
                num_bytes = self.varint()
                self.at += num_bytes
        elif name == "LowCardinality":
            self._skip_low_cardinality(inner[0])
        else:
            self._skip_nested(name, inner, num_rows)

    def _skip_nested(self, name: str, inner: list[str], num_rows: int) -> None:
        if name == "Nullable":
            self.at += num_rows
        elif name in {"Array", "Map"}:
            self.at += 8 * (num_rows - 1)
            num_rows = self.uint64()
        elif name == "SimpleAggregateFunction":
            inner = inner[-1:]
        elif name != "Tuple":
            raise StoreQueryError(f"type {name} has no Native form here: cast it")
        for part in inner:
            self.skip(part, num_rows)

    def _skip_low_cardinality(self, key_type: str) -> None:
        flags = self.uint64()
        name, inner = split_type(key_type)
        if flags & LOW_CARDINALITY_HAS_KEYS:
            self.skip(inner[0] if name == "Nullable" else key_type, self.uint64())
        num_rows = self.uint64()
        self.at += INDEX_WIDTHS[flags & 0xFF] * num_rows


def split_type(text: str) -> tuple[str, list[str]]:
    """Return the name and the arguments of a type, without the names of a tuple's elements."""
    name, bracket, rest = text.partition("(")
    if not bracket:
        return name, []
    parts, depth, current = [], 0, ""
    for part in PART.findall(rest[:-1]):
        depth += {"(": 1, ")": -1}.get(part, 0)
        if part == "," and not depth:
            parts.append(current)
            current = ""
        elif part != " " or depth:
            current += part
        elif name in {"Tuple", "Nested"}:
            current = ""  # the element's name ended here
    return name, [*parts, current]


def _width(name: str, inner: list[str]) -> int | None:
    if name in WIDTHS:
        return WIDTHS[name]
    if name == "FixedString":
        return int(inner[0])
    if name == "Decimal":
        return next(width for most, width in DECIMAL_WIDTHS if int(inner[0]) <= most)
    return 8 if name.startswith("Interval") else None
