"""Notes about incidents, by a page, by a command, or by the server with the store."""

from __future__ import annotations

import json
import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from rankscope.collector.errors import StoreHeldError
from rankscope.collector.read.findings import read_findings
from rankscope.collector.read.incidents import (
    MAX_AUTHOR_CHARS,
    MAX_NOTE_CHARS,
    Note,
    write_note,
)
from rankscope.collector.store.location import read_server_file
from rankscope.collector.store.store import open_store

from ..errors import BadInputError
from .holder import ask_holder, refusal

if TYPE_CHECKING:
    from fastapi import APIRouter

    from rankscope.collector.store.store import Store

PATH = "/v1/notes"
TIMEOUT_S = 60


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
    """Store a note in a store, through the server that holds it if there is one.

    Raises:
        BadInputError: There is no such incident.
        FailedError: The server that holds the store did not answer, or refused.
        StoreError: The store could not be opened or written.
    """
    try:
        with open_store(store_url) as store:
            return add_note(store, note)
    except StoreHeldError as held:
        server = read_server_file(held.path)
        if server is None or server.token is None:
            raise
    answer = ask_holder(server, "POST", PATH, timeout_s=TIMEOUT_S, body=note.model_dump_json())
    if answer.status == HTTPStatus.NOT_FOUND:
        raise BadInputError(str(json.loads(answer.body)["detail"]))
    if answer.status != HTTPStatus.OK:
        raise refusal(server, answer)
    return str(json.loads(answer.body)["done"])


def note_router(store: Store) -> APIRouter:
    """Return the route ``POST /v1/notes``, for administrators."""
    from fastapi import APIRouter, Body, HTTPException

    router = APIRouter(tags=["incidents"])

    # Not async: the store blocks, so FastAPI runs it in a thread.
    def add(body: Annotated[dict[str, object], Body()]) -> dict[str, str]:
        try:
            return {"done": add_note(store, NewNote.model_validate(body))}
        except ValidationError as error:
            raise HTTPException(422, f"{error.error_count()} wrong values") from error
        except BadInputError as error:
            raise HTTPException(404, str(error)) from error

    add.__annotations__ = {
        "body": Annotated[dict[str, object], Body()],
        "return": dict[str, str],
    }
    # Only now: FastAPI reads the annotations here, and cannot resolve the text of local names.
    router.post(PATH, summary="Add a note to an incident")(add)
    return router
