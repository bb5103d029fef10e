"""The finished diagnosis of a run, as the command prints it and the dashboard draws it."""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby

from rankscope.tracer.topology import Coords, Layout

from ..trace.account import RecordAccount
from ..trace.tables import is_layout_known
from .device_time import DeviceTime, Kernel
from .fields import FloatArray, IntArray, Pair
from .memory import MemoryUse
from .network import TRANSFER_CAUSES, CommonPause, DirectWaits, LinkSummary, WaitedLink
from .proof_card import ProofCard
from .text import MAX_NAMES, format_link, format_names, format_percent

GRACE_STEPS = 3
"""A finding is open while one of this many newest steps shows it. Source: a verdict is
due within 3 steps of the onset."""

GRACE_SHARE = 0.1
"""Share of a finding's own steps for which it is open as well: a fault of 200 steps is not over
because noise hides it in ten. Source: choice."""


class Severity(StrEnum):
    """Importance of a finding; `analysis.diagnose.grade_findings` decides."""

    CRITICAL = "critical"
    WARNING = "warning"
    MINOR = "minor"
    """Never the headline."""

    NONE = "none"
    """No problem: `healthy`, what is unknown, and remarks such as the layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """The span, gap or transfer that shows a finding best, and when it was."""

    epoch: int
    step: int
    rank: int
    begin_ns: int
    """From the start of the step's first span, as ``end_ns``."""

    end_ns: int
    excess_ns: int
    """Its time above its ideal."""


NOT_MEASURED = "not measured"
"""Source of a note that says what there are no readings of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNote:
    """A statement of one source about a finding's hosts."""

    source: str
    """"processes", "readings", "kernel log", "rank logs", "stacks", "hang class", or
    `NOT_MEASURED`."""

    text: str
    """Half a sentence with numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One diagnosed cause. Findings come sorted by ``recoverable_ratio``, the largest first."""

    cause: str
    """``slow-compute``, ``stage-imbalance``, ``healthy``, ...: a name of `analysis.causes`."""

    ranks: tuple[int, ...] = ()
    """Global ranks at fault, of those in the trace; empty for ``healthy`` and the like."""

    steps: tuple[int, int] | None = None
    """First and last step that show it; None if no step does."""

    slowdown: float | None = None
    """S of that set of ranks; None if it is undefined."""

    recoverable_ratio: float | None = None
    """``(T_actual - T_without) / (T_actual - T_ideal)`` in the full replay."""

    saved_s: float | None = None
    """``T_actual - T_without`` of the same, mean seconds per step; None if it has no price."""

    shown_saved_s: float | None = None
    """The same over its own steps, from the first to the last that shows it: of a live run also
    over those that have left the window, so it does not change as the window slides."""

    noise_s: float | None = None
    """Standard deviation of the step time, seconds, once all findings are fixed."""

    confidence: float
    """0 to 1."""

    evidence: str
    """One sentence with numbers that a person can check on the timeline."""

    hosts: tuple[str, ...] = ()
    """Hosts of these ranks in these steps, each once; empty if unknown."""

    epoch: int | None = None
    """The epoch that it ended, whose last steps a later one may have repeated on other hosts; None:
    that of its steps."""

    severity: Severity | None = None
    """None if it was not graded, as of a finding read back from the store."""

    proof: Proof | None = None
    """None if no single operation shows it, or none is known."""

    card: ProofCard | None = None
    """Its quantity beside that of peers; None if its cause has no picture, or nothing is known."""

    end_class: str = ""
    """Of a crash or a hang: "cuda-oom", "host-oom", "xid-79", "signal-9", "data-loader", ...; else
    empty."""

    host_notes: tuple[HostNote, ...] = ()
    """What readings, logs and stacks of its hosts say beside the evidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Saving of a fix, wherever it is shown: a mean per step, and its share of the step."""

    seconds: float
    share: float
    since: int | None
    """First of the steps; None: all that were analysed."""

    step_s: float
    """Mean of these steps, as recorded."""

    @property
    def fixed_step_s(self) -> float:
        """Return the same with the ranks at fault as their peers."""
        return self.step_s - self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacements:
    """Placement of the ranks in steps between two restarts that moved any to another host."""

    epochs: tuple[int, ...]
    """Ascending, as are the steps."""

    steps: tuple[int, ...]
    of_rank: dict[int, tuple[str, int]]
    """Host ("" if unknown) and local rank (-1 if unknown) of each rank."""


