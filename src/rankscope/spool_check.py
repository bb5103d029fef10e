"""Check of a spool: what the analysis would misread, or not see; reading of an ended job's spool.

The rows come from the collector's own reader and are read by the analysis, so what is found is
what a user would get. They are kept in memory and not stored.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rankscope.analysis.analyze import read_operations
from rankscope.analysis.arrays.grouping import factorize, row_keys, sorted_unique
from rankscope.analysis.quality import count_unnamed, find_overlapping, find_unidentified
from rankscope.analysis.readers.waits import (
    instance_keys,
    is_communication,
    is_one_sided,
    is_p2p,
    num_group_members,
    split_traced_waits,
)
from rankscope.analysis.report.text import (
    format_count,
    format_duration,
    format_ranges,
    format_ranks,
)
from rankscope.analysis.trace.account import TORN, TRUNCATED
from rankscope.analysis.trace.rows import select_rows
from rankscope.analysis.trace.tables import num_expected_ranks, traced_groups
from rankscope.collector.arrow_columns import to_codes
from rankscope.collector.read.runs import RunRows
from rankscope.collector.spool.cut import Placement, Resume
from rankscope.collector.spool.folder import process_folders, run_folders
from rankscope.collector.spool.liveness import Liveness, read_liveness
from rankscope.collector.spool.process import ProcessFiles, SpoolFolderError
from rankscope.collector.spool.tail import SpoolTail
from rankscope.tracer.span import COMM_KINDS, KIND_CODES, SpanFlag, SpanKind, pack_kinds
from rankscope.tracer.spool import OTHER_NAME

from .errors import BadInputError
from .sources.arrow_tables import span_table, step_table
from .sources.store_source import build_run_info
from .terminal.lines import printable, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from rankscope.analysis.trace.tables import RunInfo, SpanTable, StepTable
    from rankscope.collector.identity import Row
    from rankscope.collector.spool.cut import Cut, ProcessFacts, Sink

POLL_S = 0.2
QUIET_S = 1.0
"""Time without a new row after which nothing more is expected of processes without an end record.
The newest row of a segment is stored at its second reading."""

MAX_ANCHOR_DIFFERENCE_NS = 1_000_000
"""Processes of one host read the same two clocks within microseconds. A millisecond is
more than any error of reading them, and less than NTP steps a clock by."""

WAIT = KIND_CODES[SpanKind.WAIT]
COMMUNICATION_BITS = np.uint32(pack_kinds((*COMM_KINDS, SpanKind.OTHER)))
MAX_SHOWN = 5
ORDER: list[tuple[str, Literal["ascending", "descending"]]] = [
    (column, "ascending") for column in ("epoch", "step", "rank", "start_ns")
]


class Level(StrEnum):
    """Weight of a problem."""

    ERROR = "error"
    """The result is wrong or incomplete."""

    WARNING = "warning"
    """The result is less exact than it could be, or rests on an assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something in a spool that the analysis would misread."""

    level: Level
    what: str
    """Name of the check, such as ``p2p-group``."""

    where: str
    found: str
    effect: str
    """What it does to the result."""

    fix: str

    def line(self) -> str:
        """Return the problem as one line."""
        line = f"{self.level} {self.what}: {self.where}: {self.found}. {self.effect}. {self.fix}"
        return printable(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolReading:
    """The extent of a reading of a spool."""

    num_processes: int
    problems: tuple[str, ...]
    """What could not be read, one line each."""

    unfinished: dict[Path, str]
    """Folders that were not read, by the file that each lacks."""


def read_spool(
    folder: Path, sink: Sink, *, run_id: str | None, show: Callable[[str], None]
) -> SpoolReading:
    """Hand all rows of a spool whose processes have ended to a sink.

    Args:
        folder: The spool, which is not changed.
        sink: Receives the rows.
        run_id: The only run to read; None: all.
        show: Takes a line about the progress.

    Raises:
        BadInputError: The folder holds no such run, or one of its processes still runs.
        StoreError: The store could not be written.
    """
    # Nothing is written any more, so a row that is not committed never will be.
    with closing(SpoolTail(folder, sink, only_run=run_id, grace_ns=0)) as tail:
        reading = _read_to_the_end(tail, show)
    if not reading.num_processes and not reading.unfinished and not reading.problems:
        wanted = "no run" if run_id is None else f"no run {run_id}"
        raise BadInputError(f"{folder} holds {wanted}: see docs/spool-format.md for its layout")
    return reading


def _read_to_the_end(tail: SpoolTail, show: Callable[[str], None]) -> SpoolReading:
    last_s = time.monotonic()
    problems: list[str] = []
    num_spans = 0
    while True:
        progress = tail.poll()
        problems += progress.problems
        num_spans += progress.num_spans
        show(f"{progress.num_processes} processes, {num_spans:,} spans")
        running = [
            files for files in tail.running if read_liveness(files.identity) is Liveness.ALIVE
        ]
        if running:
            raise BadInputError(
                f"ranks of this host still run, such as the process of {running[0].folder}: wait"
                " for the end of the job, or watch it with `rankscope serve --spool`"
            )
        if progress.num_cuts or progress.num_later or progress.has_more_lines:
            last_s = time.monotonic()
        elif not progress.num_running or time.monotonic() - last_s > QUIET_S:
            return SpoolReading(
                num_processes=progress.num_processes,
                problems=tuple(problems),
                unfinished=tail.unfinished,
            )
        if not progress.has_more_lines:
            time.sleep(POLL_S)


def say_unread(reading: SpoolReading) -> None:
    """Write what was not read of a spool to stderr."""
    for line in reading.problems[:MAX_SHOWN]:
        say(line)
    if len(reading.problems) > MAX_SHOWN:
        say(f"{len(reading.problems) - MAX_SHOWN:,} more problems like these")
    for line in problem_lines(_unfinished(reading)):
        say(line)


def problem_lines(problems: Sequence[Problem]) -> list[str]:
    """Return the first problems of each check, one on a line, and the number of its others."""
    lines = []
    for what in dict.fromkeys(problem.what for problem in problems):
        own = [problem for problem in problems if problem.what == what]
        lines += [problem.line() for problem in own[:MAX_SHOWN]]
        if len(own) > MAX_SHOWN:
            more = len(own) - MAX_SHOWN
            lines.append(f"{own[0].level} {what}: {more:,} more (`check-spool --json` has all)")
    return lines


@dataclass(frozen=True, slots=True)
class _KeptRows:
    """A sink that keeps in memory what it receives."""

    rows: dict[str, list[Row]] = field(default_factory=dict)
    cuts: list[Cut] = field(default_factory=list)

    def place(self, processes: Sequence[ProcessFacts]) -> list[Placement | None]:
        """Return each process's own run and epoch."""
        return [Placement(run_id=each.run_id, epoch=each.epoch) for each in processes]

    def resume(self, run_id: str) -> Resume:
        """Return that nothing of the run was read before."""
        del run_id
        return Resume()

    def clocks(self) -> list[Row]:
        """Return no clocks."""
        return []

    def upsert(self, table: str, rows: Sequence[Row]) -> None:
        """Keep rows, also those that replace others."""
        self.rows.setdefault(table, []).extend(rows)

    def ingest(self, cuts: Sequence[Cut]) -> None:
        """Keep cuts."""
        self.cuts.extend(cuts)

    def latest(self, table: str, run_id: str, *keys: str) -> list[Row]:
        """Return the latest row of each identity in ascending order."""
        own = [row for row in self.rows.get(table, ()) if row.get("run_id", run_id) == run_id]
        found = {tuple(row[key] for key in keys): row for row in own}
        return [found[key] for key in sorted(found)]

    def describe(self, run_id: str) -> RunRows:
        """Return the rows that describe a run."""
        totals: dict[tuple[int, int], Counter[str]] = {}
        bad: Counter[str] = Counter()
        for cut in self.cuts:
            if cut.key.run_id != run_id:
                continue
            rows = cut.rows
            totals.setdefault((cut.key.epoch, cut.key.rank), Counter()).update(
                num_spans=rows.spans.num_rows, num_steps=rows.steps.num_rows,
                num_microbatches=rows.microbatches.num_rows,
                num_torn=cut.num_torn, num_bad=rows.bad_rows.num_rows,
            )  # fmt: skip
            codes, reasons = to_codes(rows.bad_rows["reason"])
            bad.update(reasons[code] for code in codes.tolist())
        unplaced = {"switch": "", "rack": "", "rail": ""}
        ranks = self.latest("ranks", run_id, "epoch", "rank", "process")
        return RunRows(
            epochs=self.latest("runs", run_id, "epoch"),
            ranks=[{**row, **unplaced} for row in ranks],
            groups=self.latest("groups", run_id, "epoch", "group_id"),
            account=[
                {"epoch": epoch, "rank": rank, **num} for (epoch, rank), num in totals.items()
            ],
            bad=[{"reason": reason, "num_rows": num} for reason, num in bad.items()],
            pace=[],
            clocks=self.latest("clock", run_id, "host", "boot_id"),
        )

    def table(self, name: str, run_id: str) -> pa.Table:
        """Return the rows of steps of a table, in the order of the analysis."""
        own = [getattr(cut.rows, name) for cut in self.cuts if cut.key.run_id == run_id]
        found = pa.concat_tables(own).unify_dictionaries()
        in_step = found.filter(pc.greater_equal(found["step"], pa.scalar(0, pa.int32())))
        return in_step.sort_by(ORDER)


