"""The contract for sources of spans: what a run is, its columns of spans and steps, `SpanSource`.

Everything that analysis reads comes through a `SpanSource`. The store is one, a simulated run and a
file in the ByteDance format are others, and tests build the tables directly. Machine samples,
events, manifests and exits are in `analysis.trace.context`.

All times are Unix time in ns after clock alignment (`tracer.span.UnixNs`), unless a field says
otherwise. In integer columns -1 (`tracer.span.NONE`) means unknown or not applicable.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from .account import INVALID, TORN, sum_accounts

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from rankscope.tracer.topology import Coords, Layout

    from .account import RecordAccount
    from .context import RunContext


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFormat:
    """Facts that hold for every run of a trace format; the defaults are those of our tracer."""

    has_groups: bool = True
    """Communication has its group and number. Without them the instances are inferred from all
    spans of a step, so it must be read whole."""

    has_clocks: bool = True
    """Times are of the clocks of the ranks' hosts; else they are aligned in the trace."""

    has_flops: bool = True
    """A job can declare its FLOPs per token."""

    is_tp_collapsed: bool = False
    """One traced rank represents each (dp, stage)."""


FORMATS = {
    "rankscope": TraceFormat(),
    "bytedance": TraceFormat(
        has_groups=False, has_clocks=False, has_flops=False, is_tp_collapsed=True
    ),
}


class _HasFormat(Protocol):
    @property
    def source_format(self) -> str: ...


def format_of(run: _HasFormat) -> TraceFormat:
    """Return the facts about the trace format of a run; unknown ones are taken for our tracer's."""
    return FORMATS.get(run.source_format, FORMATS["rankscope"])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of a rank's device, and the rank's state in it; None is unknown."""

    device_bytes: int | None = None
    other_bytes: int | None = None
    """Used outside of the allocator: by the driver, by the communication library, and by other
    processes."""

    parameter_bytes: int | None = None
    gradient_bytes: int | None = None
    """Of the gradients of these parameters, whether or not they are there now."""

    optimizer_bytes: int | None = None

    @property
    def capacity_bytes(self) -> int | None:
        """Return what the allocator can have at most."""
        return None if self.device_bytes is None else self.device_bytes - (self.other_bytes or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankInfo:
    """One rank of one epoch, as its manifest declares it."""

    rank: int
    """Global rank."""

    coords: Coords
    """Position in the layout; ``dp`` is the rank's number if the layout is unknown."""

    host: str = ""
    local_rank: int = -1
    """Position among the ranks of its host, -1 if unknown."""

    clock: str = ""
    """Identity of the clock that its times are of: this boot of its host; "": its host."""

    clock_error_ns: int | None = None
    """Error bound of that clock; None if nothing measured it, or it is unknown here."""

    switch: str = ""
    """Network switch of its host, as are ``rack`` and ``rail``; "" if no topology is known."""

    rack: str = ""
    rail: str = ""
    device_name: str = ""
    """As the driver names it, ``cpu`` on CPU, "" if unknown."""

    dtype: str = ""
    """Type in which the matrix products compute, such as ``torch.bfloat16``; "" if unknown."""

    peak_flops_per_s: float | None = None
    """Peak of the device at ``dtype`` as declared by the job; None: look the device up."""

    memory: RankMemory = RankMemory()
    exit_state: str = ""
    """"running", "ended", "failed", "lost" (no exit record), or "" if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInfo:
    """One communication group."""

    group_id: int
    """`tracer.span.hash_group` of its name and members."""

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
    """The traced ranks, ascending; ranks of which nothing was received are not among them."""

    groups: tuple[GroupInfo, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Description of a run: everything that is known besides its spans and steps."""

    run_id: str
    source_format: str
    """Name of its trace format; `format_of` has what follows from it."""

    layout: Layout
    """All sizes 1 if the job declared none."""

    world_size: int
    epochs: tuple[EpochInfo, ...]
    """Ascending."""

    model: str = ""
    flops_per_token: float | None = None
    flops_per_squared_length: float = 0.0
    """FLOPs of a sequence over its squared length, which ``flops_per_token`` leaves out; 0 if the
    job declared FLOPs per token for sequences of one length."""

    flops_per_windowed_length: float = 0.0
    """The same of layers with a window, over the length times the length or the window."""

    recomputed_flops_per_token: float | None = None
    """FLOPs that activation recomputation repeats, per token; None if unknown."""

    recomputed_attention_ratio: float | None = None
    """The same of the attention, over the FLOPs of the attention."""

    unknown_flops: str = ""
    """Why the tracer could not derive the FLOPs; "" if it did not try."""

    num_parameters: int | None = None
    """Of the model on one rank, sharded ones counted whole."""

    shape: Mapping[str, object] = field(default_factory=dict)
    """Sizes of the model's layers, `tracer.job.decoder.Decoder`; empty if unknown."""

    flops_convention: str = ""
    """How the FLOPs were counted, in words; "" if they are unknown."""

    paced: bool = False
    """Whether the trainer padded its compute to the length that it names."""

    pace_overrun_ratio: float | None = None
    """Share of paced compute that overran its target by more than 10 %, on the worst rank."""

    accounts: Mapping[tuple[int, int], RecordAccount] = field(default_factory=dict)
    """Account of the records of each (epoch, rank); empty if the source is not a store."""

    clock_error_ns: int | None = None
    """Largest error bound between the clocks of the ranks; 0 on one host; None if unknown."""

    imported: str = ""
    """The program that recorded it, `torch.profiler`; "" if our tracer did. Of an imported run no
    more ranks will come: those that were imported are the job that is analysed."""

    warnings: tuple[str, ...] = ()
    """Problems of the stored data, one sentence each, for ``quality.warnings``."""

    @property
    def account(self) -> RecordAccount:
        """Account of the records of all ranks."""
        return sum_accounts(self.accounts.values())

    @property
    def num_dropped(self) -> int:
        """Number of dropped records that were complete and valid."""
        dropped = self.account.dropped
        return sum(num for reason, num in dropped.items() if reason not in {TORN, INVALID})

    @property
    def records_loader(self) -> bool:
        """True if PyTorch's loader itself writes each wait for it, as in its profiler's traces.

        Other time before the first compute of a step is the host's then, not input.
        """
        return self.imported == "torch.profiler"

    @property
    def has_layout(self) -> bool:
        """True if the parallel layout is known; else ``coords.dp`` is the rank's number."""
        return is_layout_known(self.layout, self.world_size)

    @property
    def ranks(self) -> dict[int, RankInfo]:
        """Return the description of each traced rank, as of its newest epoch."""
        return {info.rank: info for epoch in self.epochs for info in epoch.ranks}

    @property
    def coords(self) -> dict[int, Coords]:
        """Return the position of each traced rank, as of its newest epoch."""
        return {rank: info.coords for rank, info in self.ranks.items()}


