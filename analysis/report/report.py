"""The finished diagnosis of a run: what the command prints and the dashboard draws."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..trace.tables import is_layout_known

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rankscope.tracer.topology import Coords, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One diagnosed cause. Findings come sorted by ``recoverable_ratio``, the largest first."""

    cause: str
    """One of design.md section 5: ``slow-compute``, ``stage-imbalance``, ``healthy``, ..."""

    ranks: tuple[int, ...]
    """Global ranks at fault, those in the trace; empty for ``healthy`` and the like."""

    steps: tuple[int, int] | None
    """First and last step that show it; None where no step does."""

    slowdown: float | None
    """S of that set of ranks; None where it is undefined."""

    recoverable_ratio: float | None
    """``(T_actual - T_without) / (T_actual - T_ideal)`` in the full replay."""

    confidence: float
    """0 to 1."""

    evidence: str
    """One sentence with numbers that a person can check on the timeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitsOn:
    """How much of a step one rank waits on another, followed to the root."""

    rank: int
    ratio: float
    """Of the step's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Starved:
    """A rank that waits."""

    rank: int
    wait_ratio: float
    """Its waiting time over step time."""

    waits_on: tuple[WaitsOn, ...]
    """The largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mfu:
    """Model FLOPs utilisation. Steps whose MFU is unknown are left out."""

    convention: str
    """How FLOPs were counted and what peak they were divided by, in words."""

    mean: float
    by_step: dict[int, float]
    """0..1 by step, unsmoothed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How far the result can be trusted."""

    dropped_spans: int
    clock_error_ns: int | None
    """None: nobody measured it."""

    coverage_ratio: float | None
    """Share of (rank, step) pairs of the job that were traced and entered the replay."""

    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Mean seconds per step."""

    actual: float | None
    """Recorded: last end - first start of each step (T_base); None where no step was recorded."""

    replayed: float | None
    """T of the device replay; None where nothing could be replayed."""

    ideal: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStepExcess:
    """The heat-map of who was slow when."""

    ranks: tuple[int, ...]
    """Rows."""

    steps: tuple[int, ...]
    """Columns."""

    excess_ns: NDArray[np.float64]
    """Shape (ranks, steps): own compute time above the step's median rank; NaN where unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineBubble:
    """The pipeline's bubble by its schedule's formula, and as measured."""

    num_stages: int
    num_chunks: int
    """Model chunks on each stage."""

    num_microbatches: int
    formula_ratio: float
    """``(p - 1) / (v m)`` of the useful forward and backward compute: 1F1B, interleaved or not."""

    measured_ratio: float | None
    """Of the same; None where there is no such compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaterfallSummary:
    """Where the time went, over all steps; `breakdown.waterfall.Part` says what each part is."""

    parts: tuple[str, ...]
    """In the order in which they are drawn."""

    mean_ratio: dict[str, float | None]
    """Each part's share of all ranks' time."""

    waiting_on: tuple[WaitsOn, ...]
    """For whom the ranks waited beyond the bubble, the largest first, as a share of all ranks'
    time."""

    bubble: PipelineBubble | None
    """None without a pipeline."""

    ranks: tuple[int, ...]
    by_rank_ns: NDArray[np.int64]
    """Shape (ranks, parts): over all steps."""

    steps: tuple[int, ...]
    by_step_ns: NDArray[np.int64]
    """Shape (steps, parts): over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """How fast alike transfers moved their bytes; see `analysis.breakdown.bandwidth`."""

    kind: str
    """Span kind; ``pp-send`` for what goes from one rank to another."""

    name: str
    """The operation."""

    num_members: int
    across_hosts: bool | None
    """Whether its members lie on several hosts; None where these are unknown."""

    num_bytes: int
    num_instances: int
    transfer_ns: float
    """Median."""

    algorithm_bytes_per_s: float
    bus_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Everything known of a run once analysed."""

    run: str
    source_format: str
    epochs: tuple[int, ...]
    world_size: int
    layout: Layout
    coords: dict[int, Coords]
    """Position of each traced rank."""

    steps: tuple[int, ...]
    num_spans: int
    step_time_s: StepTimes
    launch_slowdown: float | None
    replay_error_ratio: float | None
    slowdown: float | None
    waste_ratio: float | None
    slowdown_by_kind: dict[str, float | None]
    slowdown_by_dp: dict[int, float | None]
    slowdown_by_stage: dict[int, float | None]
    slowdown_by_worker: dict[tuple[int, int], float | None]
    """By (dp, stage): the smaller of the two above, the paper's shortcut."""

    exact_slowdown_by_worker: dict[tuple[int, int], float | None]
    """By (dp, stage): only that worker's operations put back."""

    slowdown_by_step: dict[int, float | None]
    actual_s_by_step: dict[int, float]
    ideal_s_by_step: dict[int, float]
    m_w: float | None
    m_s: float | None
    findings: tuple[Finding, ...]
    starved: tuple[Starved, ...]
    mfu: Mfu | None
    quality: Quality
    excess: RankStepExcess
    paced: bool
    warmup_steps: tuple[int, ...] = ()
    """Steps shown but left out of the replay and the findings (start-up)."""

    waterfall: WaterfallSummary | None = None
    """None where nothing could be replayed."""

    bandwidth: tuple[Bandwidth, ...] = ()
    num_earlier_steps: int = 0
    """Steps of the run before the first of ``steps``: of a long run only the last are analysed. MFU
    is of all."""

    culprits: CulpritComparison | None = None
    """How often the shortcut for S_w and the exact value name different workers; None where the
    workers' S is undefined."""

    @property
    def has_layout(self) -> bool:
        """Whether the parallel layout is known; else each rank's number stands as its ``dp``."""
        return is_layout_known(self.layout, self.world_size, self.source_format)

    @property
    def top_finding(self) -> Finding:
        """The finding that the verdict sentence speaks of; there always is one."""
        return self.findings[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class CulpritComparison:
    """How often the paper's shortcut for S_w and the exact value name different workers."""

    num_steps: int
    num_different: int
    """Steps in which they do; of several equal workers the lowest (dp, stage) counts."""

    by_shortcut: tuple[int, int]
    """(dp, stage) of the largest S_w over all steps."""

    by_exact: tuple[int, int]
