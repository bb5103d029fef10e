"""What the agent promised: cuts that are on their way, cuts that arrived, rows that were lost."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ..spool.cut import CutKey
from .errors import JournalError, JournalVersionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from ..spool.cut import Cut

JOURNAL_VERSION = 1
"""What the lines mean. The first line tells it; it is of this form in every version. A journal
without it is of version 1."""

COMPACT_BYTES = 4 << 20
"""A journal that grew by so much since it was last written anew is written anew: a restart
reads it in some tens of ms."""

VERSION_LINE: dict[str, Any] = {"journal": JOURNAL_VERSION}

MAX_RUNS = 1_000
MAX_SEGMENTS = 100_000
"""Of one run; what is forgotten beyond is asked of the collector."""

Line = dict[str, Any]

CHECK_LETTERS = 8


@dataclass(slots=True)
class _Run:
    """What the journal says of one run."""

    end_rows: dict[int, int] = field(default_factory=dict)
    unanswered: dict[CutKey, str] = field(default_factory=dict)
    dropped: dict[str, dict[str, int]] = field(default_factory=dict)
    """By process, by reason."""


class Journal:
    """The agent's memory. Every method returns once what it notes is on disk, or raises.

    Args:
        path: The file.
        storage: What writes; another one in tests.

    Raises:
        JournalError: The file can't be read or made.
        JournalVersionError: A newer agent wrote it; it is left as it is.
    """

    def __init__(self, path: Path, *, storage: Storage | None = None) -> None:
        self._path = path
        self._runs: dict[str, _Run] = {}
        self._clock_lines: list[Line] = []
        try:
            self._file = JournalFile(path, storage=storage, check=self._check_version)
        except OSError as error:
            raise JournalError(f"{path} can't be opened ({error.strerror or error})") from error
        self.num_damaged = self._file.num_damaged
        for line in self._file.lines:
            self._apply(line)
        self._file.lines = ()
        self._size_at_rewrite = self._file.num_bytes

    def end_rows(self, run_id: str) -> Mapping[int, int]:
        """Return the first row of each segment that has not arrived."""
        return self._run(run_id).end_rows

    def unanswered(self, run_id: str) -> tuple[CutKey, ...]:
        """Return the cuts that may have been sent and were not confirmed, the oldest first."""
        return tuple(self._run(run_id).unanswered)

    def dropped(self, run_id: str) -> Mapping[str, Mapping[str, int]]:
        """Return the rows that were given up, by process and reason; it goes on counting."""
        return self._run(run_id).dropped

    def is_settled(self, key: CutKey) -> bool:
        """Return whether a cut needs no more sending."""
        run = self._run(key.run_id)
        return key not in run.unanswered and run.end_rows.get(key.segment, 0) >= key.end_row

    @property
    def clock_lines(self) -> Sequence[Line]:
        """The stretches of host clocks, as they were noted."""
        return self._clock_lines

    def note_cuts(self, cuts: Iterable[Cut]) -> None:
        """Note cuts before they are sent for the first time."""
        known = [cut for cut in cuts if cut.key not in self._run(cut.key.run_id).unanswered]
        self._note([{"cut": asdict(cut.key), "sha256": cut.sha256} for cut in known])

    def note_settled(self, keys: Iterable[CutKey]) -> None:
        """Note that cuts arrived."""
        self._note([{"done": asdict(key)} for key in keys])

    def note_dropped(self, key: CutKey, *, reason: str, num_rows: int) -> None:
        """Note that the rows of a cut are given up, all or some of them."""
        self._note([{"done": asdict(key), "reason": reason, "num_rows": num_rows}])

    def note_clock(self, line: Line) -> None:
        """Note a stretch of a host's clock before it is used."""
        self._note([{"clock": line}])

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _check_version(self, lines: Sequence[Line]) -> None:
        """Refuse what means something else than here: cuts that were sent would be cut anew."""
        newest = max((line.get("journal", 0) for line in lines), default=0)
        if newest > JOURNAL_VERSION:
            raise JournalVersionError(self._path, found=newest, known=JOURNAL_VERSION)

    def _note(self, lines: Sequence[Line]) -> None:
        if not lines:
            return
        try:
            grown = self._file.num_bytes - self._size_at_rewrite
            if not self._file.is_sound or grown > COMPACT_BYTES:
                self._file.rewrite(self._all_lines())
                self._size_at_rewrite = self._file.num_bytes
            is_fresh = not self._file.num_bytes
            self._file.append([VERSION_LINE, *lines] if is_fresh else lines, durable=True)
        except OSError as error:
            raise JournalError(
                f"the journal {self._path} can't be written ({error.strerror or error}):"
                " nothing is sent until it can"
            ) from error
        for line in lines:
            self._apply(line)

    def _apply(self, line: Line) -> None:
        if "clock" in line:
            self._clock_lines.append(line["clock"])
        elif "cut" in line:
            key = CutKey(**line["cut"])
            self._touched(key.run_id).unanswered[key] = line["sha256"]
        elif "done" in line:
            self._settle(CutKey(**line["done"]), line)
        elif "run" in line:
            self._touched(line["run"]).end_rows[line["segment"]] = line["end_row"]
        elif "dropped" in line:
            of_run = self._touched(line["dropped"]).dropped
            of_run.setdefault(line["process"], {})[line["reason"]] = line["num_rows"]

    def _settle(self, key: CutKey, line: Line) -> None:
        run = self._touched(key.run_id)
        run.unanswered.pop(key, None)
        before = run.end_rows.pop(key.segment, 0)
        run.end_rows[key.segment] = max(before, key.end_row)
        while len(run.end_rows) > MAX_SEGMENTS:
            run.end_rows.pop(next(iter(run.end_rows)))
        if "reason" in line:
            of_process = run.dropped.setdefault(key.process, {})
            of_process[line["reason"]] = of_process.get(line["reason"], 0) + line["num_rows"]

    def _run(self, run_id: str) -> _Run:
        return self._runs.setdefault(run_id, _Run())

    def _touched(self, run_id: str) -> _Run:
        """Return a run and make it the last that is forgotten."""
        run = self._runs.pop(run_id, _Run())
        self._runs[run_id] = run
        while len(self._runs) > MAX_RUNS:
            del self._runs[next(iter(self._runs))]
        return run

    def _all_lines(self) -> list[Line]:
        """Return the lines that bring about the present state."""
        lines: list[Line] = [VERSION_LINE, *({"clock": line} for line in self._clock_lines)]
        for run_id, run in self._runs.items():
            lines += _lines_of(run_id, run)
        return lines


