"""Reads of a run's rows: each once, and spans from the table that has them now.

Cuts that the ledger calls ``repeated`` may be stored twice. Spans of past days are dropped; those
of steps around findings, and of imported traces, are moved to ``kept_spans`` before. The table
``expired`` says up to which step of an epoch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..identity import Row
    from .store import Store

Found = TypeVar("Found")

EpochSteps = tuple[int, int, tuple[tuple[int, int], ...]]
"""An epoch, its last expired step, and the ranges of steps whose spans are kept."""

SELECT_STATE = """
SELECT
    (SELECT sum(num_repeated) FROM run_totals WHERE run_id = {run_id:String}) AS num_repeated,
    (
        SELECT arraySort(groupArray((epoch, last_step, arrayZip(kept_first, kept_last))))
        FROM expired FINAL WHERE run_id = {run_id:String}
    ) AS expired
"""

FROM_SPANS = re.compile(r"\bFROM spans\b(?: FINAL)?(?: AS spans)?")

ALL_SPANS = """FROM (
    SELECT * FROM spans{final} WHERE run_id = {{run_id:String}} AND (
        step > transform(epoch, {epochs}, {lasts}, toInt32(-2))
        OR step < 0 AND NOT has({moved}, epoch)
    )
    UNION ALL
    SELECT * FROM kept_spans FINAL WHERE run_id = {{run_id:String}}
        AND arrayExists(kept -> kept.1 = epoch AND step >= kept.2 AND step <= kept.3, {kept})
) AS spans"""

OUTSIDE_STEPS = -1
"""Step of spans outside any step. They are kept of imported traces only."""


@dataclass(frozen=True, slots=True)
class StoredSpans:
    """Tables of the spans of a run, and whether some may be stored twice."""

    has_repeated: bool
    expired: tuple[EpochSteps, ...]

    def rewrite(self, statement: str) -> str:
        """Return a statement on ``spans`` of a run as one on all tables that have them.

        Args:
            statement: Reads ``spans`` and binds ``run_id``.
        """
        if not self.expired:
            return statement
        kept = [(epoch, first, last) for epoch, _, ranges in self.expired for first, last in ranges]
        moved = [epoch for epoch, first, _ in kept if first == OUTSIDE_STEPS]
        epochs = [epoch for epoch, _, _ in self.expired]
        lasts = [last for _, last, _ in self.expired]
        texts = {
            "epochs": f"{epochs}::Array(Int32)",
            "lasts": f"{lasts}::Array(Int32)",
            "moved": f"{moved}::Array(Int32)",
            "kept": f"{kept}::Array(Tuple(Int32, Int32, Int32))",
        }
        return FROM_SPANS.sub(
            lambda found: ALL_SPANS.format(final=" FINAL" if " FINAL" in found[0] else "", **texts),
            statement,
        )


def read_stored_spans(store: Store, run_id: str) -> StoredSpans:
    """Return where the spans of a run are now."""
    (state,) = store.rows(SELECT_STATE, {"run_id": run_id})
    return StoredSpans(
        has_repeated=bool(state["num_repeated"]),
        expired=tuple(
            (epoch, last, tuple((first, end) for first, end in kept))
            for epoch, last, kept in state["expired"]
        ),
    )


def read_deduplicated(
    store: Store,
    read: Callable[[str, Row], Found],
    statement: str,
    bound: Row,
    *,
    final: str | None = None,
) -> Found:
    """Read rows of a run, each once, and remove duplicates only if there may be any.

    A repetition is recorded before its rows are inserted, and a move before rows are dropped, so
    one that happens during the read is found afterwards.

    Args:
        read: Runs a statement with bound values and returns its result.
        statement: Reads the rows as they are stored.
        bound: The bound values, ``run_id`` among them.
        final: Statement that reads the same without duplicates, which takes longer; None:
            duplicates do not change the result of the first one.
    """
    run_id = bound["run_id"]
    state = read_stored_spans(store, run_id)
    while True:
        chosen = final if final is not None and state.has_repeated else statement
        found = read(state.rewrite(chosen), bound)
        before, state = state, read_stored_spans(store, run_id)
        if state == before:
            return found
