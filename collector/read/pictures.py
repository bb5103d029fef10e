"""Pictures of large steps: tiles of pixels in table ``pictures``.

The meaning of tiles, levels and orderings is up to the code that draws them; here they are rows.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from ..arrow_columns import binaries, number_lists, numbers, repeated_string, to_numpy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from ..store.store import Store

WHOLE_STEP, FINER = 0, 1
FILL_UNIT = 8
"""Fill of a pixel that is covered once. A multiple of 2, so that half a pixel is exact."""

MAX_FILL = 255
LINES_PER_ROW = 128
"""Lines of a row of table ``pictures``: a few lines can be read without the others."""

PLANES = ("compute_kind", "compute_fill", "comm_kind", "comm_fill")

SELECT_CLOSED = """
SELECT begin_ns, end_ns, num_spans, num_ranks, num_described, orderings, line_ranks,
    revision
FROM closed_steps FINAL
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND step = {step:Int32}
"""

SELECT_TILES = """
SELECT tile, first_line, num_lines, ranks, compute_kind, compute_fill, comm_kind, comm_fill
FROM pictures
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND step = {step:Int32}
    AND ordering = {ordering:String} AND line_ranks = {line_ranks:UInt32} AND zoom = {zoom:UInt8}
    AND tile >= {first_tile:UInt32} AND tile < {end_tile:UInt32}
    AND first_line < {end_line:UInt32} AND first_line + num_lines > {first_line:UInt32}
    AND revision = {revision:UInt64}