def _lines_of(run_id: str, run: _Run) -> list[dict[str, Any]]:
    ends: list[Line] = [
        {"run": run_id, "segment": segment, "end_row": end_row}
        for segment, end_row in run.end_rows.items()
    ]
    dropped: list[Line] = [
        {"dropped": run_id, "process": process, "reason": reason, "num_rows": num_rows}
        for process, reasons in run.dropped.items()
        for reason, num_rows in reasons.items()
    ]
    cuts: list[Line] = [
        {"cut": asdict(key), "sha256": sha256} for key, sha256 in run.unanswered.items()
    ]
    return ends + dropped + cuts


class Storage(Protocol):
    """The few things that a journal asks of a disk."""

    def append(self, descriptor: int, data: bytes) -> None:
        """Write all of ``data`` at the end of the file."""

    def sync(self, descriptor: int) -> None:
        """Return once the file is on disk."""


class Disk:
    """The real one."""

    def append(self, descriptor: int, data: bytes) -> None:
        """Write all of ``data`` at the end of the file."""
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]

    def sync(self, descriptor: int) -> None:
        """Return once the file is on disk."""
        os.fsync(descriptor)


class JournalFile:
    """Lines of JSON, each with its checksum.

    Opening it reads what is there. A torn last line is cut off; a damaged line in the
    middle is passed over and counted.

    After a write or a sync that failed nobody knows what is on disk, so nothing is
    appended behind it: the next `append` raises until `rewrite` made a new file.

    Args:
        path: The file; made if it is not there.
        storage: What writes; another one in tests.
        check: Shown the lines before anything is cut off; what it raises leaves the file as it is.

    Raises:
        OSError: It can't be opened, read or made whole.
    """

    def __init__(
        self,
        path: Path,
        *,
        storage: Storage | None = None,
        check: Callable[[Sequence[Line]], None] = lambda _lines: None,
    ) -> None:
        self._path = path
        self._storage = storage or Disk()
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.is_sound = True
        """Whether the file may be appended to."""

        self.num_damaged = 0
        """Lines that were passed over when it was opened."""

        self.num_bytes = 0
        try:
            self.lines = self._read(check)
            sync_folder(path.parent)
        except BaseException:
            self.close()
            raise

    def append(self, lines: Iterable[Line], *, durable: bool) -> None:
        """Add lines.

        Args:
            lines: What to add.
            durable: Whether to return only once they are on disk.

        Raises:
            OSError: They may or may not be there.
        """
        if not self.is_sound:
            raise OSError("an earlier write failed")
        data = b"".join(_packed(line) for line in lines)
        try:
            self._storage.append(self._descriptor, data)
            if durable:
                self._storage.sync(self._descriptor)
        except OSError:
            self.is_sound = False
            raise
        self.num_bytes += len(data)

    def rewrite(self, lines: Iterable[Line]) -> None:
        """Put a new file with these lines into the place of the old one.

        Raises:
            OSError: The old file is still there, and as unsound as it was.
        """
        scratch = self._path.with_suffix(".tmp")
        data = b"".join(_packed(line) for line in lines)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        descriptor = os.open(scratch, flags, 0o600)
        try:
            self._storage.append(descriptor, data)
            self._storage.sync(descriptor)
            scratch.replace(self._path)
            sync_folder(self._path.parent)
        except BaseException:
            os.close(descriptor)
            raise
        self.close()
        self._descriptor, self.num_bytes, self.is_sound = descriptor, len(data), True

    def close(self) -> None:
        """Let go of the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _read(self, check: Callable[[Sequence[Line]], None]) -> Sequence[Line]:
        data = b""
        while piece := os.read(self._descriptor, 1 << 20):
            data += piece
        found: list[Line] = []
        whole = data.rfind(b"\n") + 1
        raw_lines = data[:whole].splitlines(keepends=True)
        unpacked = [_unpacked(raw) for raw in raw_lines]
        while unpacked and unpacked[-1] is None:  # torn: a sector of zeros may end in anything
            whole -= len(raw_lines[len(unpacked) - 1])
            unpacked.pop()
        for line in unpacked:
            if line is None:
                self.num_damaged += 1
            else:
                found.append(line)
        check(found)
        if whole < len(data):
            os.ftruncate(self._descriptor, whole)
            os.fsync(self._descriptor)
        os.lseek(self._descriptor, whole, os.SEEK_SET)
        self.num_bytes = whole
        return found


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _packed(line: Line) -> bytes:
    body = json.dumps(line, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _unpacked(raw: bytes) -> Line | None:
    """Return the line; None where it is not what was written."""
    check, space, body = raw[:CHECK_LETTERS], raw[CHECK_LETTERS : CHECK_LETTERS + 1], raw[9:-1]
    if space != b" " or check != b"%08x" % zlib.crc32(body):
        return None
    line = json.loads(body)
    return line if isinstance(line, dict) else None
