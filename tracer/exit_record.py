"""How a process ended: `exit.json`, the last thing it writes. `kill -9` leaves none."""

from __future__ import annotations

import contextlib
import json
import traceback
from typing import TYPE_CHECKING

from tracer.plain import plain_text, type_name
from tracer.spool import EXIT_FILE

if TYPE_CHECKING:
    from pathlib import Path

MAX_MESSAGE = 4_000
MAX_TRACEBACK = 64_000
MAX_FRAMES = 200


def ended(at_ns: int) -> dict[str, object]:
    """Return the record of a process that said goodbye at ``at_ns`` (Unix ns)."""
    return {"state": "ended", "at_ns": at_ns}


def failed(exc: BaseException, at_ns: int) -> dict[str, object]:
    """Return the record of a process that ``exc`` killed at ``at_ns`` (Unix ns)."""
    return {
        "state": "failed",
        "at_ns": at_ns,
        "exception": {
            "type": _qualified_name(exc),
            "message": _message(exc),
            "traceback": _traceback(exc),
        },
    }


def write_exit(folder: Path, record: dict[str, object]) -> None:
    """Write the record by rename, so that a reader sees all of it or none."""
    with contextlib.suppress(OSError):
        write_json(folder / EXIT_FILE, record)


def write_json(path: Path, document: object) -> None:
    """Write a document by rename, so that a reader sees all of it or none.

    Raises:
        OSError: The file could not be written; a former one still stands.
    """
    fresh = path.with_name(f".{path.name}.new")
    with fresh.open("w", encoding="utf-8") as file:
        json.dump(document, file, ensure_ascii=True)
        file.write("\n")
    fresh.replace(path)


def _qualified_name(exc: BaseException) -> str:
    module = type.__dict__["__module__"].__get__(type(exc))
    name = type_name(exc)
    return name if module == "builtins" else f"{module}.{name}"[:500]


def _message(exc: BaseException) -> str:
    # Here, and only here, the job's own __str__ runs: the process is dying and
    # the interpreter is about to call it anyway to print the traceback.
    try:
        text = plain_text(str(exc)) or ""
    except Exception:  # noqa: BLE001 - whatever a foreign __str__ does
        text = "<the message could not be read>"
    return _clean(text[:MAX_MESSAGE])


def _traceback(exc: BaseException) -> str:
    if not issubclass(type(exc), BaseException):
        return ""  # what a job hands to `record_exception` may be anything
    try:
        lines = traceback.format_exception(exc, limit=MAX_FRAMES)
    except Exception:  # noqa: BLE001 - the same, from any exception of the chain
        lines = traceback.format_tb(exc.__traceback__, limit=MAX_FRAMES)
    return _clean("".join(lines)[-MAX_TRACEBACK:])


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
