"""The control files, by which an operator changes a run's recording without a restart.

They also hold requests: something to record in some steps of some ranks.
"""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..spool import CONTROL_FILE, MAX_CONTROL_BYTES, MAX_REQUESTED_STEPS, read_regular_file
from .plain_values import plain_copy, plain_int, type_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Handler = Callable[[Mapping[str, object]], None]


DEFAULT_STEPS = 3
MAX_RANK = 2**32 - 1


class ControlError(Exception):
    """A control file cannot be used."""


class RequestError(Exception):
    """A request of a control file that is not valid; the message names its key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request under a key of the control files."""

    num_steps: int = DEFAULT_STEPS
    first_step: int | None = None
    """If None, the next step that begins."""

    ranks: tuple[int, ...] | None = None
    """Global ranks; if None, all."""

    label: str = ""
    """Any text. It distinguishes a request from an earlier equal one."""

    def describe(self, state: str) -> dict[str, object]:
        """Return the data of an event about it.

        Args:
            state: ``accepted``, ``done`` or ``refused``.
        """
        ranks = None if self.ranks is None else list(self.ranks)
        return {"ranks": ranks, "request": self.label, "state": state}


def read_request(document: Mapping[str, object], key: str) -> Request | None:
    """Return the request under a key of a control file; None if it has none.

    Raises:
        RequestError: The request is not valid.
    """
    asked = document.get(key)
    if asked is None:
        return None
    if type(asked) is not dict:
        raise RequestError(f"{key} must be an object")
    first_step, ranks = asked.get("first_step"), asked.get("ranks")
    if ranks is not None and type(ranks) is not list:
        raise RequestError(f"{key}.ranks must be a list of ranks")
    return Request(
        num_steps=_number(
            asked.get("steps", DEFAULT_STEPS), f"{key}.steps", 1, MAX_REQUESTED_STEPS
        ),
        first_step=None
        if first_step is None
        else _number(first_step, f"{key}.first_step", 0, MAX_RANK),
        ranks=None
        if ranks is None
        else tuple(_number(rank, f"{key}.ranks", 0, MAX_RANK) for rank in ranks),
        label=str(plain_copy(asked.get("request", "")))[:200],
    )


class Requests:
    """The requests under one key that concern this rank.

    Args:
        key: The key.
        rank: The global rank of this process.
        report: Records an event: its text and data.
    """

    def __init__(
        self, key: str, *, rank: int, report: Callable[[str, dict[str, object]], None]
    ) -> None:
        self._key = key
        self._rank = rank
        self._report = report
        self._seen: Request | None = None

    def take(self, document: Mapping[str, object]) -> Request | None:
        """Return a new request for this rank, once, and report that it is accepted."""
        try:
            request = read_request(document, self._key)
        except RequestError as problem:
            self._report(f"refused: {problem}", {})
            return None
        if request is None or request == self._seen:
            return None
        self._seen = request
        if request.ranks is not None and self._rank not in request.ranks:
            return None
        self._report(
            f"{self._key} requested for {request.num_steps} steps", request.describe("accepted")
        )
        return request


class Control:
    """The control file of a run and that of one process, whose keys override the run's."""

    def __init__(self, process_folder: Path, *, on_problem: Callable[[str], None]) -> None:
        self._paths = (process_folder.parent / CONTROL_FILE, process_folder / CONTROL_FILE)
        self._names = tuple(map(str, self._paths))
        self._stamps: list[tuple[int, int, int] | None] = [None, None]
        self._parts: list[Mapping[str, object]] = [{}, {}]
        self._on_problem = on_problem
        self._handlers: list[Handler] = []
        self._new_handlers: deque[Handler] = deque()
        self._polling = threading.Lock()

    @property
    def document(self) -> Mapping[str, object]:
        """The merged content of both files at the last `poll`."""
        return {**self._parts[0], **self._parts[1]}

    def subscribe(self, handler: Handler) -> None:
        """Call ``handler`` with the merged content at the next `poll` and after each change."""
        self._new_handlers.append(handler)

    def poll(self) -> None:
        """Read the files if they have changed and call the handlers.

        Invalid files and errors of handlers are reported. Does file I/O: never call it on a
        training thread.
        """
        with self._polling:
            has_changed = self._read_changes()
            if has_changed:
                self._call(self._handlers)
            added = [self._new_handlers.popleft() for _ in range(len(self._new_handlers))]
            self._handlers += added
            if has_changed or self.document:
                self._call(added)

    def _read_changes(self) -> bool:
        """Return whether a file has changed and can be used. A missing file counts as empty.

        The former content of a file that cannot be used remains in force, and the file is not
        read again until it changes.
        """
        has_changed = False
        for place, path in enumerate(self._paths):
            stamp = _stamp(self._names[place])
            if stamp == self._stamps[place]:
                continue
            self._stamps[place] = stamp
            try:
                self._parts[place] = read_control(path) if stamp is not None else {}
                has_changed = True
            except ControlError as problem:
                self._on_problem(str(problem))
        return has_changed

    def _call(self, handlers: Sequence[Handler]) -> None:
        for handler in handlers:
            try:
                handler(self.document)
            except Exception as problem:  # noqa: BLE001 - promise 1: harmless
                text = f"a handler of the control file raised {type_name(problem)}: {problem!r}"
                self._on_problem(text[:500])


def read_control(path: Path) -> dict[str, object]:
    """Return the object in a control file.

    Raises:
        ControlError: The file cannot be read, is longer than `MAX_CONTROL_BYTES`, or does not
            hold a JSON object.
    """
    try:
        text = read_regular_file(path, max_bytes=MAX_CONTROL_BYTES)
    except OSError as problem:
        raise ControlError(f"{path.name} cannot be read: {problem.strerror}") from problem
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ControlError(f"{path.name} is not valid JSON: {str(problem)[:200]}") from problem
    if type(document) is not dict:
        raise ControlError(f"{path.name} must hold one JSON object")
    return document


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Return modification time, size and inode of a file; None if it does not exist."""
    try:
        found = os.stat(path)  # noqa: PTH116 - half the time, and each rank does it every second
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _number(value: object, key: str, least: int, most: int) -> int:
    number = None if type(value) is bool else plain_int(value, limit=most)
    if number is None or number < least:
        raise RequestError(f"{key} must be a whole number from {least} to {most}")
    return number
