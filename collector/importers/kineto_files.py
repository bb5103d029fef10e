"""Files of `torch.profiler` of one job: which are traces, and of which rank each is."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rankscope.tracer.span import NONE

from ..errors import NotATraceError, TraceError
from .event_stream import MAX_RATIO, PIECE_BYTES, open_unpacked
from .foreign_formats import describe_format

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

SUFFIXES = (".json", ".json.gz")
"""Names of traces in a folder. A file that is given itself may have any name."""

HEADER = re.compile(rb'"(?:traceEvents|schemaVersion|deviceProperties|baseTimeNanoseconds)"\s*:')
"""Members of which Kineto writes some before the events."""

DECLARED = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}\[\]]*"rank"\s*:\s*(\d{1,9})')
NAMED = re.compile(r"(?:^|[^a-z])(?:global[-_.]?)?rank[-_.=\[]?(\d{1,7})(?!\d)", re.IGNORECASE)
NAMED_WORKER = re.compile(
    r"(?:^|[^a-z])(?:worker|gpu|device|proc|process)[-_.=]?(\d{1,7})(?!\d)", re.IGNORECASE
)
NAMED_TP = re.compile(r"(?:^|[^a-z])tp[-_.=]?(\d{1,7})(?!\d)", re.IGNORECASE)
OTHER_AXIS = re.compile(r"(?:^|[^a-z])(?:dp|pp|ep|cp)[-_.=]?(\d+)", re.IGNORECASE)
NUMBERED = re.compile(r"(?:^|[^\d.])(\d{1,5})(?:\.pt)?(?:\.trace)?\.json(?:\.gz)?$", re.IGNORECASE)
NUMBER_OF_STEP = re.compile(
    r"(?:step|iter|iteration|epoch|batch|window|cycle|pid)s?[-_.=]?\d+(?:\.pt)?(?:\.trace)?\.json",
    re.IGNORECASE,
)
TIMESTAMP = re.compile(r"\.\d{10,}(?=\.pt\.trace\.json)")
"""That `tensorboard_trace_handler` writes between worker and suffix."""


class TraceFile(NamedTuple):
    """A trace, and the rank that it is of."""

    path: Path
    rank: int
    """`NONE` if nothing names it."""


@dataclass(frozen=True, slots=True)
class JobFiles:
    """The traces of a job, by rank and in order of their names."""

    traces: tuple[TraceFile, ...]
    left_out: tuple[Path, ...] = ()
    """Files of folders that are no traces."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the traces, ascending."""
        return tuple(sorted({trace.rank for trace in self.traces}))


def find_job(paths: Sequence[Path], *, rank: int | None = None) -> JobFiles:
    """Find the traces of a job among files, and in folders and the folders directly in them.

    The rank is that of a file's ``distributedInfo``, else that of its name (or the name of its
    folder), else 0 if no other worker is among the files.

    Args:
        rank: Rank of the only file, if it names none.

    Raises:
        TraceError: The rank of a file is unknown, or ``rank`` is given for several.
    """
    given = [path for path in paths if not path.is_dir()]
    listed = [file for path in paths if path.is_dir() for file in list_json(path)]
    is_trace = {path: _has_header(_read_begin(path)) for path in listed}
    files = sorted({*given, *(path for path in listed if is_trace[path])}, key=natural_key)
    left_out = tuple(path for path in listed if not is_trace[path])
    if not files:
        reason = describe_format(left_out[0]) or "is no trace of torch.profiler: no traceEvents"
        raise NotATraceError(left_out[0], reason)
    if rank is not None:
        if len(files) > 1:
            raise TraceError(files[1], f"is the second of {len(files)} files: --rank is for one")
        return JobFiles(tuple(TraceFile(path, rank) for path in files), left_out)
    traces = _find_ranks(files)
    return JobFiles(tuple(sorted(traces, key=lambda trace: trace.rank)), left_out)