def check_spool(
    folder: Path, *, run_id: str | None, show: Callable[[str], None]
) -> tuple[Problem, ...]:
    """Read a spool and return its problems, errors first.

    Args:
        folder: The spool, which is not changed.
        run_id: The only run to check; None: all.
        show: Takes a line about the progress.

    Raises:
        BadInputError: The folder holds no such run, or one of its processes still runs.
    """
    kept = _KeptRows()
    reading = read_spool(folder, kept, run_id=run_id, show=show)
    problems = [
        Problem(
            level=Level.ERROR, what="unreadable", where=str(folder), found=line.rstrip("."),
            effect="Its rows are missing, and so are the steps that need them",
            fix="Write it as docs/spool-format.md describes",
        )
        for line in reading.problems
    ]  # fmt: skip
    problems += _unfinished(reading)
    problems += _check_anchors(folder, run_id)
    for name in sorted({row["run_id"] for row in kept.rows.get("runs", ())}):
        show(f"checking run {name}")
        problems += _check_run(kept, name)
    return tuple(sorted(problems, key=lambda problem: problem.level != Level.ERROR))


def _check_anchors(folder: Path, run_id: str | None) -> Iterator[Problem]:
    """Compare the anchors of the processes of each boot of a host."""
    found: dict[tuple[str, str], list[tuple[int, Path]]] = {}
    for run in run_folders(folder):
        for path in process_folders(run) if run_id in {None, run.name} else ():
            with suppress(OSError, SpoolFolderError):
                own = ProcessFiles(path).identity
                offset_ns = own.anchor_unix_ns - own.anchor_monotonic_ns
                key = (own.host, own.boot_id.hex())
                found.setdefault(key, []).append((offset_ns, path))
    for (host, _), offsets in sorted(found.items()):
        difference_ns = max(offsets)[0] - min(offsets)[0]
        if difference_ns > MAX_ANCHOR_DIFFERENCE_NS:
            yield Problem(
                level=Level.WARNING, what="anchors", where=str(max(offsets)[1]),
                found=f"its anchor is {format_duration(difference_ns)} off that of another process"
                f" of host {printable(host)}",
                effect="The first anchor of a host and boot counts for all of its processes",
                fix="If these are two machines, give them two host names; else nothing is wrong:"
                " the wall clock was set",
            )  # fmt: skip


