"""Tags and notes of runs: their changes, limits and route, and what pages get."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from fastapi import FastAPI

from rankscope.analysis.trace.errors import UnknownRunError
from rankscope.collector.read.annotations import read_annotations
from rankscope.errors import BadInputError
from rankscope.server.annotations import (
    MAX_NOTE,
    MAX_OF_KIND,
    MAX_TAG,
    AnnotationChange,
    PageAnnotations,
    annotation_router,
    apply_annotation,
)
from rankscope.server.page_alerts import NOT_ALLOWED
from rankscope.sources.stored_reports import read_run_lines
from tests.support.collector.asgi import Client
from tests.support.rankscope.rollup_runs import describe, new_number

if TYPE_CHECKING:
    from typing import Literal

    from rankscope.collector.store.store import Store

pytestmark = pytest.mark.slow


@pytest.fixture
def run(store: Store) -> str:
    """Return the name of a run of the store."""
    run_id = f"annotated-{new_number()}"
    describe(store, run_id)
    return run_id


def change(
    run: str, kind: Literal["tag", "note"], text: str, *, what: Literal["add", "remove"] = "add"
) -> AnnotationChange:
    return AnnotationChange(what=what, kind=kind, run_id=run, text=text, by="ada")


def test_tags_and_notes_are_added_once_and_removed(store: Store, run: str) -> None:
    for _ in range(2):
        assert (
            apply_annotation(store, change(run, "tag", " prod ")) == f'added tag "prod": run {run}'
        )
    apply_annotation(store, change(run, "tag", "late"))
    apply_annotation(store, change(run, "note", "drained node-3, see ticket 7"))

    page = PageAnnotations(store).of_run(run)
    (line,) = (line for line in read_run_lines(store) if line.run.run_id == run)
    assert page.tags == line.tags == ("late", "prod")
    assert [(note.text, note.author) for note in page.notes] == [
        ("drained node-3, see ticket 7", "ada")
    ]
    assert not page.may_change  # outside of a request

    apply_annotation(store, change(run, "tag", "late", what="remove"))
    assert [one.text for one in read_annotations(store, run) if one.kind == "tag"] == ["prod"]


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("tag", "a" * (MAX_TAG + 1), f"one line of 1 to {MAX_TAG} characters"),
        ("tag", "a,b", "no comma"),
        ("tag", " ", "1 to"),
        ("note", "first\nsecond", "one line"),
        ("note", "\u202eevil", "one line"),
    ],
)
def test_a_text_that_is_no_tag_or_note_is_refused(
    store: Store, run: str, kind: Literal["tag", "note"], text: str, words: str
) -> None:
    with pytest.raises(BadInputError, match=words):
        apply_annotation(store, change(run, kind, text))
    assert read_annotations(store, run) == ()


def test_what_is_not_there_and_too_many_are_refused(store: Store, run: str) -> None:
    with pytest.raises(UnknownRunError):
        apply_annotation(store, change("no such run", "tag", "prod"))
    with pytest.raises(BadInputError, match='has no tag "prod"'):
        apply_annotation(store, change(run, "tag", "prod", what="remove"))
    rows = [
        {"run_id": run, "kind": "tag", "text": f"tag {number}", "at_ns": 1}
        for number in range(MAX_OF_KIND)
    ]
    store.insert_rows("annotations", rows)
    with pytest.raises(BadInputError, match="remove one first"):
        apply_annotation(store, change(run, "tag", "one more"))
    apply_annotation(store, change(run, "tag", "tag 0"))


def test_the_route_changes_them_and_a_page_that_may_not_says_so(store: Store, run: str) -> None:
    app = FastAPI()
    app.include_router(annotation_router(store))
    client = Client(app)
    body = {"kind": "tag", "run_id": run, "text": "prod"}

    statuses = [
        client.post("/v1/annotations", json=each).status_code
        for each in (body, body | {"run_id": "gone"}, body | {"text": "x" * (MAX_NOTE + 1)})
    ]

    assert statuses == [200, 404, 422]
    assert PageAnnotations(store).of_run(run).tags == ("prod",)
    assert PageAnnotations(store).annotate(run, "tag", "more") == NOT_ALLOWED
