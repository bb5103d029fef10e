"""Which runs are said to be running though nothing has been heard of them for long.

A job whose hosts all went down, or whose collector never came back, says no goodbye: the last that
the store was told is that it runs. Such a run is shown as ``lost``, as one is whose processes
were seen to be gone, until rows or heartbeats of it come again. Nothing is written for that.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..spool.descriptions import LOST, RUNNING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..identity import Row
    from ..store.store import Store

SILENCE_NS = 15 * 60 * 1_000_000_000
"""Of every rank's spans and heartbeats. Heartbeats come once a second while one process of the run
lives, whatever it does; agents that can't reach a collector bring them later, and the longest
outage that is planned for is 10 minutes (fault C1)."""

OWN_FORMAT = "rankscope"

SELECT_HEARD = """
SELECT run_id, max(at_ns) AS heard_ns FROM heartbeats
WHERE run_id IN {run_ids:Array(String)} GROUP BY run_id
"""


def with_lost(
    store: Store, rows: Iterable[Row], *, unix_ns: Callable[[], int] = time.time_ns
) -> list[Row]:
    """Return rows of runs, the state of silent ones changed to ``lost``.

    Args:
        store: Where the heartbeats are; asked only for runs whose spans are silent.
        rows: With ``run_id, source_format, state``, and ``heard_ns``: Unix time of the last that
            the collector stored of the run, taken out of what is returned.
        unix_ns: Clock that silence is measured by.
    """
    found = [dict(row) for row in rows]
    before_ns = unix_ns() - SILENCE_NS
    heard = {row["run_id"]: row.pop("heard_ns") or 0 for row in found}
    silent = [
        row
        for row in found
        if row["state"] == RUNNING
        and row["source_format"] == OWN_FORMAT
        and heard[row["run_id"]] <= before_ns
    ]
    if silent:
        asked = {"run_ids": [row["run_id"] for row in silent]}
        beats = {row["run_id"]: row["heard_ns"] for row in store.rows(SELECT_HEARD, asked)}
        for row in silent:
            if beats.get(row["run_id"], 0) <= before_ns:
                row["state"] = LOST
    return found


class SilenceWatch:
    """Tells for how long this process has heard nothing of a run, whatever the wall clock did.

    Retention trusts no wall clock with a run that may live: one that jumps by 40 days would
    make every run look silent.

    Args:
        monotonic_ns: Clock of this process.
    """

    def __init__(self, *, monotonic_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._monotonic_ns = monotonic_ns
        self._heard: dict[str, tuple[int, int]] = {}

    def is_silent(self, run_id: str, heard_ns: int) -> bool:
        """Return whether ``heard_ns`` has stayed the same for `SILENCE_NS` of this process' time.

        Args:
            run_id: The run.
            heard_ns: Unix time of the last that was heard of it, as the store has it now.
        """
        now_ns = self._monotonic_ns()
        last_ns, since_ns = self._heard.get(run_id, (None, now_ns))
        if last_ns != heard_ns:
            since_ns = now_ns
        self._heard[run_id] = (heard_ns, since_ns)
        return now_ns - since_ns >= SILENCE_NS
