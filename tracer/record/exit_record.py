"""How a process ended: `exit.json`, the last thing it writes. `kill -9` leaves none."""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from typing import TYPE_CHECKING

from ..spool import EXIT_FILE
from .plain_values import plain_text, type_name

if TYPE_CHECKING:
    from pathlib import Path

MAX_MESSAGE = 4_000
MAX_TRACEBACK = 64_000
MAX_FRAMES = 200
RESERVED_BYTES = 1 << 16
KEPT_TRACEBACK = 4_000
"""What is kept of a traceback where the disk has room for no more than was reserved."""


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


def reserve_exit(folder: Path) -> None:
    """Claim room for the record: on a disk full by then, a good end would look like none."""
    with contextlib.suppress(OSError), _fresh(folder / EXIT_FILE).open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, RESERVED_BYTES)


def write_exit(folder: Path, record: dict[str, object]) -> None:
    """Write the record by rename, so that a reader sees all of it or none."""
    path = folder / EXIT_FILE
    for document in (record, _shortened(record)):
        with contextlib.suppress(OSError):
            # Not truncated before: the blocks that were reserved are written to.
            fd = os.open(_fresh(path), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            with os.fdopen(fd, "wb") as file:
                file.write(json.dumps(document).encode() + b"\n")
                file.truncate()
            _fresh(path).replace(path)
            return


def write_json(path: Path, document: object) -> None:
    """Write a document by rename, so that a reader sees all of it or none.

    Raises:
        OSError: The file could not be written; a former one still stands.
    """
    fresh = _fresh(path)
    with fresh.open("w", encoding="utf-8") as file:
        json.dump(document, file, ensure_ascii=True)
        file.write("\n")
    fresh.replace(path)


def _fresh(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _shortened(record: dict[str, object]) -> dict[str, object]:
    told = record.get("exception")
    if not isinstance(told, dict):
        return record
    kept = str(told["traceback"])[-KEPT_TRACEBACK:]
    return {**record, "exception": {**told, "traceback": kept}}


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
