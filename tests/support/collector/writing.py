"""A writer that is given cuts, and what the store holds afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankscope.collector.read.runs import read_run
from rankscope.collector.store.ledger import CutState, Ledger
from rankscope.collector.store.writer import StoreWriter
from rankscope.collector.wire.codec import CutBatch

if TYPE_CHECKING:
    from rankscope.collector.identity import Row
    from rankscope.collector.spool.cut import Cut
    from rankscope.collector.store.store import Store

STORED, REPEATED = CutState.STORED, CutState.REPEATED
DUPLICATE, CONFLICT = CutState.DUPLICATE, CutState.CONFLICT


def put(writer: StoreWriter, *cuts: Cut) -> list[CutState]:
    return [state for (state,) in writer.store([CutBatch.from_cut(cut) for cut in cuts])]


def names(first: int, end: int) -> list[str]:
    return sorted(f"s{row}" for row in range(first, end))


def in_engine(store: Store, run_id: str) -> int:
    bound = {"r": run_id}
    copies = "SELECT count() AS n FROM spans WHERE run_id = {r:String} SETTINGS final = 0"
    return int(store.rows(copies, bound)[0]["n"])


def counted(store: Store, run_id: str) -> int:
    return sum(int(row["num_spans"]) for row in read_run_account(store, run_id))


def read_run_account(store: Store, run_id: str) -> list[Row]:
    store.insert_rows("runs", [{"run_id": run_id, "epoch": 0, "state": "running", "revision": 1}])
    return read_run(store, run_id).account


def other_collector(store: Store) -> StoreWriter:
    """Return the writer of a collector in another process on the same store."""
    return StoreWriter(store, ledger=Ledger(store, is_shared=True))