def _unfinished(reading: SpoolReading) -> list[Problem]:
    return [
        Problem(
            level=Level.ERROR, what="missing-file", where=str(folder), found=f"{name} is missing",
            effect="The process is not read at all, and every step lacks its rank",
            fix=f"Write {name} (docs/spool-format.md)",
        )
        for folder, name in sorted(reading.unfinished.items())
    ]  # fmt: skip


def _check_run(kept: _KeptRows, run_id: str) -> Iterator[Problem]:
    rows = kept.describe(run_id)
    run = build_run_info(run_id, rows)
    yield from _check_ranks(run)
    yield from _check_records(run, rows)
    yield from _check_members(kept, run_id)
    if not any(cut.key.run_id == run_id for cut in kept.cuts):
        return
    spans, steps = span_table(kept.table("spans", run_id)), step_table(kept.table("steps", run_id))
    yield from _check_names(run, spans)
    yield from _check_steps(run, spans, steps)
    finished = _select_finished(spans, steps)
    yield from _check_groups(run, finished)
    yield from _check_waits(run, finished, steps)
    yield from _check_clocks(run, finished)
    if len(spans):
        for warning in read_operations(run, spans, steps).warnings:
            yield Problem(
                level=Level.WARNING, what="analysis", where=f"run {run_id}", found=warning,
                effect="The analysis says so as well", fix="See docs/spool-format.md",
            )  # fmt: skip