ORDER BY tile, first_line
LIMIT 1 BY tile, first_line
"""
"""Without FINAL: while a step is drawn again, the table has its old rows beside the new ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pixels:
    """Lines of pixels in one ordering; the planes have shape (lines, bins)."""

    rank_blocks: tuple[tuple[int, ...], ...]
    """The ranks of each line, from the top."""

    compute_kind: NDArray[np.int8]
    """Code of the kind with the largest share; -1 for an empty pixel."""

    compute_ratio: NDArray[np.float32]
    """Covered share of the pixel."""

    comm_kind: NDArray[np.int8]
    comm_ratio: NDArray[np.float32]
    first_line: int = 0
    """Index of the uppermost line among all lines of its level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureLevel:
    """A picture of a step: an ordering of the ranks, ranks per line, and a zoom."""

    ordering: str
    line_ranks: int
    zoom: int
    depth: int = WHOLE_STEP
    """`FINER` levels expire with the step's spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPicture:
    """A closed step, and the pictures that are kept of it."""

    begin_ns: int
    end_ns: int
    num_spans: int
    num_ranks: int
    num_described: int
    """Number of groups and ranks of the epoch that were known."""

    orderings: dict[str, str]
    """For each ordering, the one whose pixels are kept; equal ones are kept once."""

    line_ranks: int
    """Ranks of a line of the whole step's picture; 0 if none is kept."""

    revision: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepId:
    """A step of an epoch of a run."""

    run_id: str
    epoch: int
    step: int

    def bound(self) -> dict[str, Any]:
        """Return the bound parameters of a statement."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRevision:
    """A revision of a step."""

    step_id: StepId
    revision: int


def tile_rows(
    key: StepRevision, level: PictureLevel, pixels: Pixels, *, num_tiles: int
) -> pa.Table:
    """Return rows of table ``pictures``: all tiles of some lines.

    Args:
        pixels: All bins of these lines.
        num_tiles: Number of tiles of equal width.
    """
    planes: tuple[NDArray[Any], ...] = (
        pixels.compute_kind.astype(np.int8),
        _fill(pixels.compute_ratio),
        pixels.comm_kind.astype(np.int8),
        _fill(pixels.comm_ratio),
    )
    num_lines = len(pixels.rank_blocks)
    num_bins = planes[0].shape[1] // num_tiles
    places = [(tile, at) for at in range(0, num_lines, LINES_PER_ROW) for tile in range(num_tiles)]
    tiles: dict[str, list[bytes]] = {name: [] for name in PLANES}
    for tile, at in places:
        bins = slice(tile * num_bins, (tile + 1) * num_bins)
        for name, plane in zip(PLANES, planes, strict=True):
            tiles[name].append(plane[at : at + LINES_PER_ROW, bins].tobytes())
    num = len(places)
    ends = [min(at + LINES_PER_ROW, num_lines) for _, at in places]
    ranks = [pixels.rank_blocks[at:end] for (_, at), end in zip(places, ends, strict=True)]
    columns: dict[str, Any] = {
        "run_id": repeated_string(key.step_id.run_id, num),
        "epoch": numbers(np.full(num, key.step_id.epoch), np.int32),
        "step": numbers(np.full(num, key.step_id.step), np.int32),
        "ordering": repeated_string(level.ordering, num),
        "line_ranks": numbers(np.full(num, level.line_ranks), np.uint32),
        "zoom": numbers(np.full(num, level.zoom), np.uint8),
        "depth": numbers(np.full(num, level.depth), np.uint8),
        "tile": numbers(np.array([tile for tile, _ in places]), np.uint32),
        "first_line": numbers(np.array([pixels.first_line + at for _, at in places]), np.uint32),
        "num_lines": numbers(np.array(ends) - np.array([at for _, at in places]), np.uint32),
        "ranks": number_lists([[*chain.from_iterable(blocks)] for blocks in ranks], np.int32),
        **{name: binaries(values) for name, values in tiles.items()},
        "revision": numbers(np.full(num, key.revision), np.uint64),
    }
    return pa.Table.from_arrays(list(columns.values()), names=list(columns))


def write_pixels(store: Store, rows: Iterable[pa.Table]) -> None:
    """Store pixels. They show once their step is recorded as closed with their revision."""
    tables = list(rows)
    if tables:
        store.insert_arrow("pictures", pa.concat_tables(tables).unify_dictionaries())


def read_kept_picture(store: Store, step_id: StepId) -> KeptPicture | None:
    """Return the kept pictures of a step; None if it is not closed yet."""
    rows = store.rows(SELECT_CLOSED, step_id.bound())
    return KeptPicture(**rows[0]) if rows else None


def read_pixels(
    store: Store, key: StepRevision, level: PictureLevel, *, tiles: range, lines: range
) -> Pixels | None:
    """Return the pixels of some tiles and lines.

    A row of the table has up to `LINES_PER_ROW` lines, so the result may have more lines on both
    sides. None if a tile is missing: it was never kept, or has expired.
    """
    table = store.arrow(
        SELECT_TILES,
        {
            **key.step_id.bound(), "revision": key.revision,
            "ordering": level.ordering, "line_ranks": level.line_ranks, "zoom": level.zoom,
            "first_tile": tiles.start, "end_tile": tiles.stop,
            "first_line": lines.start, "end_line": lines.stop,
        },
    )  # fmt: skip
    tile, num_lines = to_numpy(table["tile"]), to_numpy(table["num_lines"])
    if not table.num_rows or len(tile) % len(tiles):
        return None
    packs = len(tile) // len(tiles)
    sizes = num_lines.reshape(len(tiles), packs)
    if not np.array_equal(tile, np.repeat(tiles, packs)) or (sizes != sizes[0]).any():
        return None
    planes = [_plane(table, name, sizes, np.int8 if "kind" in name else np.uint8)
              for name in PLANES]  # fmt: skip
    return Pixels(
        rank_blocks=_blocks(table, packs, sizes[0].tolist(), level.line_ranks),
        compute_kind=planes[0],
        compute_ratio=planes[1].astype(np.float32) / np.float32(FILL_UNIT),
        comm_kind=planes[2],
        comm_ratio=planes[3].astype(np.float32) / np.float32(FILL_UNIT),
        first_line=int(to_numpy(table["first_line"])[0]),
    )


def _fill(ratio: NDArray[np.float32]) -> NDArray[np.uint8]:
    units = np.floor(ratio.astype(np.float64) * FILL_UNIT)
    return np.clip(units, 0, MAX_FILL).astype(np.uint8)


def _plane(
    table: pa.Table, name: str, sizes: NDArray[np.uint32], dtype: type[np.generic]
) -> NDArray[Any]:
    """Put the tiles of one plane side by side, shape (lines, bins)."""
    # The column's Arrow type is a string, but the bytes are not text.
    rows = cast("Any", table[name].cast(pa.large_binary()))
    packs = [
        np.frombuffer(row.as_buffer(), dtype).reshape(num, -1)
        for row, num in zip(rows, sizes.reshape(-1).tolist(), strict=True)
    ]
    num_packs = sizes.shape[1]
    tiles = [np.concatenate(packs[at : at + num_packs]) for at in range(0, len(packs), num_packs)]
    return np.concatenate(tiles, axis=1)


def _blocks(
    table: pa.Table, packs: int, sizes: Sequence[int], line_ranks: int
) -> tuple[tuple[int, ...], ...]:
    blocks: list[tuple[int, ...]] = []
    for ranks, num in zip(table["ranks"].slice(0, packs), sizes, strict=True):
        flat = to_numpy(cast("Any", ranks).values).tolist()
        blocks += [tuple(flat[at * line_ranks : (at + 1) * line_ranks]) for at in range(num)]
    return tuple(blocks)
