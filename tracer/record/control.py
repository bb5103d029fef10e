"""The control file: what an operator asks of a run while it runs, without a restart."""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..spool import open_regular_file
from .exit_record import write_json
from .plain_values import type_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Handler = Callable[[Mapping[str, object]], None]

CONTROL_FILE = "control.json"

MAX_CONTROL_BYTES = 65_536
"""A longer file is refused: it is read by every rank."""


class ControlError(Exception):
    """A control file that says nothing usable."""


class ControlFiles:
    """The control file of a run and that of one process, whose keys go before the run's."""

    def __init__(self, process_folder: Path) -> None:
        self._paths = (process_folder.parent / CONTROL_FILE, process_folder / CONTROL_FILE)
        self._names = tuple(map(str, self._paths))
        self._seen: list[tuple[int, int, int] | None] = [None, None]
        self._parts: list[Mapping[str, object]] = [{}, {}]
        self._is_new = False

    @property
    def document(self) -> Mapping[str, object]:
        """What both said together when they were last looked at."""
        return {**self._parts[0], **self._parts[1]}

    def poll(self) -> Mapping[str, object] | None:
        """Return what both say together if either has changed, else None.

        A file that is not there, or no longer, says nothing. File I/O: never
        on a training thread.

        Raises:
            ControlError: One has changed and cannot be used. What it said
                before still holds, and it is not looked at again until it
                changes; what the other says anew is returned by the next call.
        """
        for place, path in enumerate(self._paths):
            stamp = _stamp(self._names[place])
            if stamp == self._seen[place]:
                continue
            self._seen[place] = stamp
            self._parts[place] = read_control(path) if stamp is not None else {}
            self._is_new = True
        is_new, self._is_new = self._is_new, False
        return self.document if is_new else None


class Control:
    """Hands what the control files say to whoever asked to be told."""

    def __init__(self, process_folder: Path, *, on_problem: Callable[[str], None]) -> None:
        self._files = ControlFiles(process_folder)
        self._on_problem = on_problem
        self._handlers: list[Handler] = []
        self._new_handlers: deque[Handler] = deque()
        self._polling = threading.Lock()

    def subscribe(self, handler: Handler) -> None:
        """Call ``handler`` with what the files say at the next `poll`, and after each change."""
        self._new_handlers.append(handler)

    def poll(self) -> None:
        """Look at the files and tell the handlers. Raises nothing that a handler raises."""
        with self._polling:
            try:
                changed = self._files.poll()
            except ControlError as problem:
                self._on_problem(str(problem))
                changed = None
            if changed is not None:
                self._call(self._handlers, changed)
            added = [self._new_handlers.popleft() for _ in range(len(self._new_handlers))]
            self._handlers += added
            document = self._files.document
            if document or changed is not None:
                self._call(added, document)

    def _call(self, handlers: Sequence[Handler], document: Mapping[str, object]) -> None:
        for handler in handlers:
            try:
                handler(document)
            except Exception as problem:  # noqa: BLE001 - promise 1: harmless
                self._on_problem(f"{type_name(problem)} in a handler: {problem!r}"[:500])


def read_control(path: Path) -> dict[str, object]:
    """Return the object in a control file.

    Raises:
        ControlError: It cannot be read, is longer than `MAX_CONTROL_BYTES`, or is no JSON object.
    """
    try:
        with os.fdopen(open_regular_file(path), "rb") as file:
            text = file.read(MAX_CONTROL_BYTES + 1)
    except OSError as problem:
        raise ControlError(f"{path.name} cannot be read: {problem.strerror}") from problem
    if len(text) > MAX_CONTROL_BYTES:
        raise ControlError(f"{path.name} is longer than {MAX_CONTROL_BYTES} bytes")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ControlError(f"{path.name} is no JSON: {str(problem)[:200]}") from problem
    if type(document) is not dict:
        raise ControlError(f"{path.name} must hold one JSON object")
    return document


def write_control(folder: Path, document: Mapping[str, object]) -> None:
    """Ask something of a run, or of one of its processes, by rename, so that no half is read.

    Args:
        folder: The run's folder in the spool, or a process's.
        document: What is asked; it replaces what was asked there before.

    Raises:
        OSError: The file could not be written; a former one still stands.
    """
    write_json(folder / CONTROL_FILE, dict(document))


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Return what changes when the file does; None where there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116 - each second in each rank, and half the time
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
