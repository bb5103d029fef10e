"""Liveness of a traced process: running, gone or unknown."""

from __future__ import annotations

import os
import socket
import time
from enum import Enum
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rankscope.tracer.spool import SpoolIdentity

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
MARGIN_S = 1.0
"""A process that is younger than the spool by this much reuses the pid of another one. The start
time in ``/proc`` is in ticks of 10 ms."""


@cache
def boot_id() -> bytes:
    """Return the id of the current boot, 16 bytes; zeros if the system has none."""
    try:
        return bytes.fromhex(BOOT_ID_FILE.read_text(encoding="ascii").strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


class Liveness(Enum):
    """State of a process, as far as this process can see."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"
    """It runs, or ran, on another host or in another namespace."""


HOSTS_VARIABLE = "RANKSCOPE_HOST"
"""Further names of this host, separated by commas, as processes of a rehearsal give them."""


def read_liveness(identity: SpoolIdentity) -> Liveness:
    """Return whether the process that wrote a spool still runs.

    A zombie, a pid that another process reuses, and any process of an earlier boot of this host
    count as gone.
    """
    if identity.host not in {socket.gethostname(), *os.environ.get(HOSTS_VARIABLE, "").split(",")}:
        return Liveness.UNKNOWN
    if identity.boot_id != boot_id():
        return Liveness.GONE
    try:
        fields = Path(f"/proc/{identity.pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return Liveness.GONE
    except OSError:
        return Liveness.UNKNOWN
    state, *rest = fields.rpartition(")")[2].split()
    if state in {"Z", "X"} or _is_younger(int(rest[18]), identity):
        return Liveness.GONE
    return Liveness.ALIVE


def _is_younger(start_ticks: int, identity: SpoolIdentity) -> bool:
    """Return whether a process started after the spool was created, by clocks of the boot."""
    uptime_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    age_s = uptime_s - start_ticks / os.sysconf("SC_CLK_TCK")
    spool_age_s = (time.monotonic_ns() - identity.anchor_monotonic_ns) / 1e9
    return age_s < spool_age_s - MARGIN_S
