"""Folder of one traced process in the spool: identity, manifest, names, groups and events."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rankscope.tracer.spool import (
    DROPPED,
    DROPPED_OFFSET,
    EVENTS_FILE,
    EXIT_FILE,
    GROUPS_FILE,
    HEADER_BYTES,
    KERNELS_FILE,
    MANIFEST_FILE,
    NAME_BYTES,
    NAME_LENGTH,
    OTHER_NAME,
    PROCESS_FILE,
    PROCESS_MAGIC,
    SpoolCounts,
    SpoolError,
    drop_name,
    name_slot_offset,
    read_counts,
    read_dropped,
    read_header,
)

from ..bounds import MAX_MANIFEST_DEPTH, find_problems, is_flat
from ..clock.map import UNKNOWN_ERROR_NS
from ..errors import CollectorError, RunNameError
from ..identity import MAX_INT64, check_run_name, segment_id
from ..names import storable_name
from .cut import CutKey, ProcessFacts
from .folder import TEMPORARY, open_spool_file, stat_spool_file
from .liveness import Liveness, read_liveness

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rankscope.tracer.spool import SpoolIdentity

MAX_JSON_BYTES = 1 << 20
"""Of a manifest or exit record: some 100 kB with the names of 10,000 hosts. Parsed, the worst one
takes 30 MB."""

MAX_LINE_BYTES = 1 << 20
ROW_BYTES = 1 << 10
"""What the row of a line takes in memory, besides the line."""

FILE_BYTES = 256 << 10
"""What a poll takes of one line file; a longer line is taken alone."""

POLL_BYTES = 4 << 20
"""What a poll takes of the line files of all processes."""


class SpoolFolderError(CollectorError):
    """A folder of the spool that can't be read. It is left unchanged."""


