"""Whether a traced process of this host still runs."""

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
"""How much younger than its spool a process must be to be another one under its number:
``/proc`` counts in ticks of 10 ms."""


@cache
def boot_id() -> bytes:
    """Return this boot's id, 16 bytes; zeros where the system has none."""
    try:
        return bytes.fromhex(BOOT_ID_FILE.read_text(encoding="ascii").strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


class Liveness(Enum):
    """What is known of a process."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"
    """It runs, or ran, where this process can't look."""


def read_liveness(identity: SpoolIdentity) -> Liveness:
    """Return whether the process that wrote this spool still runs.

    A zombie, and another process under the same number, count as gone; so does
    every process of an earlier boot of this host.
    """
    if identity.host != socket.gethostname():
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
    """Return whether a process began after the spool did; neither age knows the wall clock."""
    uptime_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    age_s = uptime_s - start_ticks / os.sysconf("SC_CLK_TCK")
    spool_age_s = (time.monotonic_ns() - identity.anchor_monotonic_ns) / 1e9
    return age_s < spool_age_s - MARGIN_S