def _select_finished(spans: SpanTable, steps: StepTable) -> SpanTable:
    """Return the spans up to the last step of each epoch that all its ranks ended.

    A job that ended within a step left communications of some members, which is no defect.
    """
    keep = np.ones(len(spans), dtype=np.bool_)
    for epoch in sorted_unique(steps.epoch).tolist():
        last = min(_last_steps(steps, epoch).values())
        keep &= (spans.epoch != epoch) | (spans.step <= last)
    return select_rows(spans, keep)


def _last_steps(steps: StepTable, epoch: int) -> dict[int, int]:
    """Return the last step that each rank recorded in an epoch."""
    own = np.flatnonzero(steps.epoch == epoch)
    order = own[np.argsort(steps.step[own], kind="stable")]
    return dict(zip(steps.rank[order].tolist(), steps.step[order].tolist(), strict=True))


def _is_unfinished(spans: SpanTable, steps: StepTable) -> NDArray[np.bool_]:
    """Return which spans are in a step that their rank began after its last recorded one."""
    found = np.zeros(len(spans), dtype=np.bool_)
    for epoch in sorted_unique(steps.epoch).tolist():
        last = _last_steps(steps, epoch)
        limit = np.full(max(last) + 2, np.iinfo(np.int32).max)
        limit[list(last)] = list(last.values())
        known = np.minimum(spans.rank, len(limit) - 1)  # the last place is for all further ranks
        found |= (spans.epoch == epoch) & (spans.step > limit[known])
    return found


def _check_ranks(run: RunInfo) -> Iterator[Problem]:
    num, expected = len(run.epochs[-1].ranks), num_expected_ranks(run)
    where = f"run {run.run_id}"
    if num < expected:
        yield Problem(
            level=Level.ERROR, what="world-size", where=where,
            found=f"the world size is {run.world_size:,}, and {format_count(num, 'rank')} are here",
            effect="No step is complete, so none is replayed",
            fix="Write the real world size into the headers, or bring the other ranks",
        )  # fmt: skip
    beyond = [rank for rank in run.ranks if rank >= run.world_size]
    if beyond:
        yield Problem(
            level=Level.ERROR, what="world-size", where=where,
            found=f"{format_ranks(beyond)} in a world of {run.world_size:,}",
            effect="Steps have more ranks than the job, so none is replayed",
            fix="Write the real world size into the headers",
        )  # fmt: skip
    if not run.has_layout:
        yield Problem(
            level=Level.WARNING, what="layout", where=where,
            found="the manifests have no layout, or not the coordinates of each rank",
            effect="Each rank counts as its own worker, and MFU is unknown",
            fix="Write `layout` and `coords` into manifest.json",
        )  # fmt: skip


