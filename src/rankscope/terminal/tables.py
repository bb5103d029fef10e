"""Lay cells out in aligned columns for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.analysis.report.text import LEAST_RANGE, neighbours

if TYPE_CHECKING:
    from collections.abc import Sequence

GAP = "  "


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> list[str]:
    """Return one line for the header and one a row, all columns as wide as their widest cell.

    Args:
        header: The columns' names.
        rows: The cells, as many a row as the header has.
        right: One character a column: ``r`` for right-aligned; left where it is missing.
    """
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [_line(row, widths, right) for row in (header, *rows)]


def _line(cells: Sequence[str], widths: Sequence[int], right: str) -> str:
    padded = [
        cell.rjust(width) if right[column : column + 1] == "r" else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return GAP.join(padded).rstrip()


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ``0, 4-7, 9``; runs of two are written out."""
    return ", ".join(
        f"{first}" if first == last else f"{first}-{last}"
        for first, last in neighbours(numbers, least=LEAST_RANGE)
    )
