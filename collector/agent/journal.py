"""What the agent promised: cuts that are on their way, cuts that arrived, rows that were lost."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from ..spool.cut import CutKey
from .errors import JournalError, JournalVersionError
from .journal_file import JournalFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from ..spool.cut import Cut
    from .journal_file import Line, Storage

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
