"""Reader of large results in ClickHouse's native format, block by block.

A result that is read whole is in memory three times before it is columns: in a buffer of the
engine that doubles as it grows, as the driver's bytes, and joined. For 1.9 million spans that was
770 MB, and the kernel took longer to clear the pages than the statement took.

Source: ``NativeWriter``, ``VarInt``, ``SerializationString``, ``SerializationLowCardinality`` and
the ``serializeBinaryBulk`` methods of ClickHouse.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from ..arrow_columns import coded_strings, numbers
from ..errors import StoreQueryError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from numpy.typing import NDArray

LOW_CARDINALITY_HAS_KEYS = 1 << 9
"""Set if a block of codes brings the texts that they index, as in all blocks of a result."""

INDEX_WIDTHS = (1, 2, 4, 8)
"""Bytes of a code, by the lowest byte of the flags of a low-cardinality column."""

READ_BYTES = 1 << 20
DTYPES = {
    f"{sign}Int{8 * width}": np.dtype(f"<{letter}{width}")
    for sign, letter in (("", "i"), ("U", "u"))
    for width in (1, 2, 4, 8)
} | {"Float32": np.dtype("<f4"), "Float64": np.dtype("<f8")}
CODED_TEXT = "LowCardinality(String)"
INDEX_DTYPES = tuple(np.dtype(f"<u{width}") for width in INDEX_WIDTHS)


class Readable(Protocol):
    """Source of a result's bytes."""

    def read(self, size: int, /) -> bytes:
        """Return up to ``size`` bytes; none at the end."""
        ...


def read_native_blocks(streams: Iterable[Readable], *, num_rows: int) -> pa.Table:
    """Return results of equal columns, one after the other, with each column in one chunk.

    Args:
        streams: Native blocks of revision 0; columns of numbers or ``LowCardinality(String)``.
        num_rows: Expected number of rows; more rows cost a copy.

    Raises:
        StoreQueryError: The result is cut short, or a column has another type.
    """
    columns: dict[str, _Numbers | _Codes] = {}
    for source in map(_Source, streams):
        while not source.is_at_end():
            num_columns, num_block_rows = source.varint(), source.varint()
            for _ in range(num_columns):
                name, kind = source.text(), source.text()
                if name not in columns:
                    columns[name] = _column(name, kind, num_rows)
                if num_block_rows:
                    columns[name].take(source, num_block_rows)
    return pa.table({name: column.done() for name, column in columns.items()})


def _column(name: str, kind: str, num_rows: int) -> _Numbers | _Codes:
    if kind == CODED_TEXT:
        return _Codes(num_rows)
    if kind in DTYPES:
        return _Numbers(DTYPES[kind], num_rows)
    raise StoreQueryError(
        f"column {name} has type {kind}: a result that is read in blocks may have numbers"
        f" and {CODED_TEXT} only"
    )


class NativeCursor(ABC):
    """A position in native blocks, from which values are read."""

    @abstractmethod
    def take(self, num_bytes: int) -> memoryview:
        """Return the next bytes, and move behind them."""

    def varint(self) -> int:
        """Return an integer of 7 bits a byte, lowest first."""
        value = shift = 0
        while True:
            (byte,) = self.take(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:  # noqa: PLR2004  # the continuation bit
                return value
            shift += 7

    def uint64(self) -> int:
        """Return an integer of 8 bytes."""
        return int.from_bytes(self.take(8), "little")

    def text(self) -> str:
        """Return a text, preceded by its length in bytes."""
        return bytes(self.take(self.varint())).decode()


class _Source(NativeCursor):
    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self._buffer = memoryview(b"")

    def is_at_end(self) -> bool:
        if not len(self._buffer):
            self._buffer = memoryview(self._stream.read(READ_BYTES))
        return not len(self._buffer)

    def take(self, num_bytes: int) -> memoryview:
        if num_bytes > len(self._buffer):
            self._fill(num_bytes)
        taken, self._buffer = self._buffer[:num_bytes], self._buffer[num_bytes:]
        return taken

    def array(self, dtype: np.dtype[Any], num: int) -> NDArray[Any]:
        return np.frombuffer(self.take(num * dtype.itemsize), dtype)

    def _fill(self, num_bytes: int) -> None:
        pieces: list[memoryview | bytes] = [self._buffer]
        missing = num_bytes - len(self._buffer)
        while missing > 0:
            piece = self._stream.read(max(missing, READ_BYTES))
            if not piece:
                raise StoreQueryError("the store's answer is cut short")
            pieces.append(piece)
            missing -= len(piece)
        self._buffer = memoryview(b"".join(pieces))


class _Numbers:
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

    def values(self) -> NDArray[Any]:
        return self._values[: self._num]

    def done(self) -> pa.Array[Any]:
        return numbers(self.values())


class _Codes:
    """A column of texts; the dictionaries of its blocks are joined."""

    def __init__(self, num_rows: int) -> None:
        self._codes = _Numbers(np.dtype(np.int32), num_rows)
        self._codes_by_text: dict[str, int] = {}

    def take(self, source: _Source, num: int) -> None:
        source.take(8)  # the version of the serialization
        flags = source.uint64()
        if not flags & LOW_CARDINALITY_HAS_KEYS:
            raise StoreQueryError("the store's answer has codes without their texts")
        texts = [source.text() for _ in range(source.uint64())]
        if source.uint64() != num:
            raise StoreQueryError("the store's answer has columns of different lengths")
        index = source.array(INDEX_DTYPES[flags & 0xFF], num)
        is_used = np.zeros(len(texts), dtype=np.bool_)  # every dictionary has "", used or not
        is_used[index] = True
        lookup = np.zeros(len(texts), dtype=np.int32)
        for at in np.flatnonzero(is_used).tolist():
            lookup[at] = self._codes_by_text.setdefault(texts[at], len(self._codes_by_text))
        self._codes.add(lookup[index])

    def done(self) -> pa.Array[Any]:
        return coded_strings(self._codes.values(), tuple(self._codes_by_text))
