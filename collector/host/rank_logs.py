"""Logs of ranks, as torchrun and Slurm write them: the lines that say why a rank failed."""

from __future__ import annotations

import glob
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .followed_file import FollowedFile
from .host_events import LOG, HostEvent
from .sample import Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

FIND_ROUNDS = 5
"""Readings between two searches for new files."""

MAX_FILES = 256
"""Files that are followed at once, the newest."""

MAX_EVENTS_A_CLASS = 3
MAX_EVENTS_A_FILE = 24
"""Events of one file: what follows the first errors says little more."""

MAX_LINE = 400
MAX_TRACEBACK_LINES = 200
KEPT_TRACEBACK = 2_000
"""Characters of a traceback that are kept, the last."""

FILES_NAME, LINES_NAME = "rank-log-files", "rank-log-lines"
GAPS_NAME, LEFT_OUT_NAME = "rank-log-gaps", "rank-log-errors-left-out"

CLASSES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        (
            "exit",
            (
                r"\(exitcode: (?P<exitcode>-?\d+)\) local_rank: (?P<local_rank>\d+)"
                r" \(pid: (?P<pid>\d+)\)"
                r"|Signal (?P<signal>\d+) \(\w+\) received by PID (?P<killed>\d+)"
                r"|srun: error: \S+: tasks? (?P<tasks>[\d,-]+): (?:Killed|Segmentation fault"
                r"|Bus error|Aborted)"
            ),
        ),
        (
            "host-oom",
            (
                r"srun: error: \S+: tasks? (?P<tasks>[\d,-]+): Out Of Memory"
                r"|oom[_-]kill(?:er)? event|Out Of Memory|DataLoader worker .* by signal: Killed"
            ),
        ),
        ("cuda-oom", r"(?:CUDA|HIP) out of memory|\bOutOfMemoryError\b"),
        ("ecc", r"(?i:uncorrectable ecc|ecc error)"),
        (
            "cuda-error",
            (
                r"(?:CUDA|HIP) error|[Cc]uda failure|device-side assert|illegal memory access"
                r"|CU(?:BLAS|DNN|SPARSE|SOLVER)_STATUS_(?!SUCCESS)\w+"
            ),
        ),
        ("nccl", r"NCCL WARN|NCCL error|nccl(?:UnhandledCuda|System|Internal|Remote)Error"),
        (
            "timeout",
            (
                r"Watchdog caught collective operation timeout|Timed out waiting \d+"
                r"|watchdog got stuck for \d+ seconds"
            ),
        ),
        (
            "storage",
            r"No space left on device|Input/output error|Stale file handle|Disk quota exceeded",
        ),
        (
            "killed",
            (
                r"^(?:\S+: line \d+: +\d+ )?(?:Killed|Segmentation fault|Bus error|Aborted)"
                r"(?:\s*$|\s*\(core dumped\)|\s{2})|^Fatal Python error"
            ),
        ),
        (
            "document",
            (
                r"^(?:[\w.]+\.)?(?:\w*Error: Caught )?(?:JSONDecodeError|UnicodeDecodeError"
                r"|ArrowInvalid|UnidentifiedImageError|BadGzipFile|ZstdError)\b|^zlib\.error:"
            ),
        ),
        ("exception", r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b(?::|$)"),
    )
)
"""Key words by class, in the order of search. Source: arXiv 2402.15627, section 4.2: the training
process's logs are filtered for key words such as "CUDA error", "segmentation fault" and those of
RDMA; the messages of torch, NCCL, Slurm and the shell."""

RANK_PREFIX = re.compile(
    r"^.{0,200}?\[rank(?P<rank>\d+)\]:"
    r"|^\s*(?:\[\w+?(?P<local>\d+)\]:|(?P<task>\d+): )"
)
"""Prefixes of torch's tracebacks, also after a progress bar or what a log collector puts before a
line (time, stream), of torchrun with ``--tee``, and of ``srun --label``."""

MAX_TASKS = 64
"""Ranks for which one line of Slurm becomes an event each."""

TORCHRUN_PATH = re.compile(r"/attempt_\d+/(?P<local>\d+)/std(?:out|err)\.log$")
TASK_PATH = re.compile(r"(?:^|[-_.])(?:rank|task)[-_]?(?P<rank>\d+)\b")
CHAINED = re.compile(r"^(?:During handling of|The above exception|Traceback|\s*$)")


@dataclass(slots=True)
class _Log:
    file: FollowedFile
    name: str
    rank: int | None
    local_rank: int | None
    counts: Counter[str] = field(default_factory=Counter)
    traceback: list[str] | None = None
    traceback_rank: tuple[int | None, int | None] = (None, None)


