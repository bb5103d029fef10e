"""Notes about findings, and what is stored of the time before an onset."""

from __future__ import annotations

import json
import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.tracer.span import NONE

from ..store.deduplicated_reads import read_deduplicated
from .alerts import WRITER

if TYPE_CHECKING:
    from ..identity import Row
    from ..store.store import Store

NOTE_KIND = "alert-note"
"""Kind of the events that notes are. As of alerts, no job can write one (`bounds.OWN_KINDS`)."""

MAX_NOTE_CHARS = 2_000
MAX_AUTHOR_CHARS = 100
MAX_NOTES = 200
"""Notes of one finding that are read, the newest."""

ROUTINE_KINDS = (
    "alert", "clock", "device-time", "import-note", "invalid-description", "pace", "profile",
    "stack", "stalled", "steps-counted", "tracer",
)  # fmt: skip
"""Begins of the kinds of events that change nothing in a job."""

SELECT_NOTES = """
SELECT at_ns, text, data FROM events FINAL
WHERE run_id = {run_id:String} AND epoch = -1 AND kind = {kind:String} AND line = {number:Int64}
ORDER BY at_ns DESC LIMIT {most:UInt32}
"""

SELECT_INCARNATIONS = """
SELECT epoch, state, first_step, last_step, begin_ns FROM (
    SELECT epoch, min(step) AS first_step, max(step) AS last_step, min(start_ns) AS begin_ns
    FROM steps WHERE run_id = {run_id:String} AND step >= 0 GROUP BY epoch
) AS stepped
LEFT JOIN (
    SELECT epoch, state FROM runs FINAL WHERE run_id = {run_id:String}
) AS known USING epoch
ORDER BY epoch
"""

SELECT_CHECKPOINTS = """
SELECT step, uniqExact(rank) AS num_ranks, max(duration_ns) AS longest_ns
FROM spans
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32}
    AND step >= {first:Int32} AND step <= {last:Int32} AND kind = 'checkpoint'
GROUP BY step ORDER BY step
"""

SELECT_EVENTS = """
SELECT kind, min(at_ns) AS first_ns, count() AS num, argMin(text, at_ns) AS first_text,
    argMin(rank, at_ns) AS first_rank
FROM events FINAL
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32}
    AND at_ns >= {first_ns:Int64} AND at_ns <= {last_ns:Int64}
    AND NOT arrayExists(routine -> startsWith(kind, routine), {routine:Array(String)})
GROUP BY kind ORDER BY first_ns, kind
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A person's text about a finding."""

    at_ns: int
    """Unix time."""

    by: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Incarnation:
    """The recorded steps of one epoch."""

    epoch: int
    state: str
    """State of the job in it; "" if unknown."""

    first_step: int
    last_step: int
    begin_ns: int


def write_note(store: Store, run_id: str, number: int, note: Note) -> None:
    """Store a note about a finding; no other is replaced. Returns when it is on disk.

    Args:
        note: The note, within `MAX_NOTE_CHARS` and `MAX_AUTHOR_CHARS`.
    """
    row: Row = {
        "run_id": run_id,
        "epoch": NONE,
        "rank": NONE,
        "at_ns": note.at_ns,
        "kind": NOTE_KIND,
        "text": note.text,
        "data": json.dumps({"by": note.by}),
        "process": f"{WRITER}-note-{secrets.token_hex(8)}",
        "line": number,
    }
    store.insert_rows("events", [row])


def read_notes(store: Store, run_id: str, number: int) -> tuple[Note, ...]:
    """Return the notes about a finding, the newest first."""
    bound = {"run_id": run_id, "kind": NOTE_KIND, "number": number, "most": MAX_NOTES}
    notes = []
    for row in store.rows(SELECT_NOTES, bound):
        by = ""
        with suppress(ValueError, AttributeError):
            by = str(json.loads(row["data"]).get("by", ""))
        notes.append(Note(at_ns=row["at_ns"], by=by, text=row["text"]))
    return tuple(notes)


def read_incarnations(store: Store, run_id: str) -> tuple[Incarnation, ...]:
    """Return the recorded steps of each epoch of a run, by epoch."""
    return tuple(Incarnation(**row) for row in store.rows(SELECT_INCARNATIONS, {"run_id": run_id}))


def read_checkpoints(store: Store, run_id: str, *, epoch: int, first: int, last: int) -> list[Row]:
    """Return the steps with checkpoints: ``step, num_ranks, longest_ns``."""
    bound = {"run_id": run_id, "epoch": epoch, "first": first, "last": last}
    return read_deduplicated(store, store.rows, SELECT_CHECKPOINTS, bound)


def read_events_between(
    store: Store, run_id: str, *, epoch: int, first_ns: int, last_ns: int
) -> list[Row]:
    """Return the kinds of events in a time: ``kind, num, first_ns, first_text, first_rank``.

    `ROUTINE_KINDS` are left out.
    """
    bound = {"run_id": run_id, "epoch": epoch, "first_ns": first_ns, "last_ns": last_ns}
    return store.rows(SELECT_EVENTS, bound | {"routine": list(ROUTINE_KINDS)})
