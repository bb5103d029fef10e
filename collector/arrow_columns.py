"""Conversion between Arrow columns and numpy arrays through their buffers.

pyarrow's own conversions (`pa.array`, `to_numpy`) import pandas if it is installed, which takes
200 ms in a new process.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Column = pa.Array[Any]

NUMPY_NAMES = {
    "int8": "int8",
    "int16": "int16",
    "int32": "int32",
    "int64": "int64",
    "uint8": "uint8",
    "uint16": "uint16",
    "uint32": "uint32",
    "uint64": "uint64",
    "float": "float32",
    "double": "float64",
}
"""Names of Arrow types in numpy."""

ARROW_TYPES: dict[np.dtype[Any], pa.DataType] = {
    np.dtype(name): pa.type_for_alias(cast("Any", alias)) for alias, name in NUMPY_NAMES.items()
}
"""Arrow types by numpy's: to look up the name of one takes longer than to convert a small column.
"""


def numbers(values: NDArray[Any], dtype: Any = None) -> Column:  # noqa: ANN401  # a numpy dtype
    """Return the Arrow column over ``values``, converted to ``dtype`` if it differs."""
    held = np.ascontiguousarray(values, dtype=dtype)
    arrow_type = ARROW_TYPES[held.dtype]
    return pa.Array.from_buffers(arrow_type, len(held), [None, pa.py_buffer(held.data)])


def optional_numbers(values: NDArray[Any], known: NDArray[np.bool_]) -> Column:
    """Return the Arrow column over ``values`` with nulls at the places where ``known`` is false."""
    held = np.ascontiguousarray(values)
    bits = np.packbits(known, bitorder="little")
    buffers: list[pa.Buffer | None] = [pa.py_buffer(bits.data), pa.py_buffer(held.data)]
    return pa.Array.from_buffers(ARROW_TYPES[held.dtype], len(held), buffers)


def strings(texts: Sequence[str | None]) -> Column:
    """Return the Arrow column of strings, None as null; for a few, because it loops over them."""
    is_known = np.array([text is not None for text in texts], dtype=np.bool_)
    known = None
    if not is_known.all():
        known = pa.py_buffer(np.packbits(is_known, bitorder="little").data)
    encoded = [(text or "").encode() for text in texts]
    buffers = [known, pa.py_buffer(_offsets(encoded).data), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def binaries(values: Sequence[bytes]) -> Column:
    """Return the Arrow column of byte strings, of 2 GiB in sum at most."""
    buffers = [None, pa.py_buffer(_offsets(values).data), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(pa.binary(), len(values), buffers)


def number_lists(lists: Sequence[Sequence[int]], dtype: Any) -> Column:  # noqa: ANN401  # as above
    """Return the Arrow column of lists of numbers."""
    values = numbers(np.fromiter(chain.from_iterable(lists), dtype=dtype))
    offsets: Any = numbers(_offsets(lists))
    column: Column = pa.ListArray.from_arrays(offsets, values)
    return column


def _offsets(values: Sequence[Sequence[Any] | bytes]) -> NDArray[np.int32]:
    offsets = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    return offsets


def coded_strings(codes: NDArray[Any], texts: Sequence[str]) -> Column:
    """Return the dictionary column whose row ``i`` is ``texts[codes[i]]``.

    Equal texts are merged, because ClickHouse rejects a dictionary with duplicates.
    """
    places: dict[str, int] = {}
    lookup = [places.setdefault(text, len(places)) for text in texts]
    joint = np.array(lookup, dtype=np.int32)[codes] if len(places) < len(texts) else codes
    return pa.DictionaryArray.from_arrays(numbers(joint, np.int32), strings(tuple(places)))


def repeated_string(text: str, num_rows: int) -> Column:
    """Return the dictionary column with ``text`` in every row."""
    return coded_strings(np.zeros(num_rows, dtype=np.int32), [text])


def to_numpy(column: pa.ChunkedArray[Any] | Column) -> NDArray[Any]:
    """Return a numeric column without nulls as one read-only array.

    The values are copied only if the column has several chunks.
    """
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    dtype = np.dtype(NUMPY_NAMES[str(column.type)])
    parts = [_chunk_to_numpy(chunk, dtype) for chunk in chunks]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def to_codes(
    column: pa.ChunkedArray[Any],
) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """Return a string dictionary column as codes and the texts that they index.

    Each chunk may have its own dictionary; the codes index one list for all.
    """
    places: dict[str, int] = {}
    parts: list[NDArray[np.int32]] = []
    for chunk in cast("list[pa.DictionaryArray[Any, Any]]", column.chunks):
        texts = cast("list[str]", chunk.dictionary.to_pylist())
        joint = [places.setdefault(text, len(places)) for text in texts]
        indices = to_numpy(chunk.indices)
        if indices.dtype == np.int32 and joint == list(range(len(joint))):
            parts.append(indices)
            continue
        # One more entry, so that an empty chunk can be indexed too.
        lookup = np.array([*joint, 0], dtype=np.int32)
        parts.append(lookup[indices])
    codes = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int32), *parts])
    used = np.zeros(len(places), dtype=np.bool_)
    used[codes] = True
    if used.all():
        return codes, tuple(places)
    renumbered = (np.cumsum(used) - 1).astype(np.int32)  # the store adds "" to each dictionary
    return renumbered[codes], tuple(text for text, at in places.items() if used[at])


def _chunk_to_numpy(chunk: Column, dtype: np.dtype[Any]) -> NDArray[Any]:
    if not len(chunk):
        return np.empty(0, dtype)
    if chunk.null_count:
        raise ValueError(f"column has {chunk.null_count} nulls")
    values = memoryview(cast("bytes", chunk.buffers()[1]))
    return np.frombuffer(values, dtype, count=len(chunk), offset=chunk.offset * dtype.itemsize)
