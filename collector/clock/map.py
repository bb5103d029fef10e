"""Map of a host's monotonic clock to Unix time, in straight stretches that never change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..names import storable_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from rankscope.tracer.spool import SpoolIdentity

    from ..identity import Row

PPB = 1_000_000_000

UNKNOWN_ERROR_NS = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A straight part of the map; it ends where the next one begins."""

    begin_ns: int
    """Monotonic time at which it begins; the first one also holds before."""

    offset_ns: int
    """Unix time - monotonic time at ``begin_ns``."""

    drift_ppb: int = 0
    """Rate of Unix time relative to the monotonic clock, less 1."""


class ClockMap:
    """The map of one boot of a host. Stretches are added at its end and never changed.

    A time is mapped by the stretch that contains it, not by the newest one. So a row that is read
    again gets the same time.

    Args:
        stretches: At least one, in the order of their begin.
    """

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        self._stretches = list(stretches)
        self._set()

    @classmethod
    def fixed(cls, offset_ns: int) -> ClockMap:
        """Return a map with one constant offset."""
        return cls([Stretch(begin_ns=0, offset_ns=offset_ns)])

    @property
    def newest(self) -> Stretch:
        """The last stretch, which has no end."""
        return self._stretches[-1]

    def add(self, stretch: Stretch) -> None:
        """Add a stretch at the end of the map.

        Raises:
            ValueError: It begins before the newest one.
        """
        if stretch.begin_ns < self.newest.begin_ns:
            raise ValueError(
                f"the stretch begins at {stretch.begin_ns} ns, before the newest one at"
                f" {self.newest.begin_ns} ns"
            )
        self._stretches.append(stretch)
        self._set()

    def unix_ns(self, at_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return times of the host's clock as Unix time, in the same shape."""
        begin_ns, offset_ns, drift_ppb = self._table
        if len(begin_ns) == 1 and not drift_ppb[0]:
            fixed: NDArray[np.int64] = at_ns + offset_ns[0]
            return fixed
        # The first stretch also holds before its begin.
        index = np.maximum(np.searchsorted(begin_ns, at_ns, side="right") - 1, 0)
        age_ns = (at_ns - begin_ns[index]).astype(np.float64)
        # The product overflows int64 after some days; a double is exact to far below 1 ns.
        drifted_ns = np.floor(age_ns * (drift_ppb[index] / PPB)).astype(np.int64)
        mapped: NDArray[np.int64] = at_ns + offset_ns[index] + drifted_ns
        return mapped

    def unix_at(self, at_ns: int) -> int:
        """Return one time as Unix time."""
        return int(self.unix_ns(np.array([at_ns], dtype=np.int64))[0])

    def _set(self) -> None:
        rows = [
            (stretch.begin_ns, stretch.offset_ns, stretch.drift_ppb) for stretch in self._stretches
        ]
        # One assignment: another thread may be reading.
        self._table = np.array(rows, dtype=np.int64).T


class Clocks(Protocol):
    """Maps of the monotonic clocks of hosts to Unix time."""

    def clock_map(
        self, identity: SpoolIdentity, *, declared_error_ns: int = UNKNOWN_ERROR_NS
    ) -> ClockMap:
        """Return the map for the host and boot of a process.

        Args:
            declared_error_ns: Error of the host's Unix time by the process's manifest. A measured
                error takes precedence.
        """
        ...


class AnchorClocks:
    """One constant offset for each boot of a host: the first anchor of a process, in the store.

    Each process reads its own anchor, with an error of a few microseconds. With its own offset
    each, ranks of one host would be misaligned by these errors; with one, they share the clock
    exactly.

    Args:
        stored: Rows of table ``clock``.
        add: Called with each new row, which must be stored before anything with its times is.
    """

    def __init__(self, stored: Sequence[Row], add: Callable[[Row], None]) -> None:
        self._add = add
        self._offset_ns: dict[tuple[str, str], int] = {
            (row["host"], row["boot_id"]): row["offset_ns"] for row in stored
        }

    def clock_map(
        self, identity: SpoolIdentity, *, declared_error_ns: int = UNKNOWN_ERROR_NS
    ) -> ClockMap:
        """Return the map of the process's host, which never changes; add it if it is new."""
        host, boot_id = storable_name(identity.host), identity.boot_id.hex()
        known_offset_ns = self._offset_ns.get((host, boot_id))
        if known_offset_ns is not None:
            return ClockMap.fixed(known_offset_ns)
        offset_ns = identity.anchor_unix_ns - identity.anchor_monotonic_ns
        self._add(
            {
                "host": host,
                "boot_id": boot_id,
                "at_ns": identity.anchor_unix_ns,
                "offset_ns": offset_ns,
                "drift_ppb": 0,
                "clock_error_ns": declared_error_ns,
            }
        )
        self._offset_ns[host, boot_id] = offset_ns
        return ClockMap.fixed(offset_ns)
