"""Recorder of the spans of a step, which returns them as columns.

All ranks of a stage do the same things in the same order, so one template and two
arrays of times stand for one span on each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rankscope.tracer.span import KIND_CODES, NONE, SpanFlag, SpanKind

from .placement import Axis

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        """Return the spans of a stage, rank by rank."""
        grid = self._placement.rank
        rank = grid[stage].ravel()
        by_rank = np.argsort(rank, kind="stable")
        start = np.stack([block.start.ravel() for block in blocks], axis=1)[by_rank]
        end = np.stack([block.end.ravel() for block in blocks], axis=1)[by_rank]
        launch = np.stack([block.launch.ravel() for block in blocks], axis=1)[by_rank]
        order = np.argsort(start, axis=1, kind="stable")
        row = np.arange(len(rank))[:, None]
        template = _TemplateTable.of([block.template for block in blocks], *self._texts())
        group_of_axis = self._groups.ids[:, stage].reshape(len(Axis), -1)[:, by_rank]
        no_rank = np.full((1, len(rank)), NONE, dtype=np.int32)
        rank_of_stage = np.concatenate((grid.reshape(len(grid), -1)[:, by_rank], no_rank))
        return SpanColumns(
            rank=np.repeat(rank[by_rank], len(blocks)),
            start=start[row, order].ravel(),
            end=end[row, order].ravel(),
            launch=launch[row, order].ravel(),
            group_id=group_of_axis[template.axis[order], row].ravel(),
            src_rank=rank_of_stage[template.src_stage[order], row].ravel(),
            dst_rank=rank_of_stage[template.dst_stage[order], row].ravel(),
            kind=template.kind[order].ravel(),
            name=template.name[order].ravel(),
            track=template.track[order].ravel(),
            seq=template.seq[order].ravel(),
            microbatch=template.microbatch[order].ravel(),
            chunk=template.chunk[order].ravel(),
            num_bytes=template.num_bytes[order].ravel(),
            interval=template.interval[order].ravel(),
            flags=template.flags[order].ravel(),
            depth=template.depth[order].ravel(),
            names=(),
            tracks=(),
        )

    def _sparse(self, some: _Some) -> SpanColumns:
        num = len(some.rank)
        template = _TemplateTable.of([some.template], *self._texts())
        none = np.full(num, NONE, dtype=np.int32)
        by_rank = np.argsort(self._placement.rank, axis=None)
        place = by_rank[some.rank]
        alike = {
            name: np.repeat(getattr(template, name), num)
            for name in ("kind", "name", "track", "seq", "microbatch", "chunk", "num_bytes",
                         "interval", "flags", "depth")
        }  # fmt: skip
        return SpanColumns(
            rank=some.rank,
            start=some.start,
            end=some.end,
            launch=some.start,
            group_id=self._groups.ids[some.template.axis].ravel()[place],
            src_rank=none,
            dst_rank=none,
            names=(),
            tracks=(),
            **alike,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _TemplateTable:
    """Labels as columns, one element a block."""

    kind: NDArray[np.int32]
    name: NDArray[np.int32]
    track: NDArray[np.int32]
    axis: NDArray[np.int32]
    seq: NDArray[np.int64]
    src_stage: NDArray[np.int32]
    dst_stage: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    chunk: NDArray[np.int32]
    num_bytes: NDArray[np.int64]
    interval: NDArray[np.int64]
    flags: NDArray[np.uint16]
    depth: NDArray[np.int16]

    @classmethod
    def of(
        cls, templates: Sequence[SpanTemplate], names: tuple[str, ...], tracks: tuple[str, ...]
    ) -> _TemplateTable:
        name_at = {name: at for at, name in enumerate(names)}
        track_at = {track: at for at, track in enumerate(tracks)}
        return cls(
            kind=np.array([KIND_CODES[template.kind] for template in templates], dtype=np.int32),
            name=np.array([name_at[template.name] for template in templates], dtype=np.int32),
            track=np.array([track_at[template.track] for template in templates], dtype=np.int32),
            axis=np.array([template.axis for template in templates], dtype=np.int32),
            seq=np.array([template.seq for template in templates], dtype=np.int64),
            src_stage=np.array([template.src_stage for template in templates], dtype=np.int32),
            dst_stage=np.array([template.dst_stage for template in templates], dtype=np.int32),
            microbatch=np.array([template.microbatch for template in templates], dtype=np.int32),
            chunk=np.array([template.chunk for template in templates], dtype=np.int32),
            num_bytes=np.array([template.num_bytes for template in templates], dtype=np.int64),
            interval=np.array([template.interval for template in templates], dtype=np.int64),
            flags=np.array([int(template.flags) for template in templates], dtype=np.uint16),
            depth=np.array([template.depth for template in templates], dtype=np.int16),
        )
