"""The control files, by which an operator changes a run's recording without a restart."""

from __future__ import annotations

import json
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..spool import open_regular_file
from .plain_values import type_name

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Handler = Callable[[Mapping[str, object]], None]

CONTROL_FILE = "control.json"

MAX_CONTROL_BYTES = 65_536
"""A longer file is rejected, because every rank reads it."""


class ControlError(Exception):
    """A control file cannot be used."""


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
        with os.fdopen(open_regular_file(path), "rb") as file:
            text = file.read(MAX_CONTROL_BYTES + 1)
    except OSError as problem:
        raise ControlError(f"{path.name} cannot be read: {problem.strerror}") from problem
    if len(text) > MAX_CONTROL_BYTES:
        raise ControlError(f"{path.name} is longer than {MAX_CONTROL_BYTES} bytes")
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
