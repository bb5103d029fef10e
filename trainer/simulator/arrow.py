"""Arrow columns from numpy arrays, by their buffers: nothing is converted element by element."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Column = pa.Array[Any]

ARROW_TYPES: dict[str, pa.DataType] = {
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "float64": pa.float64(),
}


def number_column(values: NDArray[Any], dtype: Any = None) -> Column:  # noqa: ANN401  # a numpy dtype
    """Return the column over ``values``, converted to ``dtype`` where it differs."""
    held = np.ascontiguousarray(values, dtype=dtype)
    return pa.Array.from_buffers(
        ARROW_TYPES[held.dtype.name], len(held), [None, pa.py_buffer(held.data)]
    )


def null_column(num_rows: int) -> Column:
    """Return a column of unknown row numbers."""
    bits, values = np.zeros(-(-num_rows // 8), dtype=np.uint8), np.zeros(num_rows, dtype=np.uint32)
    buffers: list[pa.Buffer | None] = [pa.py_buffer(bits.data), pa.py_buffer(values.data)]
    return pa.Array.from_buffers(pa.uint32(), num_rows, buffers)


def text_column(texts: Sequence[str]) -> Column:
    """Return the column of a few texts."""
    encoded = [text.encode() for text in texts]
    offsets = np.zeros(len(encoded) + 1, dtype=np.int32)
    np.cumsum([len(text) for text in encoded], out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets.data), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def coded_column(codes: NDArray[Any], texts: Sequence[str]) -> Column:
    """Return the dictionary column whose row ``i`` reads ``texts[codes[i]]``; texts all differ."""
    return pa.DictionaryArray.from_arrays(number_column(codes, np.int32), text_column(texts))


def same_column(text: str, num_rows: int) -> Column:
    """Return the dictionary column that reads ``text`` on every row."""
    return coded_column(np.zeros(num_rows, dtype=np.int32), [text])


def same_number(value: int, num_rows: int, dtype: Any) -> Column:  # noqa: ANN401  # a numpy dtype
    """Return the column that holds ``value`` on every row."""
    return number_column(np.full(num_rows, value, dtype=dtype))


def table(columns: dict[str, Column]) -> pa.Table:
    """Return the table of these columns."""
    return pa.Table.from_arrays(list(columns.values()), names=list(columns))