def _check_members(kept: _KeptRows, run_id: str) -> Iterator[Problem]:
    members: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for row in kept.rows.get("groups", ()):
        if row["run_id"] == run_id:
            key = (row["epoch"], row["group_id"])
            members.setdefault(key, set()).add(tuple(row["members"]))
    for (epoch, group_id), found in sorted(members.items()):
        if len(found) > 1:
            lists = " and ".join(format_ranges(one, max_ranges=MAX_SHOWN) for one in sorted(found))
            yield Problem(
                level=Level.ERROR, what="group-members",
                where=f"run {run_id}, epoch {epoch}, group {group_id:016x}",
                found=f"its members are {lists}",
                effect="One of them counts, so members seem to be missing or too many",
                fix="The id is a hash of the name and the members: other members, another id",
            )  # fmt: skip


def _check_records(run: RunInfo, rows: RunRows) -> Iterator[Problem]:
    for row in rows.bad:
        yield Problem(
            level=Level.ERROR, what="invalid-record", where=f"run {run.run_id}",
            found=f"{format_count(row['num_rows'], 'record')}: {row['reason']}",
            effect="They are stored in table bad_rows and not analysed",
            fix="A record has a known type and kind, and ends after it begins",
        )  # fmt: skip
    for (epoch, rank), account in run.accounts.items():
        where = f"run {run.run_id}, epoch {epoch}, rank {rank}"
        if num := account.dropped.get(TORN):
            yield Problem(
                level=Level.WARNING, what="torn", where=where,
                found=f"{format_count(num, 'record')} claimed and not committed",
                effect="They are lost", fix="Write the row's own offset into commit, last",
            )  # fmt: skip
        lost = account.dropped.get(TRUNCATED, 0) + (account.buffered or 0)
        if lost:
            yield Problem(
                level=Level.ERROR, what="lost-rows", where=where,
                found=f"{format_count(lost, 'record')} of {account.produced or 0:,} are in no file",
                effect="Steps lack spans, and what is compared may be wrong",
                fix="Never truncate a segment; count in process.rsp what was written",
            )  # fmt: skip


def _check_names(run: RunInfo, spans: SpanTable) -> Iterator[Problem]:
    where = f"run {run.run_id}"
    if num := count_unnamed(spans):
        yield Problem(
            level=Level.ERROR, what="names", where=where,
            found=f"{format_count(num, 'span')} named {OTHER_NAME}",
            effect="Unlike operations are compared as if they were alike",
            fix="Write each name into its slot of process.rsp before a record refers to it",
        )  # fmt: skip
    rows = find_overlapping(spans)
    if len(rows):
        yield Problem(
            level=Level.ERROR, what="overlap", where=_where(run, spans, rows),
            found=f"{format_count(len(rows), 'compute span')} overlap another of their track",
            effect="The compute of these ranks is wrong",
            fix="Spans of one track are nested or disjoint: give each thread or stream a track",
        )  # fmt: skip


def _check_steps(run: RunInfo, spans: SpanTable, steps: StepTable) -> Iterator[Problem]:
    num_rows = len(steps)
    both, num = factorize(
        np.concatenate((steps.epoch, spans.epoch)),
        np.concatenate((steps.rank, spans.rank)),
        np.concatenate((steps.step, spans.step)),
    )
    of_step, of_span = both[:num_rows], both[num_rows:]
    has_row, has_span = np.zeros(num, dtype=np.bool_), np.zeros(num, dtype=np.bool_)
    has_row[of_step], has_span[of_span] = True, True
    rows = np.flatnonzero(~has_row[of_span] & ~_is_unfinished(spans, steps))
    if len(rows):
        yield Problem(
            level=Level.ERROR, what="no-step-record", where=_where(run, spans, rows),
            found=f"{format_count(len(rows), 'span')} in steps without a step record",
            effect="The rank has no record of the step, so the step is left out",
            fix="Write a record of type 2 for each step of each rank",
        )  # fmt: skip
    empty = np.flatnonzero(~has_span[of_step] & (steps.left_out == 0))
    if len(empty):
        yield Problem(
            level=Level.ERROR, what="empty-step", where=_where(run, steps, empty),
            found=f"{format_count(len(empty), 'step record')} without any span",
            effect="The rank did nothing in these steps, as it seems, or none is stored",
            fix="Write the spans with the step's number, or name the kinds in `left out`",
        )  # fmt: skip
    if np.bincount(of_step, minlength=1).max(initial=0) > 1:
        twice = np.flatnonzero(np.bincount(of_step, minlength=num)[of_step] > 1)
        yield Problem(
            level=Level.ERROR, what="step-twice", where=_where(run, steps, twice),
            found=f"{format_count(len(twice), 'step record')} of the same steps",
            effect="The step has more records than ranks, and is left out",
            fix="Write one record for each step; a restarted job is another epoch",
        )  # fmt: skip
    first, last = np.full(num, np.iinfo(np.int64).max), np.full(num, np.iinfo(np.int64).min)
    np.minimum.at(first, of_step, steps.start_ns)
    np.maximum.at(last, of_step, steps.end_ns)
    on_host = (spans.flags & SpanFlag.HOST_CLOCK) != 0
    outside = (spans.start_ns >= last[of_span]) | (spans.start_ns < first[of_span])
    rows = np.flatnonzero(has_row[of_span] & on_host & outside)
    if len(rows):
        yield Problem(
            level=Level.ERROR, what="step-clock", where=_where(run, spans, rows),
            found=f"{format_count(len(rows), 'span')} begin outside their step's record",
            effect="They are left out of the step, or counted for another",
            fix="A step record has the monotonic clock of its spans, and covers their begins",
        )  # fmt: skip


