"""Keep steps as pixels: for steps with more spans than can be drawn one by one.

Level 0 of the pyramid is the whole step in one tile, a line of pixels for each block of
neighbouring ranks, once for each ordering of the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from collector.columns import numbers, repeated_string, to_numpy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from collector.rollups import ClosedStep
    from collector.store import Store

WHOLE_STEP = 0
FILL_UNIT = 200
"""A pixel that is covered once has this fill; half of it is told apart exactly."""

MAX_FILL = 255

SELECT_LINES = """
SELECT ranks, compute_kind, compute_fill, comm_kind, comm_fill FROM pyramid FINAL
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND step = {step:Int32}
    AND ordering = {ordering:String} AND level = {level:UInt8}
ORDER BY tile, line
"""

SELECT_CLOSED = """
SELECT begin_ns, end_ns, num_spans, num_ranks FROM closed_steps FINAL
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND step = {step:Int32}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pixels:
    """A step's pixels in one ordering; the arrays have shape (lines, bins)."""

    rank_blocks: tuple[tuple[int, ...], ...]
    """The ranks of each line, from the top."""

    compute_kind: NDArray[np.int8]
    """Code of the kind with the largest share; -1 where nothing was."""

    compute_ratio: NDArray[np.float32]
    """Share of the pixel that was covered."""

    comm_kind: NDArray[np.int8]
    comm_ratio: NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStep:
    """What is told beside the pixels."""

    begin_ns: int
    end_ns: int
    num_spans: int
    num_ranks: int
    pixels: Pixels


def pixel_rows(step: ClosedStep, ordering: str, pixels: Pixels) -> pa.Table:
    """Return rows of table ``pyramid``.

    Args:
        step: What the pixels were drawn from.
        ordering: Name of the order of their lines.
        pixels: The pixels of the whole step.
    """
    num_lines = len(pixels.rank_blocks)
    flat = np.array([rank for block in pixels.rank_blocks for rank in block], dtype=np.int32)
    sizes = [len(block) for block in pixels.rank_blocks]
    columns = {
        "run_id": repeated_string(step.run_id, num_lines),
        "epoch": numbers(np.full(num_lines, step.epoch), np.int32),
        "step": numbers(np.full(num_lines, step.step), np.int32),
        "ordering": repeated_string(ordering, num_lines),
        "level": numbers(np.full(num_lines, WHOLE_STEP), np.uint8),
        "tile": numbers(np.zeros(num_lines), np.uint32),
        "line": numbers(np.arange(num_lines), np.uint32),
        "ranks": _lists(flat, sizes),
        "compute_kind": _lines(pixels.compute_kind),
        "compute_fill": _lines(_fill(pixels.compute_ratio)),
        "comm_kind": _lines(pixels.comm_kind),
        "comm_fill": _lines(_fill(pixels.comm_ratio)),
        "revision": numbers(np.full(num_lines, step.revision), np.uint64),
    }
    return pa.Table.from_arrays(list(columns.values()), names=list(columns))


def write_pixels(store: Store, rows: Iterable[pa.Table]) -> None:
    """Store pixels; those of a step and ordering that are there are replaced."""
    tables = list(rows)
    if tables:
        store.insert_arrow("pyramid", pa.concat_tables(tables).unify_dictionaries())


def read_step(
    store: Store, run_id: str, *, epoch: int, step: int, orderings: Sequence[str]
) -> tuple[str, KeptStep] | None:
    """Return a step's pixels in the first of these orderings that is kept, and which that is.

    None where the step is not closed yet, or has few enough spans to be drawn.
    """
    bound = {"run_id": run_id, "epoch": epoch, "step": step}
    closed = store.rows(SELECT_CLOSED, bound)
    if not closed:
        return None
    for ordering in orderings:
        lines = store.arrow(SELECT_LINES, {**bound, "ordering": ordering, "level": WHOLE_STEP})
        if lines.num_rows:
            return ordering, KeptStep(**closed[0], pixels=_pixels(lines))
    return None


def _pixels(lines: pa.Table) -> Pixels:
    sizes = [len(ranks) for ranks in lines["ranks"]]
    flat = _values(lines["ranks"]).tolist()
    ends = np.cumsum(sizes).tolist()
    return Pixels(
        rank_blocks=tuple(
            tuple(flat[end - size : end]) for end, size in zip(ends, sizes, strict=True)
        ),
        compute_kind=_grid(lines, "compute_kind"),
        compute_ratio=_ratio(lines, "compute_fill"),
        comm_kind=_grid(lines, "comm_kind"),
        comm_ratio=_ratio(lines, "comm_fill"),
    )


def _fill(ratio: NDArray[np.float32]) -> NDArray[np.uint8]:
    units = np.floor(ratio.astype(np.float64) * FILL_UNIT)
    return np.clip(units, 0, MAX_FILL).astype(np.uint8)


def _lines(grid: NDArray[Any]) -> pa.Array[Any]:
    return _lists(grid.reshape(-1), [grid.shape[1]] * grid.shape[0])


def _lists(flat: NDArray[Any], sizes: Sequence[int]) -> pa.Array[Any]:
    offsets = np.zeros(len(sizes) + 1, dtype=np.int32)
    np.cumsum(sizes, out=offsets[1:])
    values = numbers(flat)
    return pa.Array.from_buffers(
        pa.list_(values.type), len(sizes), [None, pa.py_buffer(offsets.data)], children=[values]
    )


def _grid(lines: pa.Table, name: str) -> NDArray[Any]:
    return _values(lines[name]).reshape(lines.num_rows, -1)


def _ratio(lines: pa.Table, name: str) -> NDArray[np.float32]:
    return _grid(lines, name).astype(np.float32) / np.float32(FILL_UNIT)


def _values(column: pa.ChunkedArray[Any]) -> NDArray[Any]:
    chunks = cast("list[pa.ListArray[Any]]", column.chunks)
    return np.concatenate([to_numpy(chunk.flatten()) for chunk in chunks])
