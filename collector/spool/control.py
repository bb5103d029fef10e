"""Requests to running ranks, in the control files that their processes read once a second."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankscope.tracer.spool import (
    CONTROL_FILE,
    MAX_CONTROL_BYTES,
    MAX_REQUESTED_STEPS,
    REQUEST_KEYS,
)

from ..errors import CollectorError
from ..identity import check_run_name
from .folder import open_spool_file, replace_spool_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from .process import ProcessFiles

ACCEPTED, DONE, REFUSED = "accepted", "done", "refused"
"""States in the answers of a rank."""

MAX_RANKS = 65_536
MAX_BY_CHARS = 100
NAME = re.compile(r"[0-9a-z]{1,32}")


class ControlRequestError(CollectorError):
    """A request to ranks that is not valid; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRequest:
    """Something to record in the next steps of some ranks."""

    run_id: str
    name: str
    """Distinguishes it from other requests; the ranks repeat it in their answers."""

    level: str
    """Key of the control file: `REQUEST_KEYS`."""

    steps: int
    """Number of steps."""

    ranks: tuple[int, ...] = ()
    """Global ranks; empty: all."""

    by: str = ""
    """User who made it."""

    def __post_init__(self) -> None:
        check_run_name(self.run_id)
        if NAME.fullmatch(self.name) is None:
            raise ControlRequestError(f"the name {self.name!r} is no word of 1 to 32 letters")
        if self.level not in REQUEST_KEYS:
            raise ControlRequestError(f"level {self.level!r}: give {', '.join(REQUEST_KEYS)}")
        if not 1 <= self.steps <= MAX_REQUESTED_STEPS:
            raise ControlRequestError(f"{self.steps} steps: give 1 to {MAX_REQUESTED_STEPS}")
        if len(self.ranks) > MAX_RANKS or any(rank < 0 for rank in self.ranks):
            raise ControlRequestError(f"give at most {MAX_RANKS:,} ranks, each 0 or more")
        if len(self.by) > MAX_BY_CHARS:
            raise ControlRequestError(f"a user's name has at most {MAX_BY_CHARS} letters")

    def concerns(self, rank: int) -> bool:
        """Return whether it is for a rank."""
        return not self.ranks or rank in self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlAnswer:
    """Answer of a rank to a request, in an event."""

    rank: int
    state: str
    """`ACCEPTED`, `DONE` or `REFUSED`."""

    text: str
    data: Mapping[str, Any]
    """Document of the event: of a profile the ``path`` of its file below the spool, of stacks the
    ``threads``."""


def read_control_request(document: object) -> ControlRequest:
    """Return the request of a JSON document.

    Raises:
        ControlRequestError: It is none.
        RunNameError: Its run has no valid name.
    """
    if not isinstance(document, dict) or not _TYPES.keys() >= document.keys() >= _NEEDED:
        raise ControlRequestError(f"a request has the keys {', '.join(_TYPES)}")
    values = dict(document)
    for key, value in document.items():
        if key == "ranks" and isinstance(value, list):
            values[key] = tuple(value)
        if type(values[key]) is not _TYPES[key]:
            raise ControlRequestError(f"{key} must be {_TYPES[key].__name__}")
    if any(type(rank) is not int for rank in values.get("ranks", ())):
        raise ControlRequestError("ranks must be whole numbers")
    return ControlRequest(**values)


_TYPES = {"run_id": str, "name": str, "level": str, "steps": int, "ranks": tuple, "by": str}
_NEEDED = {"run_id", "name", "level", "steps"}


def request_ranks(processes: Iterable[ProcessFiles], request: ControlRequest) -> list[int]:
    """Write a request into the control files of the processes that it concerns.

    Other keys of the files are kept.

    Args:
        processes: Running processes of a spool.

    Returns:
        The ranks whose files were written, ascending.

    Raises:
        OSError: A file can't be written.
    """
    written = []
    for files in processes:
        rank = files.identity.rank
        if files.run_id != request.run_id or not request.concerns(rank):
            continue
        path = files.folder / CONTROL_FILE
        document = _read_control(path)
        document[request.level] = {"steps": request.steps, "request": request.name}
        replace_spool_file(path, json.dumps(document).encode())
        written.append(rank)
    return sorted(written)


class ControlWriter:
    """Writes each request once."""

    def __init__(self, *, say: Callable[[str], None]) -> None:
        self._say = say
        self._written: set[str] = set()

    def write(self, processes: Sequence[ProcessFiles], requests: Iterable[ControlRequest]) -> None:
        """Write the new ones of some requests for the processes that they concern."""
        for request in requests:
            if request.name in self._written:
                continue
            self._written.add(request.name)
            try:
                ranks = request_ranks(processes, request)
            except OSError as error:
                self._say(f"run {request.run_id}: {CONTROL_FILE} can't be written: {error}")
                continue
            if ranks:
                names = ", ".join(map(str, ranks))
                self._say(f"run {request.run_id}: {request.level} requested of ranks {names}")


def find_answer(row: Mapping[str, Any], name: str) -> ControlAnswer | None:
    """Return the answer to a request in an event; None if it is none.

    Args:
        row: The event: ``rank``, ``text``, and ``data`` as JSON or as an object.
    """
    data = row["data"]
    try:
        data = json.loads(data) if isinstance(data, str) else data
    except ValueError:
        return None
    if not isinstance(data, dict) or data.get("request") != name or "state" not in data:
        return None
    return ControlAnswer(
        rank=row["rank"],
        state=str(data["state"]),
        text=str(row["text"]),
        data=data,
    )


def _read_control(path: Path) -> dict[str, Any]:
    """Return the object of a control file; an empty one if it is missing or not valid."""
    try:
        with os.fdopen(open_spool_file(path), "rb") as file:
            document = json.loads(file.read(MAX_CONTROL_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}
