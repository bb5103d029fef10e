"""Of which kinds this process lacks spans for an error of ours, as the record of a step says it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..span import COMM_KINDS, SpanKind, kind_bits

if TYPE_CHECKING:
    from collections.abc import Iterable

COMPUTE = (SpanKind.FORWARD, SpanKind.BACKWARD)
OPTIMIZER = (SpanKind.OPTIMIZER,)
COMMUNICATION = (*COMM_KINDS, SpanKind.OTHER, SpanKind.WAIT)
"""What nobody records once the capture of that name has failed."""

TIMED = (*COMPUTE, *OPTIMIZER, *COMMUNICATION)
"""What all of them record, and what is timed on a device where there is one."""


class Lacking:
    """What is missing, by the bits of `kind_bits`. Hooks of any thread may tell it."""

    def __init__(self) -> None:
        self._for_good = 0
        self._in_step = 0

    def from_now_on(self, kinds: Iterable[SpanKind]) -> None:
        """Note that nothing of ``kinds`` is recorded any more, beginning with this step."""
        self._for_good |= kind_bits(kinds)

    def in_step(self, kind: SpanKind) -> None:
        """Note that this step lacks a span of ``kind``."""
        self._in_step |= kind_bits((kind,))

    def end_step(self) -> int:
        """Return the bits of what the step that ends lacks, and begin the next."""
        found, self._in_step = self._in_step | self._for_good, 0
        return found