def _check_groups(run: RunInfo, spans: SpanTable) -> Iterator[Problem]:
    comm = is_communication(spans)
    rows = find_unidentified(spans)
    pair = is_p2p(spans)
    for is_pair, what in ((True, "p2p-group"), (False, "no-group")):
        own = rows[pair[rows] == is_pair]
        if len(own):
            yield Problem(
                level=Level.ERROR if is_pair else Level.WARNING, what=what,
                where=_where(run, spans, own),
                found=f"{format_count(len(own), 'communication')} with group id 0 or seq -1",
                effect="No other end is found: the step is left out"
                if is_pair
                else "Waiting in them counts as host time of the rank itself",
                fix="Set bit 32768, a group id other than 0 that all members write, and seq",
            )  # fmt: skip
    known = np.flatnonzero(comm & (spans.group_id != 0) & (spans.seq >= 0))
    size = num_group_members(spans.group_id[known], traced_groups(run))
    unknown = known[(size < 0) & ~pair[known]]
    if len(unknown):
        ids = np.unique(spans.group_id[unknown]).tolist()
        named = ", ".join(f"{one:016x}" for one in ids[:MAX_SHOWN])
        yield Problem(
            level=Level.ERROR, what="no-group-record", where=_where(run, spans, unknown),
            found=f"groups {named} are in no groups.jsonl",
            effect="Their number of members is unknown, so their steps are left out",
            fix="Append the group to groups.jsonl of at least one member",
        )  # fmt: skip
    ends = (spans.rank == spans.src_rank) | (spans.rank == spans.dst_rank)
    wrong = np.flatnonzero(comm & pair & (~ends | (spans.src_rank == spans.dst_rank)))
    if len(wrong):
        yield Problem(
            level=Level.ERROR, what="p2p-ends", where=_where(run, spans, wrong),
            found=f"{format_count(len(wrong), 'p2p record')} whose rank is neither end, or both",
            effect="Source and destination are joined wrongly",
            fix="Source and destination are global ranks; one of them is the record's",
        )  # fmt: skip
    split = split_traced_waits(run, spans)
    counted = known[(size >= 0) | pair[known]]
    is_open = (spans.flags & SpanFlag.OPEN) != 0
    one_sided = counted[(split.instance[counted] < 0) & ~is_open[counted]]
    if len(one_sided):
        num = len(np.unique(instance_keys(spans, one_sided)))
        yield Problem(
            level=Level.ERROR, what="one-sided", where=_where(run, spans, one_sided),
            found=f"{format_count(num, 'communication')} without a record of every member, or with"
            " two of one",
            effect="Their steps are left out",
            fix="Every member writes a record with the same group id and seq, from 0 in each group"
            " (p2p: in each ordered pair)",
        )  # fmt: skip


