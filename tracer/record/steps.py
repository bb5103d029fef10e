"""Records of steps and micro-batches, and the span kinds that a step is missing."""

from __future__ import annotations

import sys
from time import monotonic_ns
from typing import TYPE_CHECKING

from ..native.lane_state import PLACE
from ..span import COMM_KINDS, NONE, SpanFlag, SpanKind, pack_kinds
from ..spool import MICROBATCH, STEP, RecordType
from .lane import head_word

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .lane import Lane
    from .plain_values import Arguments

STEP_HEAD = head_word(RecordType.STEP, kind=0, flags=int(SpanFlag.HOST_CLOCK), name_id=0)
MICROBATCH_HEAD = head_word(
    RecordType.MICROBATCH, kind=0, flags=int(SpanFlag.HOST_CLOCK), name_id=0
)

COMPUTE_KINDS = (SpanKind.FORWARD, SpanKind.BACKWARD)
OPTIMIZER_KINDS = (SpanKind.OPTIMIZER,)
COMMUNICATION_KINDS = (*COMM_KINDS, SpanKind.OTHER, SpanKind.WAIT)
"""The span kinds that are missing once the capture of that name has failed."""

TIMED_KINDS = (*COMPUTE_KINDS, *OPTIMIZER_KINDS, *COMMUNICATION_KINDS)
"""The span kinds of these captures, which are timed on the device if there is one."""


class StepRecords:
    """Writer of step and micro-batch records; unusable values become unknown and are counted."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments

    def write_step(  # noqa: PLR0913 - a record has this many fields
        self,
        lane: Lane,
        step: int,
        *,
        start_ns: int,
        end_ns: int,
        tokens: object,
        loss: object,
        left_out: int,
    ) -> None:
        """Write the record of a step that has ended.

        Args:
            lane: The lane of the calling thread.
            step: Number of the step.
            start_ns: Start, monotonic.
            end_ns: End, monotonic.
            tokens: Number of tokens of this rank's data position; None if unknown.
            loss: A number, or a tensor on the CPU; None if unknown.
            left_out: Bit mask (`pack_kinds`) of the kinds that were not recorded in the step.
        """
        second = STEP.pack(
            self._arguments.count(tokens),
            self._arguments.loss(loss),
            read_peak_memory_bytes(),
            left_out,
        )
        place = PLACE.pack(step, NONE, NONE, lane.track_id)
        lane.append(STEP_HEAD, start_ns, end_ns - start_ns, place, start_ns, 0, second)

    def write_microbatch(
        self, lane: Lane, step: int, *, index: object, tokens: object, sum_squared_lengths: object
    ) -> None:
        """Write the record of micro-batch ``index`` of ``step``; None means unknown."""
        now_ns = monotonic_ns()
        second = MICROBATCH.pack(
            self._arguments.count(tokens), self._arguments.count(sum_squared_lengths)
        )
        place = PLACE.pack(step, self._arguments.index(index), lane.chunk, lane.track_id)
        lane.append(MICROBATCH_HEAD, now_ns, 0, place, now_ns, 0, second)


class MissingKinds:
    """Span kinds missing from a step because a capture failed. Any thread may add to them."""

    def __init__(self) -> None:
        self._permanent = 0
        self._in_step = 0

    def add_permanent(self, kinds: Iterable[SpanKind]) -> None:
        """Add kinds that are missing from this step and all later ones."""
        self._permanent |= pack_kinds(kinds)

    def add_in_step(self, kind: SpanKind) -> None:
        """Add a kind that is missing from this step only."""
        self._in_step |= pack_kinds((kind,))

    def end_step(self) -> int:
        """Return the bit mask (`pack_kinds`) of the step that ends, and begin the next step."""
        found, self._in_step = self._in_step | self._permanent, 0
        return found


def read_peak_memory_bytes() -> int:
    """Return the peak of the device's allocator since the process began; `NONE` if no device."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return NONE
    return int(torch.cuda.max_memory_allocated())
