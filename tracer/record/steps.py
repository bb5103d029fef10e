"""Parts of the step and micro-batch records: head words, missing kinds, the allocator's peaks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

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


class PeakMemory(NamedTuple):
    """Statistics of the device's allocator since the process began; `NONE` is unknown."""

    allocated_bytes: int
    reserved_bytes: int
    """With what it caches."""

    num_alloc_retries: int
    """Times that the device had no memory left until the allocator freed its cache."""


NO_MEMORY = PeakMemory(NONE, NONE, NONE)
STATISTICS = ("allocated_bytes.all.peak", "reserved_bytes.all.peak", "num_alloc_retries")


def read_peak_memory() -> PeakMemory:
    """Return the statistics of the device's allocator; `NO_MEMORY` if no device is used."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return NO_MEMORY
    statistics = torch.cuda.memory_stats()
    return PeakMemory(*(int(statistics.get(name, NONE)) for name in STATISTICS))
