"""Map each host's monotonic clock to Unix time, the same way for all of its ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..names import storable_name
from .map import HostTime

if TYPE_CHECKING:
    from rankscope.tracer.spool import SpoolIdentity

    from ..spool.cut import Sink

UNKNOWN_ERROR_NS = -1


class Clocks(Protocol):
    """Knows how the monotonic clock of each host stands to Unix time."""

    def host_time(self, identity: SpoolIdentity) -> HostTime:
        """Return the map for the host and boot of a process."""
        ...


class HostClocks:
    """One offset for each boot of each host: the first anchor that came, kept in the store.

    Every process reads an anchor of its own, each a few microseconds off. Were
    each rank placed by its own, ranks of one host would stand apart by that
    error; placed by one, their times differ exactly as their one clock says.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._offset_ns: dict[tuple[str, str], int] = {
            (row["host"], row["boot_id"]): row["offset_ns"] for row in sink.clocks()
        }

    def host_time(self, identity: SpoolIdentity) -> HostTime:
        """Return the map of the process's host, one offset for ever."""
        return HostTime.fixed(self.offset_ns(identity))

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
