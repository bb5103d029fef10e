"""Recorder of the spans of a step, which returns them as columns.

All ranks of a stage do the same things in the same order, so one template and two
arrays of times stand for one span on each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.tracer.span import KIND_CODES, NONE, SpanFlag, SpanKind

from .placement import Axis

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from .placement import Groups, Placement

NEVER = 1 << 60
"""End of operations that depend on a rank that has stopped."""

ON_DEVICE = SpanFlag.DEVICE_BEGIN_KNOWN | SpanFlag.DEVICE_END_KNOWN
ON_HOST = SpanFlag.HOST_CLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanTemplate:
    """Properties that a block of spans shares."""

    kind: SpanKind
    name: str
    track: str
    axis: Axis = Axis.NONE
    """Axis of its group."""

    seq: int = NONE
    src_stage: int = NONE
    dst_stage: int = NONE
    microbatch: int = NONE
    chunk: int = NONE
    num_bytes: int = NONE
    interval: int = 0
    """Id shared by the operations of one call; 0 if the call has one operation."""

    flags: SpanFlag = ON_DEVICE
    depth: int = 0


@dataclass(frozen=True, slots=True)
class _Block:
    template: SpanTemplate
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    launch: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Some:
    """Spans on a few ranks."""

    template: SpanTemplate
    rank: NDArray[np.int32]
    start: NDArray[np.int64]
    end: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanColumns:
    """Spans of a step, ordered by (rank, start); times in ns from the run's start."""

    rank: NDArray[np.int32]
    kind: NDArray[np.int32]
    """Index of the kind."""

    name: NDArray[np.int32]
    """Index into ``names``."""

    track: NDArray[np.int32]
    """Index into ``tracks``."""

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    launch: NDArray[np.int64]
    group_id: NDArray[np.uint64]
    seq: NDArray[np.int64]
    src_rank: NDArray[np.int32]
    dst_rank: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    chunk: NDArray[np.int32]
    num_bytes: NDArray[np.int64]
    interval: NDArray[np.int64]
    flags: NDArray[np.uint16]
    depth: NDArray[np.int16]
    names: tuple[str, ...]
    tracks: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rank)

    def rows(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> SpanColumns:
        """Return the rows that ``index`` picks."""
        columns = {name: getattr(self, name)[index] for name in COLUMN_NAMES}
        return SpanColumns(**columns, names=self.names, tracks=self.tracks)


COLUMN_NAMES = tuple(
    name for name in SpanColumns.__dataclass_fields__ if name not in ("names", "tracks")
)


PLACE_COLUMNS = ("axis", "src_stage", "dst_stage")
"""Fields of a template that mean another value on each rank."""

TEMPLATE_TYPES: dict[str, type[np.integer[Any]]] = {
    "kind": np.int32, "name": np.int32, "track": np.int32, "seq": np.int64, "microbatch": np.int32,
    "chunk": np.int32, "num_bytes": np.int64, "interval": np.int64, "flags": np.uint16,
    "depth": np.int16, **dict.fromkeys(PLACE_COLUMNS, np.int32),
}  # fmt: skip


class Recorder:
    """Records the blocks of one step."""

    def __init__(self, placement: Placement, groups: Groups) -> None:
        self._placement = placement
        self._groups = groups
        self._blocks: list[list[_Block]] = [[] for _ in range(placement.rank.shape[0])]
        self._some: list[_Some] = []

    def add(
        self,
        stage: int,
        template: SpanTemplate,
        start: NDArray[np.int64],
        end: NDArray[np.int64],
        *,
        launch: NDArray[np.int64] | None = None,
    ) -> None:
        """Record one span on each rank of a stage; arrays have the shape (dp, cp, tp).

        The arrays are kept, not copied: do not change them afterwards.
        """
        launched = start if launch is None else launch
        self._blocks[stage].append(_Block(template, start, end, launched))

    def add_some(
        self,
        template: SpanTemplate,
        rank: NDArray[np.int32],
        start: NDArray[np.int64],
        end: NDArray[np.int64],
    ) -> None:
        """Record one span on each of a few ranks."""
        self._some.append(_Some(template, rank, start, end))

    def columns(self) -> SpanColumns:
        """Return all spans, ordered by (rank, start)."""
        parts = [self._stage(stage, blocks) for stage, blocks in enumerate(self._blocks)]
        parts += [self._sparse(some) for some in self._some]
        names, tracks = self._texts()
        whole = SpanColumns(
            **{
                name: np.concatenate([getattr(part, name) for part in parts])
                for name in COLUMN_NAMES
            },
            names=names,
            tracks=tracks,
        )
        ascending = (np.diff(whole.rank) >= 0).all()
        if ascending and not self._some:
            return whole
        return whole.rows(np.lexsort((whole.start, whole.rank)))

    def _texts(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        templates = [block.template for blocks in self._blocks for block in blocks]
        templates += [some.template for some in self._some]
        return (
            tuple(dict.fromkeys(template.name for template in templates)),
            tuple(dict.fromkeys(template.track for template in templates)),
        )

    def _stage(self, stage: int, blocks: Sequence[_Block]) -> SpanColumns:
        grid = self._placement.rank
        rank = grid[stage].ravel()
        by_rank = np.argsort(rank, kind="stable")
        start, end, launch = (
            np.stack([getattr(block, name).ravel() for block in blocks], axis=1)[by_rank]
            for name in ("start", "end", "launch")
        )
        order = np.argsort(start, axis=1, kind="stable")
        row = np.arange(len(rank))[:, None]
        columns = self._template_columns([block.template for block in blocks])
        axis, src, dst = (columns.pop(name)[order] for name in PLACE_COLUMNS)
        group_of_axis = self._groups.ids[:, stage].reshape(len(Axis), -1)[:, by_rank]
        no_rank = np.full((1, len(rank)), NONE, dtype=np.int32)
        rank_of_stage = np.concatenate((grid.reshape(len(grid), -1)[:, by_rank], no_rank))
        return SpanColumns(
            rank=np.repeat(rank[by_rank], len(blocks)),
            start=start[row, order].ravel(),
            end=end[row, order].ravel(),
            launch=launch[row, order].ravel(),
            group_id=group_of_axis[axis, row].ravel(),
            src_rank=rank_of_stage[src, row].ravel(),
            dst_rank=rank_of_stage[dst, row].ravel(),
            **{name: values[order].ravel() for name, values in columns.items()},
            names=(),
            tracks=(),
        )

    def _sparse(self, some: _Some) -> SpanColumns:
        num = len(some.rank)
        columns = self._template_columns([some.template])
        none = np.full(num, NONE, dtype=np.int32)
        by_rank = np.argsort(self._placement.rank, axis=None)
        place = by_rank[some.rank]
        return SpanColumns(
            rank=some.rank,
            start=some.start,
            end=some.end,
            launch=some.start,
            group_id=self._groups.ids[some.template.axis].ravel()[place],
            src_rank=none,
            dst_rank=none,
            **{
                name: np.repeat(values, num)
                for name, values in columns.items()
                if name not in PLACE_COLUMNS
            },
            names=(),
            tracks=(),
        )

    def _template_columns(self, templates: Sequence[SpanTemplate]) -> dict[str, NDArray[Any]]:
        """Return one element for each template, by its field."""
        names, tracks = self._texts()
        codes: dict[str, Mapping[Any, int]] = {
            "kind": KIND_CODES,
            "name": {name: at for at, name in enumerate(names)},
            "track": {track: at for at, track in enumerate(tracks)},
        }
        columns = {}
        for name, dtype in TEMPLATE_TYPES.items():
            values = [getattr(template, name) for template in templates]
            if name in codes:
                values = [codes[name][value] for value in values]
            columns[name] = np.array(values, dtype=dtype)
        return columns
