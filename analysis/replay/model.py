"""What replay and diagnosis need of a run, whatever format it came from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from ..arrays.intervals import Line
from ..arrays.sorting import stable_argsort

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .operations import Operations


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayModel:
    """Operations with their ideal durations and the groups that they can be put back by."""

    operations: Operations
    ideal_ns: NDArray[np.float64]
    """Shape (ops,): what the duration or transfer would be in a straggler-free step."""

    ideal_gap_ns: NDArray[np.float64]
    """Shape (ops,): the same for the launch gap."""

    kind: NDArray[np.int16]
    """Shape (ops,): code into ``kinds``."""

    kinds: tuple[str, ...]
    """What ``slowdown_by_kind`` is told by."""

    rank: NDArray[np.int32]
    dp: NDArray[np.int32]
    stage: NDArray[np.int32]
    on_device: NDArray[np.bool_]
    """Shape (ops,): compute and communication; the rest takes part in the full replay only."""

    span: NDArray[np.int64] | None = None
    """Shape (ops,): number of the span that a piece of compute is of; of the rest it says nothing.
    None: each is a whole one."""

    work: NDArray[np.int64] | None = None
    """Shape (ops,): one number for spans of equal kind, portion, chunk and stage, however often
    they are cut; of the rest it says nothing. None: as labelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeItems:
    """Compute of each (rank, step) by micro-batch, self-time only: waits are cut out.

    Ordered by (step, rank).
    """

    step: NDArray[np.int32]
    """Step number."""

    rank: NDArray[np.int32]
    kind: NDArray[np.int8]
    """Code into `tracer.span.KINDS`: forward or backward."""

    chunk: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    """Position among the (step, rank, kind, chunk)'s items, in order of start."""

    self_ns: NDArray[np.int64]
    deferred_ratio: float = 0.0
    """Share of all this compute that was split off and done later in the step (the weights'
    gradients of a zero-bubble schedule); the parts of a micro-batch are one item."""

    def __len__(self) -> int:
        return len(self.self_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A run of any format, ready to replay and to diagnose."""

    model: ReplayModel
    items: ComputeItems
    waits: WaitIntervals
    gaps: GapItems
    transfers: Transfers
    steps: tuple[int, ...]
    """Steps that take part, ascending."""

    actual_ns: NDArray[np.int64]
    """Shape (steps,): last end - first start over the step's ranks."""

    left_out: dict[int, str]
    """Steps that cannot be replayed, and why."""

    warnings: tuple[str, ...]
    experts: NDArray[np.bool_] | None = None
    """Shape (ops,): which are compute of experts, from which ``items`` are free; None where none
    is known to be."""

    not_compared: tuple[int, ...] = ()
    """Ranks that recorded no compute in more than half of ``steps``, ascending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitIntervals:
    """When a rank stood waiting for the last member of a communication to arrive.

    Intervals of one rank do not overlap.
    """

    rank: NDArray[np.int32]
    """Who waits ..."""

    operation: NDArray[np.int64]
    """... in which operation: its own member of the communication."""

    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    """The last member's arrival."""


def remove_overlaps(waits: WaitIntervals) -> WaitIntervals:
    """Cut waits of one rank that overlap, so that each instant counts once, for the earlier."""
    if not len(waits.rank):
        return waits
    line = Line.over(waits.rank, waits.start_ns, waits.end_ns)
    begin = line.place(waits.rank, waits.start_ns)
    order = stable_argsort(begin)
    begin = begin[order]
    end = begin + (waits.end_ns - waits.start_ns)[order]
    reach = np.append(begin[0], np.maximum.accumulate(end)[:-1])
    cut = np.maximum(reach - begin, 0)
    real = cut < end - begin
    order, cut = order[real], cut[real]
    return WaitIntervals(
        rank=waits.rank[order],
        operation=waits.operation[order],
        start_ns=waits.start_ns[order] + cut,
        end_ns=waits.end_ns[order],
    )


NO_LINK = -1


class Place(IntEnum):
    """Where in a rank's step it did nothing of its own though nobody held it up."""

    INPUT = 0
    """Before the step's first compute."""

    FORWARD = 1
    """Before a forward compute that is not the step's first compute, or before the launch of a
    collective that it follows."""

    BACKWARD = 2
    LAUNCH = 3
    """Right before it launched a collective that no forward or backward follows in the step."""

    OTHER = 4
    """Before the optimizer, or after the step's last compute."""

    GC = 5
    """In a ``gc`` span."""

    CHECKPOINT = 6
    """In a ``checkpoint`` span."""

    DATA = 7
    """In a ``data`` span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapItems:
    """Host gaps: time of a rank outside its compute in which it waited for no other rank."""

    step: NDArray[np.int32]
    """Step number."""

    rank: NDArray[np.int32]
    place: NDArray[np.int8]
    """Codes of `Place`."""

    gap_ns: NDArray[np.int64]
    operation: NDArray[np.int64]
    """The operation of the replay that holds the gap, -1 where it holds none."""

    def __len__(self) -> int:
        return len(self.gap_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What carries alike transfers: an ordered pair of ranks, or a group."""

    members: tuple[int, ...]
    """Global ranks: (source, destination) of a pair, ascending of a group."""

    kind: str
    """Span kind of its transfers; ``pp-send`` for a pair of stages."""

    is_pair: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """One row per communication instance with a known transfer."""

    step: NDArray[np.int32]
    """Step number."""

    link: NDArray[np.int32]
    """Index into ``links``."""

    alike: NDArray[np.int32]
    """Instances of equal number (operation, size, number of members) should take equally long."""

    transfer_ns: NDArray[np.int64]
    """Of the member that entered last, by its own clock: so no clock error is in it."""

    num_bytes: NDArray[np.int64]
    """-1 where unknown."""

    name: NDArray[np.int32]
    """Codes into ``names``: the operation."""

    names: tuple[str, ...]
    links: tuple[Link, ...]
    link_of_operation: NDArray[np.int32]
    """Shape (ops,): index into ``links`` of the replay's operations, `NO_LINK` of all others."""

    def __len__(self) -> int:
        return len(self.step)


COMPUTE_KINDS = frozenset(
    {"forward", "backward", "optimizer", "forward-compute", "backward-compute"}
)


HOST_KINDS = frozenset({"host", "data", "gc", "checkpoint"})


P2P_KINDS = frozenset({"pp-send", "pp-recv", "forward-pp-comm", "backward-pp-comm"})


BUFFERED_KIND = "pp-send"
"""A send without a group went into a buffer: it waited for nobody, and all of it is transfer."""


def has_kind(model: ReplayModel, names: frozenset[str]) -> NDArray[np.bool_]:
    """Tell which operations are of one of these kinds. Shape (ops,)."""
    wanted = np.array([name in names for name in model.kinds], dtype=np.bool_)
    found: NDArray[np.bool_] = wanted[model.kind]
    return found


FORWARD_KINDS = frozenset({"forward", "forward-compute"})


BACKWARD_KINDS = frozenset({"backward", "backward-compute"})
