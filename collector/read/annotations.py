"""Tags and notes that people add to runs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..store.store import Store

SELECT_ANNOTATIONS = """
SELECT run_id, kind, text, author, at_ns FROM annotations FINAL
WHERE NOT is_removed AND ({run_id:String} = '' OR run_id = {run_id:String})
ORDER BY run_id, kind, if(kind = 'tag', 0, at_ns), text
"""


class AnnotationKind(StrEnum):
    """Kind of an annotation, as stored."""

    TAG = "tag"
    """A word by which runs are filtered."""

    NOTE = "note"
    """A sentence about what was done or seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """A tag or a note of a run. Its run, kind and text are its identity."""

    run_id: str
    kind: AnnotationKind
    text: str
    author: str
    at_ns: int
    """When it was written, or removed, Unix ns."""


def write_annotation(store: Store, annotation: Annotation, *, is_removed: bool = False) -> None:
    """Store an annotation, or its removal. Returns when it is on disk."""
    store.insert_rows("annotations", [{**asdict(annotation), "is_removed": int(is_removed)}])


def read_annotations(store: Store, run_id: str = "") -> tuple[Annotation, ...]:
    """Return the annotations of a run, or of all: tags by name, then notes, the oldest first."""
    rows = store.rows(SELECT_ANNOTATIONS, {"run_id": run_id})
    return tuple(Annotation(**{**row, "kind": AnnotationKind(row["kind"])}) for row in rows)