class RankLogSource:
    """Errors in the logs of this host's ranks, as events. Not more than a few lines are kept.

    What the files have when the source starts is skipped; of files that appear later, all is read.

    Args:
        patterns: Patterns of paths, with ``*`` and ``**``.
    """

    name = "rank-logs"

    def __init__(
        self, patterns: Sequence[str], sink: Callable[[Iterable[HostEvent]], None]
    ) -> None:
        self._patterns = tuple(patterns)
        self._sink = sink
        self._logs: dict[str, _Log] = {}
        self._rounds = 0
        self._num_lines = 0
        self._num_gaps = 0
        self._num_left_out = 0

    def read(self, at_ns: int) -> list[Sample]:
        """Send the new errors; return how many files are followed and how many lines were read."""
        if self._rounds % FIND_ROUNDS == 0:
            self._find(is_first=self._rounds == 0)
        self._rounds += 1
        events: list[HostEvent] = []
        for log in self._logs.values():
            num_gaps = log.file.num_gaps
            try:
                lines = log.file.read_lines()
            except OSError:
                continue
            self._num_gaps += log.file.num_gaps - num_gaps
            self._num_lines += len(lines)
            for line in lines:
                events += self._read_line(log, line, at_ns)
        if events:
            self._sink(events)
        losses = (GAPS_NAME, self._num_gaps), (LEFT_OUT_NAME, self._num_left_out)
        return [
            Sample(at_ns, FILES_NAME, float(len(self._logs))),
            Sample(at_ns, LINES_NAME, float(self._num_lines)),
            *(Sample(at_ns, name, float(number)) for name, number in losses if number),
        ]

    def _find(self, *, is_first: bool) -> None:
        """Follow the newest files that match, and forget those that are gone."""
        times: dict[str, float] = {}
        for pattern in self._patterns:
            for path in glob.iglob(pattern, recursive=True):  # noqa: PTH207  # any pattern
                try:
                    times[path] = Path(path).stat().st_mtime
                except OSError:
                    continue
        newest = sorted(times, key=lambda path: -times[path])[:MAX_FILES]
        for path in self._logs.keys() - set(newest):
            self._logs.pop(path).file.close()
        for path in newest:
            if path not in self._logs:
                rank, local_rank = _rank_of_path(path)
                self._logs[path] = _Log(
                    file=FollowedFile(Path(path), from_end=is_first),
                    name="/".join(Path(path).parts[-4:]),
                    rank=rank,
                    local_rank=local_rank,
                )

    def _read_line(self, log: _Log, line: str, at_ns: int) -> list[HostEvent]:
        """Return the events that a line completes: one, or one for each task that it names."""
        rank, local_rank = log.rank, log.local_rank
        prefix = RANK_PREFIX.match(line)
        if prefix is not None:
            line = line[prefix.end() :].removeprefix(" ")
            named = prefix["rank"] or prefix["task"]
            rank = int(named) if named else rank
            local_rank = int(prefix["local"]) if prefix["local"] else local_rank
        if line.startswith("Traceback (most recent call last)"):
            log.traceback, log.traceback_rank = [line], (rank, local_rank)
            return []
        if log.traceback is not None and (rank, local_rank) == log.traceback_rank:
            log.traceback.append(line)
            if line.startswith(" ") or CHAINED.match(line):
                del log.traceback[1:-MAX_TRACEBACK_LINES]
                return []
            traceback, log.traceback = log.traceback, None
            return self._event(log, line, at_ns, (rank, local_rank), traceback=traceback)
        return self._event(log, line, at_ns, (rank, local_rank))

    def _event(
        self,
        log: _Log,
        line: str,
        at_ns: int,
        place: tuple[int | None, int | None],
        *,
        traceback: Sequence[str] = (),
    ) -> list[HostEvent]:
        found = _classify(line)
        if found is None:
            if not traceback:
                return []
            found = "exception", {}
        name, groups = found
        if log.counts[name] >= MAX_EVENTS_A_CLASS or log.counts.total() >= MAX_EVENTS_A_FILE:
            self._num_left_out += 1
            return []
        log.counts[name] += 1
        pid = groups.get("pid") or groups.get("killed")
        local_rank = groups.get("local_rank")
        exit_code = groups.get("exitcode")
        signal = groups.get("signal") or (exit_code or "").partition("-")[2]
        tasks = _read_tasks(groups.get("tasks", ""))
        return [
            HostEvent(
                at_ns=at_ns,
                kind=LOG,
                text=line.strip()[:MAX_LINE],
                pid=int(pid) if pid else None,
                rank=rank,
                local_rank=int(local_rank) if local_rank else place[1],
                data={
                    "class": name,
                    "file": log.name,
                    "signal": int(signal) if signal else None,
                    "exit_code": int(exit_code) if exit_code else None,
                    "traceback": "\n".join(traceback)[-KEPT_TRACEBACK:],
                },
            )
            for rank in tasks or (place[0],)
        ]


def _classify(line: str) -> tuple[str, dict[str, str]] | None:
    """Return the class of a line, and the groups of its pattern; None if it is no error."""
    for name, pattern in CLASSES:
        match = pattern.search(line)
        if match is not None:
            groups = {key: value for key, value in match.groupdict().items() if value}
            return name, groups
    return None


def _read_tasks(text: str) -> tuple[int, ...]:
    """Return the tasks of a list of Slurm: "0,3-5" are four; at most `MAX_TASKS`."""
    tasks: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            tasks += range(int(first), min(int(last or first), int(first) + MAX_TASKS) + 1)
    return tuple(tasks[:MAX_TASKS])


def _rank_of_path(path: str) -> tuple[int | None, int | None]:
    """Return (rank, local rank) of a log's path, each None if it does not name it."""
    torchrun = TORCHRUN_PATH.search(path)
    if torchrun is not None:
        return None, int(torchrun["local"])
    task = TASK_PATH.search(Path(path).stem)
    return (int(task["rank"]) if task is not None else None), None