def is_layout_known(layout: Layout, world_size: int) -> bool:
    """Return whether the layout was declared; sizes of 1 throughout are real for one rank only."""
    return world_size == 1 or layout.world_size > 1


def is_tp_collapsed(run: RunInfo, epoch: EpochInfo) -> bool:
    """Return whether exactly one tensor-parallel rank of each worker was traced."""
    if run.layout.tp == 1 or len(epoch.ranks) * run.layout.tp != run.world_size:
        return False
    workers = {
        (rank.coords.dp, rank.coords.pp, rank.coords.cp, rank.coords.ep) for rank in epoch.ranks
    }
    return len(workers) == len(epoch.ranks)


def num_expected_ranks(run: RunInfo) -> int:
    """Return how many ranks each step should have: all, or those of an imported run.

    If TP is collapsed, it is one of each worker.
    """
    if format_of(run).is_tp_collapsed:
        return run.layout.dp * run.layout.pp
    newest = run.epochs[-1]
    is_part = run.imported or is_tp_collapsed(run, newest)
    return len(newest.ranks) if is_part else run.world_size


def traced_groups(run: RunInfo) -> list[GroupInfo]:
    """Return the groups of all epochs; if TP is collapsed, only with their traced members.

    The ranks of a worker do the same, so such a group does not wait for the untraced ones. The
    groups of an imported run have the imported members: a wait for others counts as transfer.
    """
    groups: list[GroupInfo] = []
    for epoch in run.epochs:
        if not (run.imported or is_tp_collapsed(run, epoch)):
            groups += epoch.groups
            continue
        traced = {rank.rank for rank in epoch.ranks}
        for group in epoch.groups:
            members = tuple(rank for rank in group.members if rank in traced)
            groups.append(replace(group, members=members))
    return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanTable:
    """Spans of one run, ordered by (epoch, step, rank, start_ns).

    Every column has shape (spans,). `analysis.trace.rows` selects and concatenates rows.
    """

    epoch: NDArray[np.int32]
    step: NDArray[np.int32]
    """Optimizer step; -1 outside any."""

    rank: NDArray[np.int32]
    """Global rank."""

    kind: NDArray[np.int8]
    """Codes of `tracer.span.KINDS`."""

    name: NDArray[np.int32]
    """Codes of ``names``."""

    track: NDArray[np.int32]
    """Codes of ``tracks``: the stream or the thread."""

    start_ns: NDArray[np.int64]
    """Unix time."""

    duration_ns: NDArray[np.int64]
    """Never negative; clock alignment does not change it."""

    launch_ns: NDArray[np.int64]
    """Unix time at which the host issued the work; -1 if unknown."""

    group_id: NDArray[np.uint64]
    """Group of a communication, or of the one that a ``wait`` waits for; 0: none."""

    seq: NDArray[np.int64]
    """Number of the communication in its (epoch, group), from 0; for p2p in its ordered pair."""

    src_rank: NDArray[np.int32]
    """Global rank that sends; -1 unless p2p."""

    dst_rank: NDArray[np.int32]
    """Global rank that receives; -1 unless p2p."""

    microbatch: NDArray[np.int32]
    chunk: NDArray[np.int32]
    """Model chunk of the rank's stage, for interleaved schedules."""

    num_bytes: NDArray[np.int64]
    """Bytes of a communication on this rank: the larger of what is sent and what is received."""

    interval_id: NDArray[np.int64]
    """Shared by communications that one call issued together; 0: none."""

    flags: NDArray[np.uint16]
    """Bits of `tracer.span.SpanFlag`."""

    depth: NDArray[np.int16]
    """Nesting on its track, 0 outermost."""

    names: tuple[str, ...]
    tracks: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTable:
    """Steps of one run, one row per (epoch, step, rank), ordered by these.

    Every column has shape (rows,).
    """

    epoch: NDArray[np.int32]
    step: NDArray[np.int32]
    rank: NDArray[np.int32]
    start_ns: NDArray[np.int64]
    """Unix time at which the rank began the step."""

    end_ns: NDArray[np.int64]
    """Unix time at which it ended it; 0 or less if it has not."""

    num_tokens: NDArray[np.int64]
    """Tokens of the rank's data position, -1 if unknown. Ranks of one (dp, cp) position have the
    same tokens, so the tokens of a step are the sum over dp and cp only."""

    loss: NDArray[np.float64]
    """NaN if unknown."""

    peak_memory_bytes: NDArray[np.int64]
    """Peak of the device's allocator so far, -1 if unknown, as are the next two."""

    peak_reserved_bytes: NDArray[np.int64]
    """The same with what the allocator caches."""

    num_alloc_retries: NDArray[np.int64]
    """Times so far that the device's memory was full until the allocator freed its cache."""

    left_out: NDArray[np.uint32]
    """Bit `k` is set if the rank has no spans of kind `k` (`tracer.span.KINDS`) because they were
    not requested or their capture failed; 0: all kinds were recorded."""

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
    """Unix time; None if unknown."""

    warnings: tuple[str, ...] = field(default=())
    num_rows: int = 0
    """Stored rows of spans, steps, micro-batches and lines of logs: it grows with all new data that
    the diagnosis reads."""


class SpanSource(Protocol):
    """Read access to the runs of one store.

    Every method that takes a run raises `UnknownRunError` for one that the source does not have.
    ``first`` and ``last`` are steps, both included; None leaves that end open.
    """

    def runs(self) -> tuple[RunSummary, ...]:
        """Return every run, the newest first."""
        ...

    def run_info(self, run_id: str) -> RunInfo:
        """Return the description of a run."""
        ...

    def steps(self, run_id: str, *, first: int | None = None, last: int | None = None) -> StepTable:
        """Return the step rows of these steps, of all epochs."""
        ...

    def spans(self, run_id: str, *, first: int | None = None, last: int | None = None) -> SpanTable:
        """Return the spans of these steps, of all epochs, without spans outside any step."""
        ...

    def context(
        self, run_id: str, *, first: int | None = None, last: int | None = None
    ) -> RunContext:
        """Return samples and micro-batches of these steps, and events and exits of the run."""
        ...
