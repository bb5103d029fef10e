"""Notes about incidents, by a page, by a command, or by the server with the store."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from rankscope.collector.read.findings import read_findings
from rankscope.collector.read.incidents import (
    MAX_AUTHOR_CHARS,
    MAX_NOTE_CHARS,
    Note,
    write_note,
)

from ..errors import BadInputError
from .changes import change_router, change_stored

if TYPE_CHECKING:
    from fastapi import APIRouter

    from rankscope.collector.store.store import Store

PATH = "/v1/notes"


class NewNote(BaseModel):
    """A note about an incident."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    run_id: Annotated[str, Field(max_length=500)]
    number: Annotated[int, Field(ge=0, lt=2**31)]
    """Number of the incident in its run."""

    text: Annotated[
        str, StringConstraints(strip_whitespace=True, min_length=1, max_length=MAX_NOTE_CHARS)
    ]
    by: Annotated[str, StringConstraints(strip_whitespace=True, max_length=MAX_AUTHOR_CHARS)] = ""


def make_note(run_id: str, number: int, text: str, *, by: str) -> NewNote:
    """Return a note that can be stored.

    Raises:
        BadInputError: The text is empty or too long, or the author's name is too long.
    """
    try:
        return NewNote(run_id=run_id, number=number, text=text, by=by)
    except ValidationError as error:
        raise BadInputError(
            f"a note has 1 to {MAX_NOTE_CHARS:,} characters, and a name at most"
            f" {MAX_AUTHOR_CHARS}: this one has {len(text):,} and {len(by):,}"
        ) from error


def add_note(store: Store, note: NewNote) -> str:
    """Store a note, and return what was done in one line.

    Raises:
        BadInputError: There is no such incident.
        StoreError: The store could not be written.
    """
    numbers = [finding.number for finding in read_findings(store, note.run_id)]
    if note.number not in numbers:
        raise BadInputError(
            f"run {note.run_id!r} has no incident {note.number}: `rankscope findings` lists them"
        )
    stored = Note(at_ns=time.time_ns(), by=note.by, text=note.text)
    write_note(store, note.run_id, note.number, stored)
    return f"noted about incident {note.number} of run {note.run_id}"


def note_incident(store_url: str, note: NewNote) -> str:
    """Store a note in a store, as `change_stored` does."""
    return change_stored(store_url, PATH, note, lambda store: add_note(store, note))


def note_router(store: Store) -> APIRouter:
    """Return the route ``POST /v1/notes``, for administrators."""
    return change_router(
        PATH,
        NewNote.model_validate,
        lambda note: add_note(store, note),
        summary="Add a note to an incident",
    )
