"""Reads of rows that the ledger says may be stored twice."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from .store import Store

Found = TypeVar("Found")

COUNT_REPEATED = """
SELECT count() AS num_repeated FROM ledger
WHERE run_id = {run_id:String} AND state = 'repeated'
"""


def has_repeated_cuts(store: Store, run_id: str) -> bool:
    """Return whether the ledger has a cut of this run whose rows may be stored twice."""
    return bool(store.rows(COUNT_REPEATED, {"run_id": run_id})[0]["num_repeated"])


def read_deduplicated(
    store: Store, run_id: str, read: Callable[[str], Found], *, plain: str, final: str
) -> Found:
    """Read rows of a run, each once, and remove duplicates only if there may be any.

    A repetition is recorded before its rows are inserted, so one that happens during the plain
    read is found afterwards.

    Args:
        store: The store.
        run_id: The run.
        read: Runs a statement and returns its result.
        plain: Statement that reads the rows as they are stored.
        final: Statement that reads the same without duplicates, which takes longer.
    """
    if not has_repeated_cuts(store, run_id):
        found = read(plain)
        if not has_repeated_cuts(store, run_id):
            return found
    return read(final)
