"""What a parquet file would take to read, by the headers of its pages, before any is inflated.

The sizes at the file's end are claims that the reader does not check first: a page is inflated to
what its own header says, up to 2 GiB from a few kB, in each column at once.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rankscope.tracer.spool import open_regular_file

from ..errors import TraceError
from .thrift import StructReader, ThriftError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from .thrift import Struct, Value

MAGIC = b"PAR1"
NOT_PARQUET = "not a parquet file, or a damaged one: expected a trace of the bytedance format"

HEADER_BYTES = 1 << 16
"""A page's header has some 30 bytes, and its extreme values where a writer notes them."""

MAX_FOOTER_BYTES = 4 << 20
"""The published traces have 5 kB there; ten columns of a thousand row groups, 1 MB."""

MAX_PAGE_BYTES = 16 << 20
"""Writers make pages of 1 MiB; a page is held whole for each column."""

FREE_BYTES = 64 << 20
MAX_INFLATION = 256
"""Inflated bytes for each of the file beyond `FREE_BYTES`; the published traces have 1 to 2."""

FREE_ROWS = 1 << 20
MAX_ROWS_PER_BYTE = 4
"""Beyond `FREE_ROWS`; the published traces have one row in 10 bytes."""

NUM_ROWS, ROW_GROUPS, COLUMNS, COLUMN_META = 3, 4, 1, 3
PATH, COMPRESSED, DATA_OFFSET, DICTIONARY_OFFSET = 3, 7, 9, 11
"""Numbers of fields of the file's end. Source: ``parquet.thrift``, ``FileMetaData``."""

TYPE, INFLATED, DEFLATED, DATA, DICTIONARY, DATA_V2 = 1, 2, 3, 5, 7, 8
NUM_VALUES, ENCODING, ENCODING_V2 = 1, 2, 4
"""Numbers of a page header's fields. Source: as above, ``PageHeader``."""

DELTA_BYTE_ARRAY = 7
DATA_TYPE, DICTIONARY_TYPE, DATA_V2_TYPE = 0, 2, 3
PAGE_FIELDS = {DATA_TYPE: DATA, DICTIONARY_TYPE: DICTIONARY, DATA_V2_TYPE: DATA_V2}


def check_pages(path: Path, *, columns: Collection[str]) -> None:
    """Walk over the pages of some columns, and refuse what would inflate out of proportion.

    Args:
        path: The file.
        columns: The columns that will be read, none of them nested.

    Raises:
        TraceError: No parquet, no row, more rows or bytes than the file's size can account
            for, a page too large, or headers that contradict the file.
        OSError: It can't be read, or is no plain file.
    """
    descriptor = open_regular_file(path)
    try:
        _check(descriptor, path, columns=columns)
    except ThriftError:
        raise TraceError(path, NOT_PARQUET) from None
    finally:
        os.close(descriptor)


def _check(descriptor: int, path: Path, *, columns: Collection[str]) -> None:
    num_bytes = os.fstat(descriptor).st_size
    footer = _footer(descriptor, num_bytes)
    num_rows = _number(footer, NUM_ROWS)
    if not num_rows:
        raise TraceError(path, "holds no operation: nothing to import")
    most_rows = max(FREE_ROWS, num_bytes * MAX_ROWS_PER_BYTE)
    if num_rows > most_rows:
        raise TraceError(
            path,
            f"says that it holds {num_rows:,} rows in {num_bytes:,} bytes:"
            f" expected at most {most_rows:,}",
        )
    left = FREE_BYTES + num_bytes * MAX_INFLATION
    for begin, end in _chunks(footer, columns={name.encode() for name in columns}):
        for header in _pages(descriptor, begin, min(end, num_bytes)):
            left -= _checked_inflated(path, header)
            if left < 0:
                raise TraceError(
                    path, f"inflates to more than {MAX_INFLATION} times its {num_bytes:,} bytes"
                )


def _footer(descriptor: int, num_bytes: int) -> Struct:
    """Return what stands at the file's end: what the file holds, and where."""
    begins = os.pread(descriptor, len(MAGIC), 0)
    ends = os.pread(descriptor, 8, max(num_bytes - 8, 0))
    length = int.from_bytes(ends[:4], "little")
    if begins != MAGIC or ends[4:] != MAGIC or not 0 < length <= min(num_bytes, MAX_FOOTER_BYTES):
        raise ThriftError
    return StructReader(os.pread(descriptor, length, num_bytes - 8 - length)).read()


def _chunks(footer: Struct, *, columns: Collection[bytes]) -> Iterator[tuple[int, int]]:
    """Yield where the pages of each column begin and end in the file."""
    for group in _structs(footer.get(ROW_GROUPS)):
        for column in _structs(group.get(COLUMNS)):
            (meta,) = _structs([column.get(COLUMN_META)])
            names = meta.get(PATH)
            if not isinstance(names, list) or len(names) != 1 or names[0] not in columns:
                continue
            begin = _number(meta, DATA_OFFSET)
            dictionary = meta.get(DICTIONARY_OFFSET)
            # As the reader has it: a dictionary stands before the data or is none.
            if isinstance(dictionary, int) and 0 < dictionary < begin:
                begin = dictionary
            yield begin, begin + _number(meta, COMPRESSED)


def _pages(descriptor: int, begin: int, end: int) -> Iterator[Struct]:
    """Yield the headers of the pages between two places of the file."""
    at = begin
    while at < end:
        reader = StructReader(os.pread(descriptor, HEADER_BYTES, at))
        header = reader.read()
        yield header
        at += reader.offset + _number(header, DEFLATED)


def _checked_inflated(path: Path, header: Struct) -> int:
    """Return what a page inflates to, if that is no more than a page should."""
    inflated = _number(header, INFLATED)
    if inflated > MAX_PAGE_BYTES:
        raise TraceError(
            path, f"has a page of {inflated:,} bytes, expected at most {MAX_PAGE_BYTES:,}"
        )
    page = PAGE_FIELDS.get(_number(header, TYPE))
    if page is None:
        return inflated
    (told,) = _structs([header.get(page)])
    if page == DICTIONARY and _number(told, NUM_VALUES) > inflated:
        raise ThriftError
    # Each text may repeat the one before it and add to it: their sum has no bound.
    encoding = told.get(ENCODING_V2 if page == DATA_V2 else ENCODING)
    if encoding == DELTA_BYTE_ARRAY:
        raise TraceError(path, "is encoded as DELTA_BYTE_ARRAY: write it with dictionaries")
    return inflated


def _structs(values: Value) -> list[Struct]:
    if not isinstance(values, list):
        raise ThriftError
    found = [value for value in values if isinstance(value, dict)]
    if len(found) < len(values):
        raise ThriftError
    return found


def _number(fields: Struct, number: int) -> int:
    value = fields.get(number)
    if not isinstance(value, int) or value < 0:
        raise ThriftError
    return value
