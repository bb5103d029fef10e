"""The records of steps and of micro-batches."""

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
"""What nobody records once the capture of that name has failed."""

TIMED_KINDS = (*COMPUTE_KINDS, *OPTIMIZER_KINDS, *COMMUNICATION_KINDS)
"""What all of them record, and what is timed on a device where there is one."""


class StepRecords:
    """Writes them to the lane of whoever tells; what cannot be used is unknown, and counted."""

    def __init__(self, arguments: Arguments) -> None:
        self._arguments = arguments

    def end_step(  # noqa: PLR0913 - a record has this many fields
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
        """Write that ``step`` is over.

        Args:
            lane: The calling thread's.
            step: Its number.
            start_ns: Begin, monotonic.
            end_ns: End, monotonic.
            tokens: Of this rank's data position; None: unknown.
            loss: A number, or a tensor on the CPU; None: unknown.
            left_out: Bits of the kinds that were not recorded in it.
        """
        second = STEP.pack(
            self._arguments.count(tokens),
            self._arguments.loss(loss),
            peak_memory_bytes(),
            left_out,
        )
        place = PLACE.pack(step, NONE, NONE, lane.track_id)
        lane.append(STEP_HEAD, start_ns, end_ns - start_ns, place, start_ns, 0, second)

    def note_microbatch(
        self, lane: Lane, step: int, *, index: object, tokens: object, sum_squared_lengths: object
    ) -> None:
        """Write what micro-batch ``index`` of ``step`` holds, as far as it is known."""
        now_ns = monotonic_ns()
        second = MICROBATCH.pack(
            self._arguments.count(tokens), self._arguments.count(sum_squared_lengths)
        )
        place = PLACE.pack(step, self._arguments.index(index), lane.chunk, lane.track_id)
        lane.append(MICROBATCH_HEAD, now_ns, 0, place, now_ns, 0, second)


class MissingKinds:
    """What is missing, by the bits of `pack_kinds`. Hooks of any thread may tell it."""

    def __init__(self) -> None:
        self._for_good = 0
        self._in_step = 0

    def add_permanent(self, kinds: Iterable[SpanKind]) -> None:
        """Note that nothing of ``kinds`` is recorded any more, beginning with this step."""
        self._for_good |= pack_kinds(kinds)

    def add_in_step(self, kind: SpanKind) -> None:
        """Note that this step lacks a span of ``kind``."""
        self._in_step |= pack_kinds((kind,))

    def end_step(self) -> int:
        """Return the bits of what the step that ends lacks, and begin the next."""
        found, self._in_step = self._in_step | self._for_good, 0
        return found


def peak_memory_bytes() -> int:
    """Return the device allocator's peak since the process began; `NONE` without a device."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return NONE
    return int(torch.cuda.max_memory_allocated())