def list_json(folder: Path) -> list[Path]:
    """Return the JSON files of a folder and of the folders directly in it."""
    return [
        path
        for inside in (folder, *sorted(path for path in folder.iterdir() if path.is_dir()))
        for path in sorted(inside.iterdir())
        if path.name.endswith(SUFFIXES) and path.is_file()
    ]


def natural_key(path: Path) -> tuple[tuple[int, int, str], ...]:
    """Return a key by which ``rank0.9.json`` is before ``rank0.10.json``."""
    parts = re.split(r"(\d{1,18})", str(path))
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)


def _has_header(begin: bytes) -> bool:
    return begin.lstrip()[:1] == b"{" and HEADER.search(begin) is not None


def _read_begin(path: Path) -> bytes:
    """Return the begin of a file; nothing of one that can't be read."""
    try:
        file, packed, _ = open_unpacked(path)
        with packed:
            return file.read(PIECE_BYTES)
    except (OSError, EOFError, zlib.error):
        return b""


def _read_end(path: Path) -> bytes:
    """Return the end of a file; nothing of one that can't be read, or not within the limits."""
    end = b""
    try:
        file, packed, size = open_unpacked(path)
        with packed:
            if file is packed:
                file.seek(max(size - PIECE_BYTES, 0))
                return file.read(PIECE_BYTES)
            for _ in range(MAX_RATIO * size // PIECE_BYTES + 1):
                piece = file.read(PIECE_BYTES)
                if not piece:
                    break
                end = (end + piece)[-PIECE_BYTES:]
    except (OSError, EOFError, zlib.error):
        return b""
    return end


def _find_ranks(files: Sequence[Path]) -> list[TraceFile]:
    ranks = {path: _declared_rank(path) for path in files}
    unknown = [path for path in files if ranks[path] == NONE]
    for find in (_named_ranks, _numbered_ranks):
        ranks |= find(unknown)
        unknown = [path for path in unknown if ranks[path] == NONE]
    # Names that differ in their time alone are of one worker.
    if unknown == files and len({TIMESTAMP.sub("", path.name) for path in files}) == 1:
        return [TraceFile(path, 0) for path in files]
    if unknown:
        raise TraceError(
            unknown[0],
            "names no rank, in its distributedInfo or in its name: rename the files to rank0.json,"
            " rank1.json and so on, or import one of them with --rank",
        )
    return [TraceFile(path, rank) for path, rank in ranks.items()]


def _declared_rank(path: Path) -> int:
    """Return the rank that a file has in its ``distributedInfo``; `NONE` if there is none.

    Kineto writes it before the events; old ones write it after them.
    """
    begin = _read_begin(path)
    declared = DECLARED.search(begin)
    if declared is None and _has_header(begin):
        declared = DECLARED.search(_read_end(path))
    return NONE if declared is None else int(declared[1])


def _named_ranks(files: Iterable[Path]) -> dict[Path, int]:
    """Return the ranks that names or those of folders spell out."""
    ranks: dict[Path, int] = {}
    for path in files:
        forms = [NAMED.search(path.name), NAMED_WORKER.search(path.name)]
        if not any(map(int, OTHER_AXIS.findall(path.name))):  # all are 0: only TP has ranks
            forms.append(NAMED_TP.search(path.name))
        forms += [NAMED.search(path.parent.name), NAMED_WORKER.search(path.parent.name)]
        ranks[path] = next((int(form[1]) for form in forms if form), NONE)
    return ranks


def _numbered_ranks(files: Sequence[Path]) -> dict[Path, int]:
    """Return the numbers that end the names, if they differ and are of no step or axis."""
    found = {path: NUMBERED.search(path.name) for path in files}
    is_other = any(
        NUMBER_OF_STEP.search(each.name) or OTHER_AXIS.search(each.name) for each in files
    )
    numbers = [int(number[1]) for number in found.values() if number]
    if is_other or len(set(numbers)) < len(files):
        return dict.fromkeys(files, NONE)
    return dict(zip(files, numbers, strict=True))
