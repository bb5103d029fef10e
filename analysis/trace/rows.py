"""Rows of tables: making, selection and concatenation."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rankscope.tracer.span import SPAN_COLUMNS

from .context import MicrobatchTable, SampleTable
from .tables import SpanTable, StepTable

if TYPE_CHECKING:
    from numpy.typing import NDArray

Table = TypeVar("Table", SpanTable, StepTable, MicrobatchTable, SampleTable)

TEXTS = {"name": "names", "track": "tracks", "host": "hosts"}
"""Columns of codes, each with the field that lists the texts."""


def make_span_table(
    *, names: tuple[str, ...], tracks: tuple[str, ...], **columns: NDArray[Any]
) -> SpanTable:
    """Return spans, with the missing value in the columns that ``columns`` lacks.

    Args:
        columns: Columns of `SpanTable`, shape (spans,) each.

    Raises:
        KeyError: There is no column that every source must have, such as ``start_ns``.
    """
    num_rows = len(columns["start_ns"])
    filled = {name: columns[name] for name in ("epoch", "rank")}
    for column in SPAN_COLUMNS:
        if not column.in_analysis:
            continue
        if column.name in columns or column.missing is None:
            filled[column.name] = columns[column.name]
        else:
            # One value for all rows: it takes no memory.
            missing = np.array(column.missing, dtype=column.dtype)
            filled[column.name] = np.broadcast_to(missing, num_rows)
    return SpanTable(**filled, names=names, tracks=tracks)


def select_rows(table: Table, rows: NDArray[Any] | slice) -> Table:
    """Return some rows of a table.

    Args:
        rows: A mask or row numbers, shape (rows,), which copy; or a slice, which does not.
    """
    return replace(table, **{name: getattr(table, name)[rows] for name in column_names(table)})


def concatenate(first: Table, second: Table) -> Table:
    """Return the rows of ``first``, then those of ``second``, with one list of texts."""
    changed: dict[str, Any] = {}
    for column in column_names(first):
        values = getattr(second, column)
        if column in TEXTS:
            texts = TEXTS[column]
            code_of = {text: code for code, text in enumerate(getattr(first, texts))}
            codes = [code_of.setdefault(text, len(code_of)) for text in getattr(second, texts)]
            changed[texts] = tuple(code_of)
            values = np.array(codes, dtype=np.int32)[values]
        changed[column] = np.concatenate((getattr(first, column), values))
    return replace(first, **changed)


def column_names(
    table: SpanTable | StepTable | MicrobatchTable | SampleTable,
) -> list[str]:
    """Return the names of a table's columns."""
    return [field.name for field in fields(table) if field.name not in TEXTS.values()]
