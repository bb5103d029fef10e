"""A host's monotonic clock as Unix time: straight stretches, none of which is ever revised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..names import storable_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from rankscope.tracer.spool import SpoolIdentity

    from ..identity import Row

PPB = 1_000_000_000

UNKNOWN_ERROR_NS = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """One straight piece of the map; the next one ends it."""

    begin_ns: int
    """Monotonic time from which it holds; the first one holds before, too."""

    offset_ns: int
    """Unix time - monotonic time at ``begin_ns``."""

    drift_ppb: int = 0
    """By how much Unix time runs faster."""


class ClockMap:
    """The map of one host and boot. Stretches are added at its end and never changed.

    A moment is mapped by the stretch in which it lies, not by the one that was the newest when
    somebody looked. A row that is read again is therefore the same row.

    Args:
        stretches: At least one, in the order of their begin.
    """

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        self._stretches = list(stretches)
        self._set()

    @classmethod
    def fixed(cls, offset_ns: int) -> ClockMap:
        """Return the map of a host of which one offset is known."""
        return cls([Stretch(begin_ns=0, offset_ns=offset_ns)])

    @property
    def newest(self) -> Stretch:
        """The stretch that holds from its begin on without end."""
        return self._stretches[-1]

    def add(self, stretch: Stretch) -> None:
        """End the newest stretch where this one begins.

        Raises:
            ValueError: It begins before the newest one.
        """
        if stretch.begin_ns < self.newest.begin_ns:
            raise ValueError(
                f"a stretch begins at {stretch.begin_ns} ns, before the newest at"
                f" {self.newest.begin_ns} ns"
            )
        self._stretches.append(stretch)
        self._set()

    def unix_ns(self, at_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return moments of the host's clock as Unix time, the same shape."""
        begin_ns, offset_ns, drift_ppb = self._table
        if len(begin_ns) == 1 and not drift_ppb[0]:
            fixed: NDArray[np.int64] = at_ns + offset_ns[0]
            return fixed
        # As the first holds before its begin too, nothing lies left of place 0.
        place = np.maximum(np.searchsorted(begin_ns, at_ns, side="right") - 1, 0)
        age_ns = (at_ns - begin_ns[place]).astype(np.float64)
        # int64 would overflow after some days; a double is exact to far below 1 ns here.
        crept_ns = np.floor(age_ns * (drift_ppb[place] / PPB)).astype(np.int64)
        mapped: NDArray[np.int64] = at_ns + offset_ns[place] + crept_ns
        return mapped

    def unix_at(self, at_ns: int) -> int:
        """Return one moment as Unix time."""
        return int(self.unix_ns(np.array([at_ns], dtype=np.int64))[0])

    def _set(self) -> None:
        rows = [(one.begin_ns, one.offset_ns, one.drift_ppb) for one in self._stretches]
        # One assignment: another thread may be reading.
        self._table = np.array(rows, dtype=np.int64).T


class Clocks(Protocol):
    """Knows how the monotonic clock of each host stands to Unix time."""

    def clock_map(self, identity: SpoolIdentity) -> ClockMap:
        """Return the map for the host and boot of a process."""
        ...


class ClockTable(Protocol):
    """Table ``clock``, as a sink offers it."""

    def clocks(self) -> list[Row]:
        """Return the rows known so far."""
        ...

    def upsert(self, table: str, rows: Sequence[Row]) -> None:
        """Store rows; return once they are durable."""
        ...


class AnchorClocks:
    """One offset for each boot of each host: the first anchor that came, kept in the store.

    Every process reads an anchor of its own, each a few microseconds off. Were
    each rank placed by its own, ranks of one host would stand apart by that
    error; placed by one, their times differ exactly as their one clock says.
    """

    def __init__(self, sink: ClockTable) -> None:
        self._sink = sink
        self._offset_ns: dict[tuple[str, str], int] = {
            (row["host"], row["boot_id"]): row["offset_ns"] for row in sink.clocks()
        }

    def clock_map(self, identity: SpoolIdentity) -> ClockMap:
        """Return the map of the process's host, one offset for ever."""
        return ClockMap.fixed(self.offset_ns(identity))

    def offset_ns(self, identity: SpoolIdentity) -> int:
        """Return Unix time - monotonic time on the process's host, storing it if it is new."""
        host, boot_id = storable_name(identity.host), identity.boot_id.hex()
        known = self._offset_ns.get((host, boot_id))
        if known is not None:
            return known
        offset_ns = identity.anchor_unix_ns - identity.anchor_monotonic_ns
        self._sink.upsert(
            "clock",
            [
                {
                    "host": host,
                    "boot_id": boot_id,
                    "at_ns": identity.anchor_unix_ns,
                    "offset_ns": offset_ns,
                    "drift_ppb": 0,
                    "clock_error_ns": UNKNOWN_ERROR_NS,
                }
            ],
        )
        self._offset_ns[host, boot_id] = offset_ns
        return offset_ns
