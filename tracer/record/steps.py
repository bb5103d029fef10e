"""Parts of the step and micro-batch records: head words, missing kinds, peak memory."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ..span import COMM_KINDS, NONE, SpanFlag, SpanKind, pack_kinds
from ..spool import RecordType
from .lane import head_word

if TYPE_CHECKING:
    from collections.abc import Iterable


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
        missing, self._in_step = self._in_step | self._permanent, 0
        return missing


def read_peak_memory_bytes() -> int:
    """Return the peak of the device's allocator since the process began; `NONE` if no device."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return NONE
    return int(torch.cuda.max_memory_allocated())