def placements_of(finding: Finding, placements: tuple[RankPlacements, ...]) -> RankPlacements:
    """Return where ranks are in the epoch, or else in the last step, of a finding, or at the end.

    Args:
        placements: Of the run, at least one.
    """
    ended = next((each for each in placements if finding.epoch in each.epochs), None)
    if ended is not None:
        return ended
    last = None if finding.steps is None else finding.steps[1]
    later = (
        placement for placement in placements if last is not None and last <= placement.steps[-1]
    )
    return next(later, placements[-1])


def epoch_of(finding: Finding, placements: tuple[RankPlacements, ...], *, newest: int) -> int:
    """Return the epoch of a finding; ``newest`` if none is known."""
    if finding.epoch is not None:
        return finding.epoch
    return placements_of(finding, placements).epochs[-1] if placements else newest


def format_hosts(finding: Finding, placements: tuple[RankPlacements, ...]) -> str:
    """Return the hosts of a finding for a sentence; "" if there is only one, or too many."""
    of_rank = placements_of(finding, placements).of_rank if placements else {}
    is_one_of_several = len({host for host, _ in of_rank.values()}) > 1
    return (
        format_names(finding.hosts)
        if is_one_of_several and 0 < len(finding.hosts) <= MAX_NAMES
        else ""
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitsOn:
    """A rank or link that others wait on, directly or through ranks that it delays."""

    rank: int | None
    """None if it is a link."""

    ratio: float
    """Share of the step's time."""

    link: int | None = None
    """The link whose transfer took too long, in `RunReport.waited_links`; None if it is a rank."""


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
    """How FLOPs were counted and which peak they were divided by, in words."""

    mean: float
    by_step: dict[int, float]
    """0..1, unsmoothed."""

    flops_by_step: dict[int, float] = field(default_factory=dict)
    """Model FLOPs of the same steps."""

    restart_steps: tuple[int, ...] = ()
    """First known step after each restart of the job."""

    hfu: float | None = None
    """The same mean of the executed FLOPs, with those that activation recomputation repeats (HFU);
    None if these are unknown."""

    usual: float | None = None
    """Mean MFU of the previous run of the same model on as many of the same devices, by the same
    convention; None if there is none."""


class MfuShapeName(StrEnum):
    """Shape of the MFU curve; see `analysis.breakdown.mfu_shape`."""

    LOW_FROM_START = "low-from-start"
    STEADY_LOW = "steady-low"
    REGULAR_DIPS = "regular-dips"
    RARE_DIPS = "rare-dips"
    GROWING_SAG = "growing-sag"
    SUDDEN_DROP = "sudden-drop"
    NOISY = "noisy"
    STEADY = "steady"
    """None of the seven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MfuShape:
    """The shape of the MFU curve, recognised from the values alone."""

    name: MfuShapeName
    steps: tuple[int, int]
    """First and last step that show it."""

    text: str
    """Half a sentence with numbers: "dropped by 20 % in step 20 and stays low"."""

    causes: str
    """What typically causes it; "" for a steady curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Limits of the trace that the result depends on."""

    account: RecordAccount
    """Account of all records: spans, and those of steps and micro-batches."""

    account_by_rank: Mapping[Pair, RecordAccount]
    """By (epoch, rank); rank -1 is for records of several ranks that were stored together."""

    clock_error_ns: int | None
    """None if unknown."""

    coverage_ratio: float | None
    """Share of the job's (rank, step) pairs that were traced and replayed."""

    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Mean seconds per step."""

    actual: float | None
    """Recorded: last end - first start of each step (T_base); None if no step was recorded."""

    replayed: float | None
    """T of the device replay; None if no step could be replayed."""

    ideal: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """A part of the mean step time."""

    name: str
    """``ideal``, the cause of a finding, or ``other``: what no finding explains."""

    seconds: float
    ranks: tuple[int, ...] = ()
    """Ranks at fault; empty if the part has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStepExcess:
    """Excess of each rank, or of each link, in each step, for a heat-map."""

    ranks: tuple[int, ...]
    """Rows; numbers of the rows if these are links."""

    steps: tuple[int, ...]
    """Columns."""

    excess_ns: FloatArray
    """Shape (ranks, steps): time above the baseline; NaN if unknown."""

    quantity: str = "compute time"
    """What takes the time."""

    baseline: str = "the step's median rank"
    """What it is compared with."""

    links: tuple[tuple[int, ...], ...] = ()
    """Members of the link of each row; empty if each row is a rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineBubble:
    """The bubble of a pipeline by the formula of its schedule, and as measured."""

    num_stages: int
    num_chunks: int
    """Model chunks on each stage."""

    num_microbatches: int
    deferred_ratio: float = 0.0
    """w: share of compute in weight gradients that the schedule defers; 0 without such a split."""

    formula_ratio: float
    """``(1 - 2 w) (p - 1) / (v m)`` of the useful forward and backward compute."""

    measured_ratio: float | None
    """Of the same; None if there is no such compute."""

    @property
    def formula(self) -> str:
        """The formula in words, with the sizes of this run."""
        sizes = (
            f"p = {self.num_stages:,} stages, v = {self.num_chunks:,} chunks,"
            f" m = {self.num_microbatches:,} micro-batches"
        )
        if not self.deferred_ratio:
            return f"(p - 1) / (v m) with {sizes}"
        deferred = f"w = {format_percent(self.deferred_ratio, digits=1)} of compute deferred"
        return f"(1 - 2 w) (p - 1) / (v m) with {sizes}, {deferred}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WaterfallSummary:
    """Parts of the time of all steps; `analysis.breakdown.waterfall.Part` describes them."""

    parts: tuple[str, ...]
    """In the order in which they are drawn."""

    mean_ratio: dict[str, float | None]
    """Share of each part in the time of all ranks."""

    waiting_on: tuple[WaitsOn, ...]
    """What ranks waited for beyond the bubble, the largest share of all ranks' time first."""

    bubble: PipelineBubble | None
    """None without a pipeline."""

    ranks: tuple[int, ...]
    by_rank_ns: IntArray
    """Shape (ranks, parts): over all steps."""

    steps: tuple[int, ...]
    by_step_ns: IntArray
    """Shape (steps, parts): over all ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Achieved bandwidth of alike transfers; see `analysis.breakdown.bandwidth`."""

    kind: str
    """Span kind; ``pp-send`` for p2p."""

    name: str
    """The operation."""

    num_members: int
    across_hosts: bool | None
    """Whether its members are on several hosts; None if unknown."""

    num_bytes: int
    num_instances: int
    transfer_ns: float
    """Median."""

    algorithm_bytes_per_s: float
    bus_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """The diagnosis of a run with all that it is based on.

    What needs a replay is None or empty if no step could be replayed.
    """

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
    actual_s_by_step: dict[int, float]
    findings: tuple[Finding, ...]
    """At least one, the verdict's first."""

    mfu: Mfu | None
    quality: Quality
    excess: RankStepExcess
    """Compute time of each rank in each step."""

    paced: bool
    placements: tuple[RankPlacements, ...] = ()
    """In order of time, one more for each restart that moved ranks; empty without a replay."""

    mfu_shape: MfuShape | None = None
    """None if the MFU is unknown, or known of too few steps."""

    planned_steps: tuple[int, ...] = ()
    """Steps with a planned pause of all ranks: a save, an evaluation. They are slow on purpose."""

    evidence: RankStepExcess | None = None
    """What the top finding is seen in; None: in ``excess``, or the finding is not about time."""

    tokens_by_step: dict[int, int] = field(default_factory=dict)
    """Tokens of ``steps``, if ``mfu`` is None and they are known; without a layout, a multiple."""

    squares_by_step: dict[int, int] = field(default_factory=dict)
    """Largest sum of squared sequence lengths of a rank in each step; empty if unknown."""

    missing_mfu: str = ""
    """Why ``mfu`` is None, if it is, and what makes it known."""

    startup_s_by_step: dict[int, float] = field(default_factory=dict)
    """Duration of each step in which the job started up: such steps are shown, but are in no mean,
    price or finding."""

    ending_s_by_step: dict[int, float] = field(default_factory=dict)
    """The same of a last step that is longer than all before, because the job ended in it."""

    num_earlier_steps: int = 0
    """Steps of the run before the first of ``steps``: only the last steps of a long run are
    analysed. The MFU covers all."""

    launch_slowdown: float | None = None
    """Recorded over replayed step time: what host gaps cost."""

    replay_error_ratio: float | None = None
    """``|T_full / T_base - 1|``: how far the full replay misses the recorded step time."""

    slowdown: float | None = None
    """S: replayed over ideal step time."""

    waste_ratio: float | None = None
    """``1 - 1 / S``."""

    slowdown_by_kind: dict[str, float | None] = field(default_factory=dict)
    slowdown_by_dp: dict[int, float | None] = field(default_factory=dict)
    slowdown_by_stage: dict[int, float | None] = field(default_factory=dict)
    slowdown_by_worker: dict[Pair, float | None] = field(default_factory=dict)
    """By (dp, stage): the smaller of S by dp and S by stage, the shortcut of arXiv 2505.05713."""

    exact_slowdown_by_worker: dict[Pair, float | None] = field(default_factory=dict)
    """By (dp, stage): replayed with the recorded times of that worker alone."""

    slowdown_by_step: dict[int, float | None] = field(default_factory=dict)
    ideal_s_by_step: dict[int, float] = field(default_factory=dict)
    """T_ideal of the full replay: with the usual launch gaps of the hosts."""

    m_w: float | None = None
    """Share of the lost time that is recovered if the worst 3 % of workers were ideal."""

    m_s: float | None = None
    """Share of the lost time that is recovered if the last pipeline stage were ideal; None without
    a pipeline."""

    starved: tuple[Starved, ...] = ()
    waterfall: WaterfallSummary | None = None
    bandwidth: tuple[Bandwidth, ...] = ()
    links: LinkSummary | None = None
    """None if no transfer is known."""

    waited_links: dict[int, WaitedLink] = field(default_factory=dict)
    """The links that ``starved`` and the waterfall name."""

    direct_waits: DirectWaits | None = None
    common_pauses: tuple[CommonPause, ...] = ()
    """By step."""

    device_time: DeviceTime | None = None
    """None if no profile was imported."""

    kernels: tuple[Kernel, ...] = ()
    """Of the mean step of a rank, the busiest first; empty if no profile was imported."""

    culprits: CulpritComparison | None = None
    """None if the S of workers is undefined."""

    memory: MemoryUse | None = None
    """None if neither a peak nor a size of the model's state is known."""

    @property
    def warmup_steps(self) -> tuple[int, ...]:
        """Steps that are shown but not analysed: start-up, and an end of the job."""
        return (*self.startup_s_by_step, *self.ending_s_by_step)

    @property
    def has_layout(self) -> bool:
        """True if the parallel layout is known; else ``coords.dp`` is the rank's number."""
        return is_layout_known(self.layout, self.world_size)

    @property
    def reachable_s_by_step(self) -> dict[int, float]:
        """The time of each step if every rank ran like the median, as far as it was replayed.

        Its host launches like the median, too: a job that is bound by its hosts on all ranks alike
        has nothing to gain from another rank.

        It is at most what a quarter of the steps with as much work took, by their ideals: a run
        that is slow in most steps has slow medians. The fastest step alone is luck.
        """
        replayed = self.ideal_s_by_step.keys() & self.actual_s_by_step.keys()
        reachable: dict[int, float] = {}
        at_least_as_much: list[float] = []
        by_work = sorted(replayed, key=self.ideal_s_by_step.__getitem__, reverse=True)
        for ideal_s, equal in groupby(by_work, key=self.ideal_s_by_step.__getitem__):
            steps = tuple(equal)
            for step in steps:
                insort(at_least_as_much, self.actual_s_by_step[step])
            fast_s = at_least_as_much[len(at_least_as_much) // 4]
            reachable |= dict.fromkeys(steps, min(ideal_s, fast_s))
        return {step: reachable[step] for step in self.ideal_s_by_step if step in reachable}

    @property
    def reachable_step_s(self) -> float | None:
        """Mean of `reachable_s_by_step`, or what fixing one finding alone reaches, if less.

        None if no step was replayed.
        """
        reachable, actual_s = self.reachable_s_by_step, self.step_time_s.actual
        if not reachable or actual_s is None:
            return None
        saved_s = max((finding.saved_s or 0.0 for finding in self.findings), default=0.0)
        return min(sum(reachable.values()) / len(reachable), actual_s - min(saved_s, actual_s))

    @property
    def step_parts(self) -> tuple[StepPart, ...]:
        """The mean step time as its ideal, what fixing each finding would save, and the rest.

        The parts sum to the step time, and none is negative. A finding counts what the ones before
        it have left of the lost time: several may delay the same moment. Empty if no step was
        replayed.
        """
        ideal_s, actual_s = self.reachable_step_s, self.step_time_s.actual
        if ideal_s is None or actual_s is None:
            return ()
        parts = [StepPart(name="ideal", seconds=ideal_s)]
        left_s = actual_s - ideal_s
        for finding in self.findings:
            seconds = min(max(finding.saved_s or 0.0, 0.0), left_s)
            if seconds > 0 and finding.cause != "insufficient-evidence":
                parts.append(StepPart(name=finding.cause, seconds=seconds, ranks=finding.ranks))
                left_s -= seconds
        return (*parts, StepPart(name="other", seconds=left_s))

    def shown_steps(self, finding: Finding) -> tuple[int, ...]:
        """Return the analysed steps from the first to the last that shows a finding."""
        first, last = finding.steps or (0, -1)
        return tuple(step for step in self.steps if first <= step <= last)

    def is_open(self, finding: Finding) -> bool:
        """Return whether one of the newest steps shows a finding: of a long one, of more of them.

        What no step shows is open as long as it is reported.
        """
        if finding.steps is None:
            return True
        first, last = finding.steps
        grace = max(GRACE_STEPS, GRACE_SHARE * (last - first + 1))
        return sum(step > last for step in self.steps) < grace

    def price(self, finding: Finding) -> Price | None:
        """Return what fixing a finding saves per step: of an open one, since its onset.

        That is what it will go on to cost: a mean over all steps would grow with each further one.
        None if it is unknown.
        """
        own = self.price_while_shown(finding)
        if own is not None and self.is_open(finding):
            return own
        saved_s, actual_s = finding.saved_s, self.step_time_s.actual
        if saved_s is None or not actual_s:
            return None
        return Price(seconds=saved_s, share=saved_s / actual_s, since=None, step_s=actual_s)

    def price_while_shown(self, finding: Finding) -> Price | None:
        """Return what fixing a finding saves in a step from the first to the last that shows it.

        That is what its proof shows. None if it is unknown, if no step shows the finding, or if it
        is planned, such as a checkpoint: the steps between two of them belong to its period.
        """
        if finding.severity is Severity.NONE:
            return None
        shown = [step for step in self.shown_steps(finding) if step in self.actual_s_by_step]
        saved_s = finding.shown_saved_s
        if finding.steps is None or saved_s is None or not shown:
            return None
        step_s = sum(self.actual_s_by_step[step] for step in shown) / len(shown)
        if not step_s:
            return None
        onset = finding.steps[0]
        since = onset if onset > min(self.actual_s_by_step) else None
        return Price(seconds=saved_s, share=saved_s / step_s, since=since, step_s=step_s)

    def share_held_up(self, waiting: Starved, finding: Finding) -> float:
        """Return the share of a step that a rank waits for what a finding names.

        That are its ranks, or for a cause that is seen in transfers the links with one of them.
        """
        ranks = set(finding.ranks)
        if finding.cause not in TRANSFER_CAUSES:
            return sum(on.ratio for on in waiting.waits_on if on.rank in ranks)
        return sum(
            on.ratio
            for on in waiting.waits_on
            if on.link is not None
            and (not ranks or not ranks.isdisjoint(self.waited_links[on.link].members))
        )

    def name_waited_for(self, on: WaitsOn) -> str:
        """Return what is waited for: "rank 5", "dp-comm transfers of ranks 0, 2 … 30 (16)"."""
        if on.link is None:
            return f"rank {on.rank}"
        link = self.waited_links[on.link]
        return f"{link.kind} transfers of ranks {format_link(link.members)}"

    def is_due_to(self, on: WaitsOn, rank: int) -> bool:
        """Return whether a rank is waited for itself, or one of its links."""
        return on.rank == rank or (
            on.link is not None and rank in self.waited_links[on.link].members
        )

    @property
    def longest_waits(self) -> tuple[Starved, ...]:
        """The waiting ranks, those first that wait longest for what the top finding names.

        If it names all that wait, or is no problem, those that wait longest.
        """
        top = self.top_finding
        is_problem = top.severity is not Severity.NONE and (
            top.cause in TRANSFER_CAUSES
            or not set(top.ranks).issuperset(waiting.rank for waiting in self.starved)
        )

        def order(waiting: Starved) -> tuple[float, float]:
            on_culprits = self.share_held_up(waiting, top) if is_problem else 0.0
            return -on_culprits, -waiting.wait_ratio

        return tuple(sorted(self.starved, key=order))

    @property
    def top_finding(self) -> Finding:
        """The finding that the verdict is about: the first that matters, if there is one."""
        harmless = (Severity.MINOR, Severity.NONE)
        return next(
            (finding for finding in self.findings if finding.severity not in harmless),
            self.findings[0],
        )

    @property
    def open_step(self) -> int | None:
        """The step that never ended, if the top finding is about one: a hang, a crash."""
        top = self.top_finding
        if not top.ranks or top.steps is None or not self.actual_s_by_step:
            return None
        last = max(self.actual_s_by_step)
        return max(last + 1, top.steps[0]) if top.steps[1] > last else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CulpritComparison:
    """Comparison of the worst worker by the shortcut for S_w and by its exact value."""

    num_steps: int
    num_different: int
    """Steps in which they name different workers; of equal ones the lowest (dp, stage) counts."""

    by_shortcut: tuple[int, int]
    """(dp, stage) of the largest S_w over all steps."""

    by_exact: tuple[int, int]
