"""What analysis reads: columns of a run, from whatever holds them.

The store satisfies `SpanSource`; tests build the tables by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rankscope.tracer.topology import Coords, Layout

    from .context import RunContext


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """One rank of one epoch, as its manifest told."""

    rank: int
    """Global rank."""

    coords: Coords
    host: str = ""
    local_rank: int = -1
    """Position among its host's ranks, -1 where unknown."""

    switch: str = ""
    """Network switch, rack and rail of its host and device, "" where no topology is known."""

    rack: str = ""
    rail: str = ""
    device_name: str = ""
    """As the driver names it, ``cpu`` on CPU, "" where unknown."""

    dtype: str = ""
    peak_flops_per_s: float | None = None
    """Peak of this device at this dtype where the job declared it; None: look the device up."""

    exit_state: str = ""
    """"running", "ended", "failed", "lost" (went without goodbye), or "" where unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInfo:
    """One communication group."""

    group_id: int
    kind: str
    """Span kind of its collectives."""

    name: str
    members: tuple[int, ...]
    """Global ranks, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochInfo:
    """One incarnation of a run."""

    epoch: int
    ranks: tuple[RankInfo, ...]
    """The ranks that were traced, ascending; a rank missing here sent nothing."""

    groups: tuple[GroupInfo, ...] = ()


def tells_layout(layout: Layout, world_size: int, source_format: str) -> bool:
    """Return whether a layout of sizes 1 throughout says something: of one rank, it does."""
    return source_format == "bytedance" or world_size == 1 or layout.world_size > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What the store knows of a run besides its spans."""

    run_id: str
    source_format: str
    """"rankscope" for our own tracer's runs, "bytedance" for imports of that format."""

    layout: Layout
    world_size: int
    epochs: tuple[EpochInfo, ...]
    model: str = ""
    flops_per_token: float | None = None
    flops_convention: str = ""
    """How ``flops_per_token`` was counted, in words; "" where it is None."""

    paced: bool = False
    """Whether the trainer padded its compute (design.md section 6, paced mode)."""

    pace_overrun_ratio: float | None = None
    """Share of paced segments that overran their target by more than 10 %, worst rank."""

    num_dropped: int = 0
    """Records that the training processes dropped, all reasons, all ranks."""

    num_torn: int = 0
    clock_error_ns: int | None = None
    """Largest error between the ranks' clocks; 0 on one host; None where nobody measured it."""

    warnings: tuple[str, ...] = ()
    """What the store noticed on the way in, one sentence each, for ``quality.warnings``."""

    @property
    def has_layout(self) -> bool:
        """Whether the parallel layout is known; else each rank's number stands as its ``dp``."""
        return tells_layout(self.layout, self.world_size, self.source_format)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanTable:
    """Spans of one run as columns of equal length, ordered by (epoch, step, rank, start_ns).

    `tracer.span.NONE` (-1) says unknown or not applicable in every integer
    column but ``group_id`` (0) .
    """

    epoch: NDArray[np.int32]
    step: NDArray[np.int32]
    rank: NDArray[np.int32]
    kind: NDArray[np.int8]
    """Codes into `tracer.span.KINDS`."""

    name: NDArray[np.int32]
    """Codes into ``names``."""

    track: NDArray[np.int32]
    """Codes into ``tracks``."""

    start_ns: NDArray[np.int64]
    duration_ns: NDArray[np.int64]
    launch_ns: NDArray[np.int64]
    group_id: NDArray[np.uint64]
    seq: NDArray[np.int64]
    src_rank: NDArray[np.int32]
    dst_rank: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    chunk: NDArray[np.int32]
    num_bytes: NDArray[np.int64]
    interval_id: NDArray[np.int64]
    """0: not part of an interval."""

    flags: NDArray[np.uint16]
    depth: NDArray[np.int16]
    """Nesting on its track, 0 outermost."""

    names: tuple[str, ...]
    tracks: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """One row per (epoch, step, rank), ordered so."""

    epoch: NDArray[np.int32]
    step: NDArray[np.int32]
    rank: NDArray[np.int32]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    """Tokens that this rank's data position contributed; -1 unknown. Ranks of one (dp, cp)
    position repeat the same tokens, so a run's tokens are summed over dp and cp only."""

    loss: NDArray[np.float64]
    """NaN: unknown."""

    left_out: NDArray[np.uint32]
    """Bit `k` is set where the rank lacks spans of kind `k` (`tracer.span.KINDS`), by request or
    because the tracer's capture of them failed; 0: all were recorded."""

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One line of `rankscope runs`."""

    run_id: str
    source_format: str
    state: str
    world_size: int
    layout: Layout
    num_spans: int
    num_steps: int
    started_ns: int | None
    warnings: tuple[str, ...] = field(default=())
    num_rows: int = 0
    """Spans, and rows of steps and micro-batches: whatever comes of a run makes it more."""


class SpanSource(Protocol):
    """Read access to the runs of one store; a stranger's name raises `UnknownRunError`."""

    def runs(self) -> tuple[RunSummary, ...]:
        """Return every run, the newest first."""
        ...

    def run_info(self, run_id: str) -> RunInfo:
        """Return what is known of a run besides its spans."""
        ...

    def steps(self, run_id: str, *, first: int | None = None, last: int | None = None) -> StepTable:
        """Return the step rows with ``first <= step <= last`` (either end open when None)."""
        ...

    def spans(self, run_id: str, *, first: int | None = None, last: int | None = None) -> SpanTable:
        """Return the spans of these steps; spans outside any step (`NONE`) are left out."""
        ...

    def context(
        self, run_id: str, *, first: int | None = None, last: int | None = None
    ) -> RunContext:
        """Return what is known around the spans of these steps."""
        ...


def is_collapsed(run: RunInfo, epoch: EpochInfo) -> bool:
    """Tell whether exactly one tensor-parallel rank of each worker was traced, and no other."""
    if run.layout.tp == 1 or len(epoch.ranks) * run.layout.tp != run.world_size:
        return False
    workers = {
        (rank.coords.dp, rank.coords.pp, rank.coords.cp, rank.coords.ep) for rank in epoch.ranks
    }
    return len(workers) == len(epoch.ranks)


def num_expected(run: RunInfo) -> int:
    """Return how many ranks each step should have a record of: the job's, or one a worker."""
    newest = run.epochs[-1]
    return len(newest.ranks) if is_collapsed(run, newest) else run.world_size


def groups_as_traced(run: RunInfo) -> list[GroupInfo]:
    """Return the groups of all epochs; where tensor parallelism is collapsed, as far as traced.

    A worker's partners do as it does, so a group without them waits for nobody else.
    """
    groups: list[GroupInfo] = []
    for epoch in run.epochs:
        if not is_collapsed(run, epoch):
            groups += epoch.groups
            continue
        traced = {rank.rank for rank in epoch.ranks}
        for group in epoch.groups:
            members = tuple(rank for rank in group.members if rank in traced)
            groups.append(replace(group, members=members))
    return groups
