"""What the store knows of ranks that said a moment ago that they live."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collector.store import Row, Store

SELECT_NEWEST = """
SELECT rank, host, max(at_ns) AS newest_ns, argMax(epoch, (at_ns, pid)) AS epoch,
    argMax(address, (at_ns, pid)) AS address, argMax(pod, (at_ns, pid)) AS pod,
    argMax(hardware, (at_ns, pid)) AS hardware, argMax(state, (at_ns, pid)) AS state,
    argMax(step, (at_ns, pid)) AS step
FROM heartbeats WHERE run_id = {run_id:String} GROUP BY rank, host ORDER BY rank, host
"""


def newest_heartbeats(store: Store, run_id: str) -> list[Row]:
    """Return the last heartbeat of each rank on each host, by rank.

    A rank that was moved comes once a host. ``newest_ns`` is Unix time by the collector's clock.
    """
    return store.rows(SELECT_NEWEST, {"run_id": run_id})
