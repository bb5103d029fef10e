"""The records of steps and of micro-batches."""

from __future__ import annotations

from time import monotonic_ns
from typing import TYPE_CHECKING

from ..native.lane_state import PLACE
from ..span import NONE, SpanFlag
from ..spool import MICROBATCH, STEP, RecordType
from .device_memory import peak_memory_bytes
from .lane import head_word

if TYPE_CHECKING:
    from .arguments import Arguments
    from .lane import Lane

STEP_HEAD = head_word(RecordType.STEP, kind=0, flags=int(SpanFlag.HOST_CLOCK), name_id=0)
MICROBATCH_HEAD = head_word(
    RecordType.MICROBATCH, kind=0, flags=int(SpanFlag.HOST_CLOCK), name_id=0
)


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
