"""Read a result of many rows block by block, into columns that were made for all of them.

A result that comes whole stands three times in memory before it is columns: in a buffer of the
engine that doubles as it grows, as the driver's bytes, and joined. For 1.9 million spans that were
770 MB, and the kernel's clearing of their pages took longer than the statement.

Source: ``NativeWriter`` and the ``serializeBinaryBulk`` methods of ClickHouse.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from ..arrow_columns import coded_strings, numbers
from ..errors import StoreQueryError

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

LOW_CARDINALITY_HAS_KEYS = 1 << 9
"""Set where a block of codes brings the texts that they index, as all blocks of an answer do."""

INDEX_WIDTHS = (1, 2, 4, 8)
"""Bytes a code, by the lowest byte of a low cardinality's flags."""

PIECE_BYTES = 1 << 20
DTYPES = {
    f"{sign}Int{8 * width}": np.dtype(f"<{letter}{width}")
    for sign, letter in (("", "i"), ("U", "u"))
    for width in (1, 2, 4, 8)
} | {"Float32": np.dtype("<f4"), "Float64": np.dtype("<f8")}
CODED = "LowCardinality(String)"
INDEX_DTYPES = tuple(np.dtype(f"<u{width}") for width in INDEX_WIDTHS)


class Readable(Protocol):
    """What a result comes from."""

    def read(self, size: int, /) -> bytes:
        """Return up to so many bytes, none at the end."""
        ...


def read_blocks(stream: Readable, *, num_rows: int) -> pa.Table:
    """Return a result in the native format as Arrow columns, each in one piece.

    Args:
        stream: Native blocks of revision 0, columns of numbers and of texts with a dictionary.
        num_rows: How many rows are expected; more cost a copy.

    Raises:
        StoreQueryError: The result breaks off, or has a column of another type.
    """
    source = _Source(stream)
    columns: dict[str, _Numbers | _Codes] = {}
    while not source.is_at_end():
        num_columns, num_here = source.varint(), source.varint()
        for _ in range(num_columns):
            name, kind = source.text(), source.text()
            if name not in columns:
                columns[name] = _column(name, kind, num_rows)
            if num_here:
                columns[name].take(source, num_here)
    return pa.table({name: column.done() for name, column in columns.items()})


def _column(name: str, kind: str, num_rows: int) -> _Numbers | _Codes:
    if kind == CODED:
        return _Codes(num_rows)
    if kind in DTYPES:
        return _Numbers(DTYPES[kind], num_rows)
    raise StoreQueryError(f"column {name} is of type {kind}, which is not read block by block")


class NativeCursor(ABC):
    """A place in native blocks, from which on words are read."""

    @abstractmethod
    def take(self, num_bytes: int) -> memoryview:
        """Return so many bytes and go on behind them."""

    def varint(self) -> int:
        """Return a whole number of 7 bits a byte, the lowest first."""
        value = shift = 0
        while True:
            (byte,) = self.take(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:  # noqa: PLR2004  # the bit that says "more"
                return value
            shift += 7

    def uint64(self) -> int:
        """Return a whole number of 8 bytes."""
        return int.from_bytes(self.take(8), "little")

    def text(self) -> str:
        """Return a text, whose length in bytes comes first."""
        return bytes(self.take(self.varint())).decode()


class _Source(NativeCursor):
    """Takes so many bytes at a time from a stream."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._held = memoryview(b"")

    def is_at_end(self) -> bool:
        if not len(self._held):
            self._held = memoryview(self._stream.read(PIECE_BYTES))
        return not len(self._held)

    def take(self, num_bytes: int) -> memoryview:
        if num_bytes > len(self._held):
            self._hold(num_bytes)
        taken, self._held = self._held[:num_bytes], self._held[num_bytes:]
        return taken

    def array(self, dtype: np.dtype[Any], num: int) -> NDArray[Any]:
        return np.frombuffer(self.take(num * dtype.itemsize), dtype)

    def _hold(self, num_bytes: int) -> None:
        parts: list[memoryview | bytes] = [self._held]
        missing = num_bytes - len(self._held)
        while missing > 0:
            piece = self._stream.read(max(missing, PIECE_BYTES))
            if not piece:
                raise StoreQueryError("the store's answer broke off")
            parts.append(piece)
            missing -= len(piece)
        self._held = memoryview(b"".join(parts))


class _Numbers:
    """A column of numbers."""

    def __init__(self, dtype: np.dtype[Any], num_rows: int) -> None:
        self._values = np.empty(num_rows, dtype)
        self._num = 0

    def take(self, source: _Source, num: int) -> None:
        self.add(source.array(self._values.dtype, num))

    def add(self, values: NDArray[Any]) -> None:
        end = self._num + len(values)
        if end > len(self._values):
            more = np.empty(max(end, len(self._values) // 2), self._values.dtype)
            self._values = np.concatenate((self._values[: self._num], more))
        self._values[self._num : end] = values
        self._num = end

    def held(self) -> NDArray[Any]:
        return self._values[: self._num]

    def done(self) -> pa.Array[Any]:
        return numbers(self.held())


class _Codes:
    """A column of texts; blocks have dictionaries of their own, which are joined."""

    def __init__(self, num_rows: int) -> None:
        self._codes = _Numbers(np.dtype(np.int32), num_rows)
        self._places: dict[str, int] = {}

    def take(self, source: _Source, num: int) -> None:
        source.take(8)  # a version
        flags = source.uint64()
        if not flags & LOW_CARDINALITY_HAS_KEYS:
            raise StoreQueryError("the store's answer has codes without their texts")
        texts = [source.text() for _ in range(source.uint64())]
        if source.uint64() != num:
            raise StoreQueryError("the store's answer has columns of different lengths")
        index = source.array(INDEX_DTYPES[flags & 0xFF], num)
        is_used = np.zeros(len(texts), dtype=np.bool_)  # each dictionary holds "", used or not
        is_used[index] = True
        lookup = np.zeros(len(texts), dtype=np.int32)
        for at in np.flatnonzero(is_used).tolist():
            lookup[at] = self._places.setdefault(texts[at], len(self._places))
        self._codes.add(lookup[index])

    def done(self) -> pa.Array[Any]:
        return coded_strings(self._codes.held(), tuple(self._places))
