"""Thrift's compact form, as far as parquet's headers use it.

Source: ``doc/specs/thrift-compact-protocol.md`` of Apache Thrift.
"""

from __future__ import annotations

from typing import TypeAlias

Struct: TypeAlias = "dict[int, Value]"
Value: TypeAlias = "int | bytes | Struct | list[Value] | None"
"""Floats are passed over, and None."""

STOP, TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY = range(9)
LIST = 9
STRUCT = 12
DOUBLE_BYTES = 8
MAX_DEPTH = 8
"""Parquet's headers are six deep; beyond, they are none."""

MAX_VARINT_BYTES = 10
NIBBLE_BITS = 4
LONG_LIST = 15
"""The length of a longer list follows as a number of its own."""


class ThriftError(ValueError):
    """The bytes are no structure of this form."""


class StructReader:
    """A cursor over bytes that hold one structure after another."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.offset = 0
        """Where the next byte is read."""

    def read(self, depth: int = 0) -> Struct:
        """Return the fields of a structure by their numbers.

        Raises:
            ThriftError: It is cut short, nested too deep, or of types that parquet does not use.
        """
        if depth >= MAX_DEPTH:
            raise ThriftError
        fields: Struct = {}
        number = 0
        while (head := self._byte()) & 0x0F != STOP:
            delta = head >> NIBBLE_BITS
            number = number + delta if delta else self._zigzag()
            fields[number] = self._value(head & 0x0F, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Value:
        if kind in (TRUE, FALSE):
            return int(kind == TRUE)
        if kind == BYTE:
            return self._byte()
        if kind in (I16, I32, I64):
            return self._zigzag()
        if kind == STRUCT:
            return self.read(depth + 1)
        if kind == LIST:
            return self._list(depth + 1)
        if kind not in (DOUBLE, BINARY):
            raise ThriftError
        length = DOUBLE_BYTES if kind == DOUBLE else self._varint()
        begin, self.offset = self.offset, self.offset + length
        if self.offset > len(self._data):
            raise ThriftError
        return self._data[begin : self.offset] if kind == BINARY else None

    def _list(self, depth: int) -> list[Value]:
        if depth >= MAX_DEPTH:
            raise ThriftError
        head = self._byte()
        length = head >> NIBBLE_BITS
        if length == LONG_LIST:
            length = self._varint()
        kind = head & 0x0F
        # In a list a truth value is a byte of its own.
        kind = BYTE if kind in (TRUE, FALSE) else kind
        return [self._value(kind, depth) for _ in range(length)]

    def _byte(self) -> int:
        if self.offset >= len(self._data):
            raise ThriftError
        self.offset += 1
        return self._data[self.offset - 1]

    def _varint(self) -> int:
        value = 0
        for place in range(MAX_VARINT_BYTES):
            byte = self._byte()
            value |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:  # noqa: PLR2004  # the bit that says "more follows"
                return value
        raise ThriftError

    def _zigzag(self) -> int:
        coded = self._varint()
        return (coded >> 1) ^ -(coded & 1)
