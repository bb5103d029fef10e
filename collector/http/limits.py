"""How long and how many: what one client may take of the server."""

from __future__ import annotations

import resource
from dataclasses import dataclass, fields

MOST_CONNECTIONS = 4096
"""Of all visitors; 1,536 hosts of eight devices are 12,288 ranks, and one agent a host."""

MOST_FROM_ONE_ADDRESS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Deadlines and caps of connections; all are above 0."""

    max_connections: int = MOST_CONNECTIONS
    max_connections_per_address: int = MOST_FROM_ONE_ADDRESS
    handshake_s: float = 10.0
    """For TLS to be agreed on."""

    header_s: float = 10.0
    """From a connection's or a request's first byte to the end of its header."""

    max_header_bytes: int = 32 * 2**10
    body_window_s: float = 10.0
    min_body_bytes_per_s: int = 1024
    """In each window, while the server is willing to read."""

    reader_window_s: float = 30.0
    min_reader_bytes_per_s: int = 1024
    """In each window, while an answer waits to be taken."""

    linger_s: float = 5.0
    """How long the rest of a body is thrown away after its answer, so that the answer is read:
    closing at once would reset the connection under it."""

    max_linger_bytes: int = 64 * 2**20
    keep_alive_s: float = 15.0
    """Between two requests of one connection."""

    sweep_s: float = 1.0
    """Between two looks at every connection."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"ConnectionLimits.{field.name} must be above 0, not {value}")


def fit_connections(wanted: int = MOST_CONNECTIONS) -> int:
    """Allow this process its hard limit of open files; return how many connections fit.

    Half of them: the store's files and the spool's segments need the others.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or soft < hard:
        enough = 4 * wanted
        soft = max(soft, enough if hard == resource.RLIM_INFINITY else min(hard, enough))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return max(1, min(wanted, soft // 2))
