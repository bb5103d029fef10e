"""Which ranks of a run are heard of, from the heartbeats of its store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.analysis.report.liveness import MAX_SHOWN, RECENT_NS, SILENT_NS, Heard, SilentRank
from rankscope.collector.read.heartbeats import longest_unheard

if TYPE_CHECKING:
    from rankscope.collector.store.store import Store


def read_heard(store: Store, run_id: str, *, now_ns: int) -> Heard | None:
    """Return how many ranks of a run are heard of; None where nobody tells of any.

    Args:
        store: The store.
        run_id: The run.
        now_ns: Unix time by the collector's clock.
    """
    rows = longest_unheard(
        store,
        run_id,
        recent_ns=now_ns - RECENT_NS,
        silent_ns=now_ns - SILENT_NS,
        most=MAX_SHOWN,
    )
    if not rows:
        return None
    return Heard(
        num_ranks=rows[0]["num_ranks"],
        num_recent=rows[0]["num_recent"],
        num_silent=rows[0]["num_silent"],
        silent=tuple(
            SilentRank(
                rank=row["rank"],
                host=row["host"],
                state=row["state"],
                step=row["step"] if row["step"] >= 0 else None,
                age_ns=now_ns - row["newest_ns"],
            )
            for row in rows
            if row["newest_ns"] < now_ns - SILENT_NS
        ),
    )