def _check_waits(run: RunInfo, spans: SpanTable, steps: StepTable) -> Iterator[Problem]:
    is_wait = spans.kind == WAIT
    flagless = np.flatnonzero(is_wait & (spans.group_id == 0))
    if len(flagless):
        yield Problem(
            level=Level.ERROR, what="wait-flag", where=_where(run, spans, flagless),
            found=f"{format_count(len(flagless), 'wait')} without a communication",
            effect="What the rank waited for is unknown, and it looks like a stalled host",
            fix="Set bit 32768 and write the group, seq, source and destination waited for",
        )  # fmt: skip
    comm = is_communication(spans) & (spans.group_id != 0)
    rows = np.flatnonzero(comm | (is_wait & (spans.group_id != 0)))
    if not len(rows):
        return
    key = row_keys(instance_keys(spans, rows), spans.rank[rows])
    waits = is_wait[rows]
    lone = rows[waits][~np.isin(key[waits], key[~waits])]
    # A level may leave out the communication and keep the wait.
    partial = select_rows(steps, (steps.left_out & COMMUNICATION_BITS) != 0)
    places = row_keys(
        *(
            np.concatenate((getattr(partial, name), getattr(spans, name)[lone]))
            for name in ("epoch", "step", "rank")
        )
    )
    lone = lone[~np.isin(places[len(partial) :], places[: len(partial)])]
    if len(lone):
        yield Problem(
            level=Level.ERROR, what="wait-unmatched", where=_where(run, spans, lone),
            found=f"{format_count(len(lone), 'wait')} for communications that their rank did not"
            " record",
            effect="The waiting is caused by nothing that is known",
            fix="A wait has the group, seq, source and destination of a record of its own rank",
        )  # fmt: skip
    is_async = (spans.flags[rows] & SpanFlag.ASYNC) != 0
    sends = spans.kind[rows] == KIND_CODES[SpanKind.PP_SEND]
    unwaited = rows[~waits & is_async & ~sends & ~np.isin(key, key[waits])]
    if len(unwaited):
        yield Problem(
            level=Level.WARNING, what="no-wait", where=_where(run, spans, unwaited),
            found=f"{format_count(len(unwaited), 'asynchronous communication')} without a wait",
            effect="Where the rank waited is inferred, from 3 steps on; else it looks like a late"
            " launch",
            fix="Write a wait (kind 9) where the thread blocked, or leave out flag 1 if the call"
            " itself blocked",
        )  # fmt: skip


def _check_clocks(run: RunInfo, spans: SpanTable) -> Iterator[Problem]:
    split = split_traced_waits(run, spans)
    rows = np.flatnonzero(split.negative & ~is_one_sided(spans, split))
    if len(rows):
        worst = format_duration(float(-split.transfer_ns[rows].min()))
        yield Problem(
            level=Level.ERROR, what="clock-order", where=_where(run, spans, rows),
            found=f"{format_count(len(rows), 'record')} end up to {worst} before the last member"
            " began",
            effect="The clocks are aligned by the ends of communications; if only few records do"
            " so, their steps are left out",
            fix="Check the anchors of the hosts, and `clock_error_ns` in manifest.json",
        )  # fmt: skip
    hosts = {info.host for info in run.ranks.values()}
    if len(hosts) > 1 and run.clock_error_ns is None:
        yield Problem(
            level=Level.WARNING, what="clock-error", where=f"run {run.run_id}",
            found=f"the error between the clocks of {len(hosts)} hosts is not declared",
            effect="They are aligned by the ends of communications between them",
            fix="Write `clock_error_ns` into manifest.json",
        )  # fmt: skip


def _where(run: RunInfo, table: SpanTable | StepTable, rows: NDArray[np.intp]) -> str:
    ranks = sorted_unique(table.rank[rows]).tolist()
    steps = sorted_unique(table.step[rows]).tolist()
    return (
        f"run {run.run_id}, ranks {format_ranges(ranks, max_ranges=MAX_SHOWN)},"
        f" steps {format_ranges(steps, max_ranges=MAX_SHOWN)}"
    )
