"""What replay and diagnosis need of a run, whatever format it came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .evidence import GapItems, Transfers
    from .operations import Operations
    from .starved import WaitIntervals


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

    unjudged: tuple[int, ...] = ()
    """Ranks that recorded no compute in more than half of ``steps``, ascending."""
