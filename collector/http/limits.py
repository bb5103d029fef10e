"""Limits and deadlines of connections."""

from __future__ import annotations

import resource
from dataclasses import dataclass, fields

MAX_CONNECTIONS = 4096
"""Connections of all clients. A job of 12,288 ranks has 1,536 hosts, with one agent each."""

MAX_CONNECTIONS_PER_ADDRESS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Deadlines and limits of connections. All are above 0."""

    max_connections: int = MAX_CONNECTIONS
    max_connections_per_address: int = MAX_CONNECTIONS_PER_ADDRESS
    handshake_s: float = 10.0
    """Timeout of the TLS handshake."""

    header_s: float = 10.0
    """Timeout from the first byte of a connection or request to the end of its header."""

    max_header_bytes: int = 32 * 2**10
    body_window_s: float = 10.0
    min_body_bytes_per_s: int = 1024
    """Minimum rate of a body in each window, while the server reads."""

    reader_window_s: float = 30.0
    min_reader_bytes_per_s: int = 1024
    """Minimum rate at which a client reads an answer, in each window."""

    linger_s: float = 5.0
    """Time for which the rest of a body is discarded after the answer. Closing at once would
    reset the connection, and the client could lose the answer."""

    max_linger_bytes: int = 64 * 2**20
    keep_alive_s: float = 15.0
    """Timeout between two requests of a connection."""

    sweep_s: float = 1.0
    """Pause between two checks of all connections."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"ConnectionLimits.{field.name} must be above 0, not {value}")


def fit_connections(wanted: int = MAX_CONNECTIONS) -> int:
    """Raise the limit of open files towards its hard limit; return how many connections fit.

    Half of the files are for connections: the store and the spool need the others.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < hard:
        enough = 4 * wanted
        soft = max(soft, enough if hard == resource.RLIM_INFINITY else min(hard, enough))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(wanted, soft // 2))