class ProcessFiles:
    """The files of one process, without its segments."""

    def __init__(self, folder: Path) -> None:
        """Read the header and the manifest.

        Raises:
            FileNotFoundError: The process has not written them yet.
            SpoolFolderError: They can't be read, are of another version, or hold a number that no
                column can hold.
        """
        self.folder = folder
        try:
            header = _read_at(folder / PROCESS_FILE, offset=0, num_bytes=HEADER_BYTES)
            if not any(header):
                raise FileNotFoundError(folder / PROCESS_FILE)
            self.identity: SpoolIdentity = read_header(
                header, magic=PROCESS_MAGIC, path=folder / PROCESS_FILE
            )
        except SpoolError as error:
            raise SpoolFolderError(str(error)) from error
        _check_range(folder, self.identity)
        self.manifest: dict[str, Any] = _read_json(folder / MANIFEST_FILE)
        self.derived: dict[str, Any] = {}
        """Values that the tracer derived itself; it adds them to the manifest later."""

        self._manifest_stamp_ns = 0
        self.process = self.identity.process_uuid.hex()
        self.run_id = self.identity.run_id
        """Run and epoch under which the process is stored; by default those it declares."""
        self.epoch = self.identity.epoch
        self.groups = JsonLines(folder / GROUPS_FILE)
        self.events = JsonLines(folder / EVENTS_FILE)
        self.kernels = JsonLines(folder / KERNELS_FILE)
        self._texts: dict[int, str] = {0: OTHER_NAME}

    @property
    def line_files(self) -> tuple[JsonLines, ...]:
        """The files of lines, which grow."""
        return self.groups, self.events, self.kernels

    def refresh_derived(self) -> None:
        """Read the manifest's part ``derived`` again if the manifest was replaced."""
        try:
            stamp_ns = stat_spool_file(self.folder / MANIFEST_FILE).st_mtime_ns
            if stamp_ns == self._manifest_stamp_ns:
                return
            derived = _read_json(self.folder / MANIFEST_FILE).get("derived")
        except (OSError, SpoolFolderError):
            return
        self._manifest_stamp_ns = stamp_ns
        self.derived = derived if isinstance(derived, dict) else {}

    def facts(self, *, first_step: int | None = None, has_ended: bool = False) -> ProcessFacts:
        """Return what decides under which run and epoch the process is stored."""
        identity, layout = self.identity, self.manifest.get("layout")
        job = self.manifest.get("job")
        return ProcessFacts(
            run_id=identity.run_id,
            epoch=identity.epoch,
            rank=identity.rank,
            process=self.process,
            host=storable_name(identity.host),
            world_size=identity.world_size,
            layout=storable_name(json.dumps(layout, sort_keys=True)) if layout else "",
            job=storable_name(job) if isinstance(job, str) else "",
            started_ns=identity.anchor_unix_ns,
            first_step=first_step,
            has_ended=has_ended,
        )

    @property
    def declared_clock_error_ns(self) -> int:
        """Error of the host's Unix time by the manifest; `UNKNOWN_ERROR_NS` if it has none."""
        error_ns = self.manifest.get("clock_error_ns")
        if not isinstance(error_ns, int) or isinstance(error_ns, bool):
            return UNKNOWN_ERROR_NS
        return error_ns if 0 <= error_ns <= MAX_INT64 // 2 else UNKNOWN_ERROR_NS

    def place(self, run_id: str, epoch: int) -> None:
        """Store the process under this run and epoch from now on."""
        self.run_id, self.epoch = run_id, epoch

    def has_ended(self) -> bool:
        """Return whether the process wrote an exit record or is gone."""
        try:
            is_recorded = self.exit_record() is not None
        except (OSError, SpoolFolderError):
            is_recorded = True
        return is_recorded or read_liveness(self.identity) is Liveness.GONE

    def cut_key(self, segment: int, first_row: int, end_row: int) -> CutKey:
        """Return the key of a range of rows of one of the process's segments.

        Args:
            segment: Number of the segment in this process.
        """
        return CutKey(
            run_id=self.run_id,
            epoch=self.epoch,
            rank=self.identity.rank,
            process=self.process,
            segment=segment_id(self.process, segment),
            first_row=first_row,
            end_row=end_row,
        )

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each interned name; `OTHER_NAME` if its slot is empty."""
        return [self._text(name_id) for name_id in ids]

    def counts(self) -> tuple[dict[str, int], SpoolCounts]:
        """Return how many records the process has dropped, by reason, and its other counters."""
        data = _read_at(self.folder / PROCESS_FILE, offset=0, num_bytes=HEADER_BYTES)
        if len(data) < DROPPED_OFFSET + DROPPED.size:
            raise OSError(errno.EIO, f"{PROCESS_FILE} is shorter than its header")
        data = data.ljust(HEADER_BYTES, b"\0")
        dropped = {drop_name(reason): count for reason, count in read_dropped(data).items()}
        return dropped, read_counts(data)

    def exit_record(self) -> dict[str, Any] | None:
        """Return the exit record; None if the process has not written one."""
        try:
            return _read_json(self.folder / EXIT_FILE)
        except FileNotFoundError:
            return None

    def _text(self, name_id: int) -> str:
        text = self._texts.get(name_id)
        if text is not None:
            return text
        slot = _read_at(
            self.folder / PROCESS_FILE, offset=name_slot_offset(name_id), num_bytes=NAME_BYTES
        )
        if len(slot) < NAME_BYTES:
            return OTHER_NAME
        (length,) = NAME_LENGTH.unpack_from(slot)
        if not length:
            return OTHER_NAME
        text = slot[2 : 2 + min(length, NAME_BYTES - 2)].decode("utf-8", "replace")
        self._texts[name_id] = text
        return text


@dataclass(slots=True)
class LineBudget:
    """Bytes that one poll may still take of the line files of all processes."""

    left_bytes: int = POLL_BYTES


class JsonLines:
    """A cursor over a file of JSON lines that grows. The file need not exist yet.

    A call of `read` takes a portion, so that a huge file delays and fills nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.has_more = False
        """Whether the last call left complete lines unread."""

        self.num_skipped = 0
        """Lines that were skipped because they are longer than `MAX_LINE_BYTES`."""

        self._offset = 0
        self._num_lines = 0
        self._is_in_long_line = False

    def read(self, budget: LineBudget | None = None) -> list[tuple[int, dict[str, Any]]]:
        """Return (line number, object) of complete new lines; skip lines that are no object."""
        budget = budget or LineBudget()
        if budget.left_bytes <= 0:
            self.has_more = True
            return []
        try:
            if stat_spool_file(self.path).st_size == self._offset:
                self.has_more = False
                return []
            data = _read_at(self.path, offset=self._offset, num_bytes=MAX_LINE_BYTES + 1)
        except FileNotFoundError:
            return []
        except OSError as error:
            if error.errno not in TEMPORARY:
                raise
            self.has_more = True
            return []
        documents = []
        at, used = 0, 0
        end = data.find(b"\n")
        while end >= 0 and used < FILE_BYTES:
            document = None if self._is_in_long_line else _object(data[at:end])
            self._is_in_long_line = False
            if document is not None:
                documents.append((self._num_lines, document))
            self._num_lines += 1
            used += end + 1 - at + ROW_BYTES
            at = end + 1
            end = data.find(b"\n", at)
        if not at and len(data) > MAX_LINE_BYTES:
            self.num_skipped += not self._is_in_long_line
            self._is_in_long_line = True
            at = used = len(data)
        self._offset += at
        self.has_more = end >= 0 or len(data) > MAX_LINE_BYTES
        budget.left_bytes -= used
        return documents


def _check_range(folder: Path, identity: SpoolIdentity) -> None:
    """Raise if a number of the header is out of bounds, or the run's name is not allowed."""
    try:
        check_run_name(identity.run_id)
    except RunNameError as error:
        raise SpoolFolderError(f"{folder} is left unchanged: {error}") from error
    numbers = {
        "epoch": identity.epoch,
        "rank": identity.rank,
        "world_size": identity.world_size,
    }
    for name, problem in find_problems("processes", numbers).items():
        raise SpoolFolderError(f"{folder} is left unchanged: {name} {problem}")


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_valid = isinstance(document, dict) and is_flat(document, max_depth=MAX_MANIFEST_DEPTH)
    return document if is_valid else None


def _read_json(path: Path) -> dict[str, Any]:
    data = _read_at(path, offset=0, num_bytes=MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise SpoolFolderError(
            f"{path} is longer than {MAX_JSON_BYTES} bytes: the process folder is left unchanged"
        )
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SpoolFolderError(
            f"{path} is not JSON: the process folder is left unchanged"
        ) from error
    if not isinstance(document, dict):
        raise SpoolFolderError(f"{path} is not a JSON object: the process folder is left unchanged")
    if not is_flat(document, max_depth=MAX_MANIFEST_DEPTH):
        raise SpoolFolderError(
            f"{path} is nested deeper than {MAX_MANIFEST_DEPTH}: the process folder is left"
            " unchanged"
        )
    return document


def _read_at(path: Path, *, offset: int, num_bytes: int) -> bytes:
    descriptor = open_spool_file(path)
    try:
        return os.pread(descriptor, num_bytes, offset)
    finally:
        os.close(descriptor)
