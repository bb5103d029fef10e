"""Tags and notes of runs: read for pages, and changed by a page, a command or the server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from rankscope.analysis.report.text import format_time
from rankscope.analysis.trace.errors import UnknownRunError
from rankscope.collector.read.annotations import (
    Annotation,
    AnnotationKind,
    read_annotations,
    write_annotation,
)
from rankscope.dashboard.records.page_results import RunAnnotations, ShownNote

from ..errors import BadInputError
from ..sources.store_source import StoreSource
from .changes import change_router, change_stored
from .page_alerts import NOT_ALLOWED, may_change
from .reports import find_run

if TYPE_CHECKING:
    from fastapi import APIRouter

    from rankscope.collector.store.store import Store

PATH = "/v1/annotations"

MAX_TAG = 40
"""Characters of a tag: it is one of several in the cell of a table."""

MAX_NOTE = 500
MAX_OF_KIND = 100
"""Tags, or notes, of one run."""

LIMITS = {AnnotationKind.TAG: MAX_TAG, AnnotationKind.NOTE: MAX_NOTE}

Line = Annotated[str, StringConstraints(strip_whitespace=True, max_length=MAX_NOTE)]


class AnnotationChange(BaseModel):
    """A tag or a note to add to a run, or to remove."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    what: Literal["add", "remove"] = "add"
    kind: Literal["tag", "note"]
    run_id: Annotated[str, Field(min_length=1, max_length=MAX_NOTE)]
    text: Line
    by: Line = ""


def apply_annotation(store: Store, change: AnnotationChange) -> str:
    """Apply a change and return what was done, in one line.

    Raises:
        UnknownRunError: The store holds no run of this name.
        BadInputError: The text is empty, too long, or of more lines than one; a tag has a comma;
            the run has too many; or what is to be removed is not there.
    """
    kind, text = AnnotationKind(change.kind), change.text
    if not text or len(text) > LIMITS[kind] or not text.isprintable():
        raise BadInputError(f"a {kind} is one line of 1 to {LIMITS[kind]} characters")
    if kind is AnnotationKind.TAG and "," in text:
        raise BadInputError("a tag has no comma: give one tag at a time")
    find_run(StoreSource(store), change.run_id)
    stored = [one for one in read_annotations(store, change.run_id) if one.kind is kind]
    is_stored = any(one.text == text for one in stored)
    name = f'{kind} "{text}"'
    if change.what == "remove" and not is_stored:
        raise BadInputError(f"run {change.run_id!r} has no {name}: `rankscope runs` lists them")
    if change.what == "add" and not is_stored and len(stored) >= MAX_OF_KIND:
        raise BadInputError(f"run {change.run_id!r} has {MAX_OF_KIND} {kind}s: remove one first")
    annotation = Annotation(
        run_id=change.run_id, kind=kind, text=text, author=change.by, at_ns=time.time_ns()
    )
    write_annotation(store, annotation, is_removed=change.what == "remove")
    return f"{'removed' if change.what == 'remove' else 'added'} {name}: run {change.run_id}"


def annotate_stored(store_url: str, change: AnnotationChange) -> str:
    """Apply a change to a store, as `change_stored` does."""
    return change_stored(store_url, PATH, change, lambda store: apply_annotation(store, change))


def annotation_router(store: Store) -> APIRouter:
    """Return the route ``POST /v1/annotations``, for administrators."""
    return change_router(
        PATH,
        AnnotationChange.model_validate,
        lambda change: apply_annotation(store, change),
        summary="Add tags and notes to runs, or remove them",
    )


class PageAnnotations:
    """Tags and notes, as pages show and change them."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def of_run(self, run_id: str) -> RunAnnotations:
        """Return the tags and notes of a run."""
        rows = read_annotations(self._store, run_id)
        return RunAnnotations(
            tags=tuple(row.text for row in rows if row.kind is AnnotationKind.TAG),
            notes=tuple(
                ShownNote(text=row.text, author=row.author, written=format_time(row.at_ns))
                for row in rows
                if row.kind is AnnotationKind.NOTE
            ),
            may_change=may_change(),
        )

    def annotate(
        self, run_id: str, kind: Literal["tag", "note"], text: str, *, is_removed: bool = False
    ) -> str:
        """Add a tag or a note, or remove it; return what was done, or why not."""
        if not may_change():
            return NOT_ALLOWED
        what: Literal["add", "remove"] = "remove" if is_removed else "add"
        try:
            change = AnnotationChange(what=what, kind=kind, run_id=run_id, text=text, by="the page")
            return apply_annotation(self._store, change)
        except ValidationError:
            return f"a {kind} is one line of 1 to {LIMITS[AnnotationKind(kind)]} characters"
        except (BadInputError, UnknownRunError) as error:
            return str(error)
