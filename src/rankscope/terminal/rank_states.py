"""Open spans and stack of a rank at the end of a run that hung or crashed, as they are printed."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.tracer.span import NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSpan:
    """A span that had begun and not ended."""

    name: str
    kind: str
    step: int
    start_ns: int
    """Unix time; 0 if unknown."""

    seq: int
    """Number of a communication in its group; -1 of other spans."""

    group: str
    """Name of its group; "" if it has none."""

    def __str__(self) -> str:
        """Write it: "all_reduce 35 (dp-comm) of dp:0"."""
        if self.seq == NONE:
            return self.name
        return f"{self.name} {self.seq} ({self.kind})" + (f" of {self.group}" if self.group else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """The last that is known of a rank."""

    rank: int
    open: tuple[OpenSpan, ...]
    """The outermost first."""

    frames: tuple[str, ...]
    """Of its main thread, or of the exception that ended it, the innermost first: "train.py:7 f".
    """

    place: str
    """The innermost frame of the job's own code; "" if it is unknown."""
