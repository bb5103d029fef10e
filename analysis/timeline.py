"""One step of one run, laid out for drawing: every rank's spans with their wait and transfer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from analysis.source import SpanTable
    from tracer.topology import Coords


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimeline:
    """One step; the span columns are rows of ``spans``."""

    run: str
    epoch: int
    step: int
    begin_ns: int
    """Start of the step's first span on the common clock; draw times relative to it."""

    end_ns: int
    spans: SpanTable
    wait_ns: NDArray[np.int64]
    """Shape (spans,): this rank's start to the last arrival; -1 where the span is no
    communication or a member of its instance is missing."""

    transfer_ns: NDArray[np.int64]
    """Shape (spans,): the last arrival to this rank's end; meaningless where ``wait_ns`` is -1."""

    last_rank: NDArray[np.int32]
    """Shape (spans,): the member that arrived last; -1 where ``wait_ns`` is -1."""

    coords: dict[int, Coords]
