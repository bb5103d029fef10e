"""How long each step of a run took, by the rows that end it: no span is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..identity import Row
    from ..store.store import Store

SELECT_STEP_TIMES = """
SELECT epoch, step, min(start_ns) AS first_ns, max(end_ns) AS last_ns, uniq(rank) AS num_ranks
FROM steps
WHERE run_id = {run_id:String}
GROUP BY epoch, step
ORDER BY epoch DESC, step DESC
LIMIT {most:UInt32}
"""


def read_step_times(store: Store, run_id: str, *, most: int) -> list[Row]:
    """Return begin and end of the newest steps over all ranks, by (epoch, step).

    Rows that lie in the store twice change nothing of it.
    """
    return store.rows(SELECT_STEP_TIMES, {"run_id": run_id, "most": most})[::-1]
