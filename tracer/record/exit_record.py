"""The record of a process's end, `exit.json`, written last. After `kill -9` there is none."""

from __future__ import annotations

import contextlib
import json
import os
import traceback
from typing import TYPE_CHECKING

from ..spool import CAUSED_BY, EXIT_FILE
from .plain_values import plain_text, type_name

if TYPE_CHECKING:
    from pathlib import Path

MAX_MESSAGE = 4_000
"""Characters of the message, half of them of its causes."""

MAX_CAUSES = 8
MAX_OF_RANKS = 64
MAX_CONTEXT = 500
"""Characters of the message of each exception in whose handler another one was raised."""

TRACEBACK = "Traceback (most recent call last):"
MAX_TRACEBACK = 64_000
MAX_FRAMES = 200
RESERVED_BYTES = 1 << 16
SHORT_TRACEBACK = 4_000
"""Characters of a traceback that are kept if the disk has only the reserved bytes left."""


def ended_record(at_ns: int) -> dict[str, object]:
    """Return the record of a process that ended normally at ``at_ns`` (Unix ns)."""
    return {"state": "ended", "at_ns": at_ns}


def failed_record(exc: BaseException, at_ns: int) -> dict[str, object]:
    """Return the record of a process that ``exc`` ended at ``at_ns`` (Unix ns)."""
    return {
        "state": "failed",
        "at_ns": at_ns,
        "exception": {
            "type": _qualified_name(exc),
            "message": _message_with_causes(exc),
            "contexts": _contexts(exc),
            "of_ranks": _exceptions_of_ranks(exc),
            "traceback": _traceback(exc),
        },
    }


def reserve_exit(folder: Path) -> None:
    """Reserve disk space for the record: on a full disk a normal end would look like a kill."""
    with contextlib.suppress(OSError):
        fd = open_for_writing(_temporary(folder / EXIT_FILE), os.O_EXCL)
        try:
            os.posix_fallocate(fd, 0, RESERVED_BYTES)
        finally:
            os.close(fd)


def write_exit(folder: Path, record: dict[str, object]) -> None:
    """Write the record, atomically by rename; with a shorter traceback if the disk is full."""
    path = folder / EXIT_FILE
    for document in (record, _shorten(record)):
        with contextlib.suppress(OSError):
            # Opened without truncation, to write into the reserved blocks.
            with os.fdopen(open_for_writing(_temporary(path), 0), "wb") as file:
                file.write(json.dumps(document).encode() + b"\n")
                file.truncate()
            _temporary(path).replace(path)
            return


def open_for_writing(path: Path, flags: int) -> int:
    """Open a file for writing, and create it if it is missing, readable by user and group only.

    Raises:
        OSError: It can't be opened, or is a link.
    """
    flags |= os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o640)


def write_json(path: Path, document: object) -> None:
    """Write a document, atomically by rename.

    Raises:
        OSError: The file could not be written; a former one remains.
    """
    temporary = _temporary(path)
    with os.fdopen(open_for_writing(temporary, os.O_TRUNC), "w", encoding="utf-8") as file:
        json.dump(document, file, ensure_ascii=True)
        file.write("\n")
    temporary.replace(path)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _shorten(record: dict[str, object]) -> dict[str, object]:
    exception = record.get("exception")
    if not isinstance(exception, dict):
        return record
    text = str(exception["traceback"])[-SHORT_TRACEBACK:]
    return {**record, "exception": {**exception, "traceback": text}}


def _qualified_name(exc: BaseException) -> str:
    module = type.__dict__["__module__"].__get__(type(exc))
    name = type_name(exc)
    return name if module == "builtins" else f"{module}.{name}"[:500]


def _message_with_causes(exc: BaseException) -> str:
    """Return the message, and below it that of each exception that it was raised from.

    A library that wraps an exception, as torch's pipelining does, says with it where it was, and
    not what happened.
    """
    causes: list[str] = []
    cause = exc.__cause__ if issubclass(type(exc), BaseException) else None
    while cause is not None and len(causes) < MAX_CAUSES:
        causes.append(f"{CAUSED_BY}{_qualified_name(cause)}: {_message(cause)}")
        cause = cause.__cause__
    text = "".join(causes)[-MAX_MESSAGE // 2 :]
    return _message(exc)[: MAX_MESSAGE - len(text)] + text


def _contexts(exc: BaseException) -> list[dict[str, str]]:
    """Return type and message of each exception in whose handler the next one was raised.

    A rank that waits for the others in the handler of an error ends with their timeout, and only
    this says that it failed first.
    """
    contexts: list[dict[str, str]] = []
    current: BaseException | None = exc if issubclass(type(exc), BaseException) else None
    for _ in range(MAX_CAUSES):
        if current is None:
            break
        cause, hides = current.__cause__, current.__suppress_context__
        current = cause if cause is not None or hides else current.__context__
        if current is not None and cause is None:
            message = _message(current)[:MAX_CONTEXT]
            contexts.append({"type": _qualified_name(current), "message": message})
    return contexts


def _exceptions_of_ranks(exc: BaseException) -> list[dict[str, object]]:
    """Return rank, type and message of each exception that ended a rank which a driver started.

    Source: Ray Train, `WorkerGroupError.worker_failures`, by rank. Each is wrapped, and its text is
    a traceback.
    """
    is_exception = issubclass(type(exc), BaseException)
    failures = vars(exc).get("worker_failures") if is_exception else None
    found: list[dict[str, object]] = []
    for rank, failure in list(failures.items())[:MAX_OF_RANKS] if type(failures) is dict else ():
        if type(rank) is int and issubclass(type(failure), BaseException):
            kind, message = _qualified_name(failure), _message(failure)
            if TRACEBACK in message:
                kind, _, message = message.rstrip().rpartition("\n")[2].partition(": ")
            found.append({"rank": rank, "type": kind, "message": message[:MAX_CONTEXT]})
    return found


def _message(exc: BaseException) -> str:
    # The only call of the job's own __str__: the process is ending, and the interpreter is about
    # to call it anyway to print the traceback.
    try:
        text = plain_text(str(exc)) or ""
    except Exception:  # noqa: BLE001 - the job's __str__ may raise anything
        text = "<the message could not be read>"
    return _clean(text[:MAX_MESSAGE])


def _traceback(exc: BaseException) -> str:
    if not issubclass(type(exc), BaseException):
        return ""  # a job may pass any object to `record_exception`
    try:
        lines = traceback.format_exception(exc, limit=MAX_FRAMES)
    except Exception:  # noqa: BLE001 - as above, for any exception of the chain
        lines = traceback.format_tb(exc.__traceback__, limit=MAX_FRAMES)
    return _clean("".join(lines)[-MAX_TRACEBACK:])


def _clean(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
