"""The thread that stores the heartbeats of this host's ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .loops import Loop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.collector.agent.buffer import RowBuffer
    from rankscope.collector.retention.deletion import Deletions
    from rankscope.collector.store.store import Row, Store

PAUSE_S = 1.0
NUM_AT_ONCE = 10_000


def beat_loop(store: Store, buffer: RowBuffer, deletions: Deletions) -> Loop:
    """Return the loop that stores what a buffer holds; where the store fails it still waits there.

    Args:
        store: The open store.
        buffer: Rows of table ``heartbeats``.
        deletions: A deleted run that still trains is kept out.
    """

    def write(rows: Sequence[Row]) -> None:
        kept = [row for row in rows if not deletions.is_deleted(row["run_id"])]
        if kept:
            store.insert_rows("heartbeats", kept)

    return Loop("heartbeats", lambda: buffer.ship(write, num_at_once=NUM_AT_ONCE), pause_s=PAUSE_S)
