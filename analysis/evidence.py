"""What a run shows besides its compute: host gaps, and transfers by link."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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
