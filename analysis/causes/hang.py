"""Hangs: ranks that never entered the collective in which the others are blocked."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rankscope.tracer.span import (
    COMM_KINDS,
    FLIGHT_RECORDER,
    KIND_CODES,
    KINDS,
    NONE,
    SpanFlag,
    SpanKind,
    pack_kinds,
)
from rankscope.tracer.spool import STALL_NS

from ..arrays.grouping import sorted_unique
from ..hosts.stacks import STACK, StackPlace, find_place, read_call, read_main_frames
from ..readers.waits import is_p2p
from ..report.report import Finding
from ..report.text import format_count, format_duration, format_ranks
from ..statistics.thresholds import THRESHOLDS
from .crash import (
    MIN_SILENCE_NS,
    SILENT_STEPS,
    ExitClass,
    find_failures,
    find_silence,
    own_failures,
    was_stopped_at_work,
)
from .detector import Cause, ProofForm, insufficient

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    import networkx as nx
    from numpy.typing import NDArray

    from ..trace.context import EventRecord, RunContext
    from ..trace.tables import EpochInfo, RunInfo, SpanTable, StepTable
    from .crash import Failure
    from .detector import Record


COMMUNICATION_BITS = np.uint32(pack_kinds(COMM_KINDS))

PASSES = {
    KIND_CODES[SpanKind.DATA]: "fetches of data",
    KIND_CODES[SpanKind.FORWARD]: "forwards",
    KIND_CODES[SpanKind.BACKWARD]: "backwards",
    KIND_CODES[SpanKind.OPTIMIZER]: "steps of an optimizer",
}
"""What each rank does as often as the others in a step, in order, and their nouns."""

P2P = frozenset({SpanKind.PP_SEND, SpanKind.PP_RECV})
P2P_NAMES = frozenset({"send", "recv", "recv_any_source"})
"""Torch's names of p2p operations. In a group of another axis they have that axis's kind."""

UNEVEN = "all_to_all"
"""A collective whose name begins so may have another size on each rank."""

MAX_STEP = (1 << 31) - 1
MAX_ODD = 4
"""Unlike operations, and ranks whose line of code is looked for, in one sentence."""

UNFINISHED = int(SpanFlag.OPEN | SpanFlag.ERROR)

WAITS = (StackPlace.COLLECTIVE, StackPlace.DRIVER)
"""Places of a stack in which a rank waits for others, or for its device, which may wait for them or
fail: the surest first."""

HAD_ENDED = "it had already ended without an error"
"""In the evidence of a hang whose ranks had less to do than the others: fewer batches."""

TOO_MANY = "a collective too many"
"""In the evidence, if the others do not wait for the named ranks."""

OTHER_ORDER = "the order of collectives differs between ranks"
"""In the evidence, if the named ranks are in another communication than the others."""

CAUSE = Cause(
    name="hang",
    one="hangs",
    several="hang",
    sentence="The job hangs",
    ends_run=True,
    has_place=True,
    proof_form=ProofForm.STATES,
)


class Instance(NamedTuple):
    """Identity of a communication, equal for all of its members."""

    group_id: int
    seq: int
    src_rank: int = NONE
    """Source of a p2p; `NONE` for a collective, or if it is unknown."""

    dst_rank: int = NONE


class Entry(NamedTuple):
    """A rank that has entered a communication."""

    rank: int
    step: int
    instance: Instance
    kind: str
    name: str
    num_bytes: int = 0
    """0: none or unknown."""

    dtype: str = ""
    """Type of the elements; "" if it is unknown."""

    start_ns: int = 0
    """Unix time; 0 if it is unknown."""

    @property
    def is_p2p(self) -> bool:
        """Return whether it has two sides, known or unknown."""
        is_known = NONE not in self.instance[2:]
        return is_known or self.kind in P2P or self.name in P2P_NAMES


@dataclass(frozen=True, kw_only=True)
class _Stuck:
    """A communication with blocked members, or one that ended though it was called unlike."""

    instance: Instance
    inside: tuple[Entry, ...]
    """Those that have not left it."""

    entered: tuple[Entry, ...]
    """All that have entered it, also those that have left it."""

    members: tuple[int, ...]
    """Empty if they are unknown."""

    group_name: str

    @cached_property
    def missing(self) -> frozenset[int]:
        """Return the members that have not entered it."""
        return frozenset(self.members) - {entry.rank for entry in self.entered}

    @property
    def steps(self) -> tuple[int, int] | None:
        """Return the first and the last step from which members are blocked; None if unknown."""
        steps = [entry.step for entry in self.inside if entry.step >= 0]
        return (min(steps), max(steps)) if steps else None

    @cached_property
    def sides(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the unlike operations in it with their ranks, that of most ranks first.

        All members of a collective call the same operation, with as many bytes of the same type,
        and the two sides of a p2p have as many.
        """
        sizes = {entry.num_bytes for entry in self.entered}
        names = {"p2p" if entry.is_p2p else entry.name for entry in self.entered}
        dtypes = {entry.dtype for entry in self.entered}
        is_sized = len(names) == 1 < len(sizes) and min(sizes) > 0 and UNEVEN not in min(names)
        is_typed = len(names) == 1 < len(dtypes) and "" not in dtypes
        ranks_by_name: dict[str, list[int]] = defaultdict(list)
        for entry in sorted(self.entered):
            size = f" of {entry.num_bytes:,} bytes" if is_sized else ""
            size += f" of type {entry.dtype}" if is_typed else ""
            name = entry.name if is_sized or is_typed or len(names) > 1 else ""
            ranks_by_name[f"{name} {self.instance.seq}{size}"].append(entry.rank)
        sides = ((name, tuple(ranks)) for name, ranks in ranks_by_name.items())
        return sorted(sides, key=lambda side: (-len(side[1]), side[1]))

    def __str__(self) -> str:
        """Write it: "all_reduce 41 (dp-comm) of group dp with 8 ranks"."""
        entry, (group_id, seq, src_rank, dst_rank) = self.inside[0], self.instance
        text = f"{entry.name} {seq} ({entry.kind})"
        if entry.is_p2p:
            return f"{text} from rank {src_rank} to rank {dst_rank}"
        group = self.group_name or f"{group_id:016x}"
        return f"{text} of group {group} with {len(self.members):,} ranks"


@dataclass(frozen=True, kw_only=True)
class _Job:
    """An epoch in which ranks are blocked, and what is known of them."""

    epoch: EpochInfo
    world_size: int
    spans: SpanTable
    steps: StepTable
    events: tuple[EventRecord, ...]
    failures: tuple[Failure, ...]
    opened: Mapping[int, list[dict[str, Any]]]
    ended: frozenset[int]
    """Ranks that ended without an error."""

    stuck: tuple[_Stuck, ...]
    silent_ns: int
    """For how long no rank had recorded anything when the hung job was stopped, or 0."""

    certainty: float
    """Factor of every confidence."""

    dumps: Mapping[int, EventRecord]
    """Newest dump of a flight recorder of each rank that has one, or is known to have none."""

    left_behind: Mapping[int, Entry]
    """By rank, the first communication that all of its other members have left, by the dumps."""

    ended_unlike: tuple[_Stuck, ...]
    """The first communication of each group that ranks called unlike and that has ended, by the
    dumps; ascending by time."""

    @cached_property
    def blocked(self) -> frozenset[int]:
        """Return the blocked ranks."""
        return frozenset(entry.rank for comm in self.stuck for entry in comm.inside)

    @cached_property
    def signs(self) -> tuple[EventRecord, ...]:
        """Return the events of ranks in the step that hangs, or in later ones."""
        steps = [comm.inside[0].step for comm in self.stuck if comm.inside[0].step >= 0]
        since = min(steps, default=MAX_STEP)
        return tuple(event for event in self.events if event.data.get("step", NONE) >= since)

    @cached_property
    def reporting(self) -> frozenset[int]:
        """Return the ranks whose process reports that its own step lasts long (event ``stack``).

        A process that is frozen sends none. Empty if no more than half of the ranks do, or all:
        then that says nothing about the others.
        """
        ranks = frozenset(event.rank for event in self.signs if event.kind == STACK)
        num = len(self.epoch.ranks)
        return ranks if num > len(ranks) > THRESHOLDS.majority_share * num else frozenset()

    def places(self, ranks: Collection[int]) -> dict[int, StackPlace]:
        """Return in what the newest stack of each of these ranks is, of those that have frames."""
        newest = {
            event.rank: event.data
            for event in self.signs
            if event.kind == STACK and event.rank in ranks
        }
        frames = {rank: read_main_frames(data) for rank, data in newest.items()}
        return {
            rank: find_place(of_rank, read_call(newest[rank]))
            for rank, of_rank in frames.items()
            if of_rank
        }

    @cached_property
    def not_received(self) -> frozenset[int]:
        """Return the ranks of hosts from which nothing arrived since the job hangs.

        Such a host is dead, or what it recorded has not been sent: its ranks are not known to be
        silent.
        """
        hosts = {info.rank: info.host or f"rank {info.rank}" for info in self.epoch.ranks}
        received = {event.rank for event in (*self.signs, *self.dumps.values())}
        received |= self.blocked | self.ended | {failure.ended.rank for failure in self.failures}
        of_received = {hosts[rank] for rank in received & hosts.keys()}
        return frozenset(rank for rank, host in hosts.items() if host not in of_received)

    def suspects(self, silent: set[int]) -> set[int]:
        """Return those of the silent ranks for which the others wait.

        Not those of which nothing arrived beside others that are known to be silent, nor those
        whose stack shows that they wait themselves, nor those that report beside a frozen one;
        unless no other is left. A device for which one rank alone waits may be what fails: such a
        rank is cleared only by one whose stack shows that it waits for nothing.
        """
        received = silent - self.not_received or silent
        places = self.places(received)
        rest = received
        for place in WAITS:
            others = {rank for rank in rest if places.get(rank) is not place}
            if (
                place is StackPlace.COLLECTIVE
                or others & places.keys()
                or len(rest - others) >= THRESHOLDS.min_several
            ):
                rest = others or rest
        return rest - (self.reporting - places.keys()) or rest

    def last_step(self, ranks: Iterable[int]) -> int | None:
        """Return the last step that any of these ranks has finished; None if none is known."""
        rows = np.isin(self.steps.rank, list(ranks)) & (self.steps.epoch == self.epoch.epoch)
        return int(self.steps.step[rows].max()) if rows.any() else None

    def place(self, rank: int) -> str:
        """Return where a rank was in the job's own code, in a step that it has not finished."""
        last, line = self.last_step([rank]), ""
        after = NONE if last is None else last
        for event in self.events:
            is_later = event.data.get("step", after + 1) > after
            if event.rank == rank and event.kind != FLIGHT_RECORDER and is_later:
                line = event.place or line
        return line

    @property
    def without_dump(self) -> frozenset[int]:
        """Return the ranks that wrote no dump, or an empty file, where others wrote one."""
        return frozenset(
            rank for rank, event in self.dumps.items() if event.data.get("has_dump") is False
        )

    def finding(
        self,
        ranks: Iterable[int],
        evidence: str,
        *,
        steps: tuple[int, int] | None,
        certainty: float = 1.0,
    ) -> Finding:
        """Return a finding, with what the named ranks were doing."""
        named = tuple(sorted(ranks))
        entries = (entry for rank in named for entry in self.opened.get(rank, ()))
        open_kinds = {
            str(entry.get("kind") or "") for entry in entries if entry.get("seq", NONE) == NONE
        }
        kinds = sorted(open_kinds - {""})
        evidence += f"; it was inside {', '.join(kinds)}" if kinds else ""
        evidence += f"; {HAD_ENDED}" if self.ended & set(named) else ""
        places = ((rank, self.place(rank)) for rank in named[:MAX_ODD])
        shown = (f"; rank {rank} is at {place}" for rank, place in places if place)
        evidence += next(shown, "")
        if self.silent_ns and all(failure.ended.state == "lost" for failure in self.failures):
            silence = format_duration(self.silent_ns)
            evidence += f"; all were silent for {silence} before the job was stopped"
        return Finding(
            cause=CAUSE.name,
            ranks=named,
            steps=steps,
            confidence=THRESHOLDS.ended_confidence * self.certainty * certainty,
            evidence=evidence,
            epoch=self.epoch.epoch,
        )


def detect(record: Record) -> tuple[Finding, ...]:
    """Return the hang of each epoch that had one."""
    return find_hangs(record.run, record.spans, record.steps, record.context)


def find_hangs(
    run: RunInfo, spans: SpanTable, steps: StepTable, context: RunContext
) -> tuple[Finding, ...]:
    """Find, in each epoch, what the blocked ranks wait for in the end.

    Members that entered one communication with unlike operations or sizes can't leave it, or leave
    it with an undefined result and then are in others: those that differ from most are named
    (`_unlike`).

    Else a blocked rank waits for a communication, and that for its members that have not entered
    it. Followed to the end, these waits lead to one of three things:

    * Ranks that are blocked nowhere: they are silent, and named. Not named are those that came
      further than a silent partner, or that report their long step while others are frozen. If they
      ended or went on, and are more than those that are blocked, these called a collective too
      many, and are named. While a silent rank writes a checkpoint, nothing hangs.
    * A communication that all members have entered, if one of them was stalled there or timed out.
      Its transfer does not end, or a process is frozen in it (`_entered_by_all`).
    * A circle: the ranks entered their collectives in different orders, and those in it are named,
      or those alone that are in another one than most (`_odd_of_circle`).

    Blocked ranks are those with spans flagged open or error, or with open spans in the events
    ``stalled`` and ``lost``.

    The confidence is not calibrated: `ended_confidence` times the share of the other members that
    are blocked in the collective, times `doubt_factor` if the silent process is gone, times
    `doubt_factor` if records were dropped; at most `undecided_certainty` if no rank is silent.

    Args:
        steps: The same steps: an event of a rank that has gone on since is stale.

    Source:
        arXiv 2402.15627, section 4.3: the rank that logged no operation.
    """
    hangs = (find_hang(run, epoch, spans, steps, context) for epoch in run.epochs)
    return tuple(finding for finding in hangs if finding is not None)


def find_hang(
    run: RunInfo, epoch: EpochInfo, spans: SpanTable, steps: StepTable, context: RunContext
) -> Finding | None:
    """Return the hang of one epoch; see `find_hangs`.

    Unlike operations or sizes may also end the process that receives too much, in C code. Every
    other failure is why the others are blocked, and no hang.
    """
    failures = find_failures(epoch, context, steps)
    independent = own_failures(failures)
    if any(failure.reason is not ExitClass.LOST for failure in independent):
        return None
    exits = (process for process in context.exits if process.epoch == epoch.epoch)
    ended = frozenset(process.rank for process in exits if process.state == "ended")
    events = tuple(event for event in context.events if event.epoch == epoch.epoch)
    opened = _open_spans(epoch.epoch, events, steps)
    dumps = {event.rank: event for event in events if event.kind == FLIGHT_RECORDER}
    blocked = [
        entry
        for entry in (*_find_blocked(epoch, spans, opened), *_read_dumps(epoch, dumps, "open"))
        if entry.rank not in ended
    ]
    left = tuple(_read_dumps(epoch, dumps, "ended"))
    stopped = (failure.ended for failure in failures if failure.reason is ExitClass.STOPPED)
    failed = [failure.ended.rank for failure in failures if failure.ended.state == "failed"]
    job = _Job(
        epoch=epoch,
        world_size=run.world_size,
        spans=spans,
        steps=steps,
        events=events,
        failures=failures,
        opened=opened,
        ended=ended,
        stuck=_find_stuck(
            epoch, spans, blocked, _last_entries(epoch.epoch, spans, steps, failed), left
        ),
        silent_ns=find_silence(stopped) or 0,
        certainty=THRESHOLDS.doubt_factor if run.num_dropped else 1.0,
        dumps=dumps,
        left_behind=_find_left_behind(epoch, blocked, left),
        ended_unlike=_find_ended_unlike(epoch, blocked, dumps),
    )
    unlike = _unlike(job)
    if dumps and not failures and (doubt := _doubt_dumps(job, unlike)):
        return doubt
    if unlike is not None and (job.stuck or job.left_behind):
        return unlike
    if was_stopped_at_work(epoch, failures, spans, steps):
        return None
    finding = None if independent or not (job.stuck or job.left_behind) else _not_entered(job)
    if independent or finding is not None or not job.silent_ns:
        return finding
    last = job.last_step(info.rank for info in epoch.ranks)
    steps_of_hang = None if last is None else (last + 1, last + 1)
    text = "what the ranks were doing is unknown"
    return job.finding((), text, steps=steps_of_hang, certainty=THRESHOLDS.doubt_factor)


def _doubt_dumps(job: _Job, unlike: Finding | None) -> Finding | None:
    """Return why dumps alone do not show which rank a job waits for; None if they do.

    Args:
        unlike: What ranks called unlike, which is a fact in any case.
    """
    also = f"; {unlike.evidence}" if unlike else ""
    is_ras = any(event.data.get("source") == "nccl-ras" for event in job.dumps.values())
    dumps = "snapshots of NCCL's RAS" if is_ras else "dumps of the flight recorder"
    times = (event.data.get("silent_ns") for event in job.dumps.values())
    silent_ns = next((time for time in times if isinstance(time, int)), MIN_SILENCE_NS)
    num, num_without = len(job.dumps), len(job.without_dump)
    if not job.stuck and not job.left_behind and not len(job.spans):
        return insufficient(
            f"no rank was in a communication when the {dumps} were written, so they do not show a"
            f" hang{also}"
        )
    if job.stuck and all(len(comm.members) == 1 for comm in job.stuck):
        entry = job.stuck[0].inside[0]
        return insufficient(
            f"rank {entry.rank} is in {entry.name} {entry.instance.seq}, and who else is in its"
            f" group is unknown: torch writes the members since 2.3{also}"
        )
    if job.stuck and silent_ns < MIN_SILENCE_NS:
        return insufficient(
            f"the {dumps} were written {format_duration(silent_ns)} after the newest communication"
            " in them, so the job may not have hung: write them again when it"
            f" has been silent for {format_duration(MIN_SILENCE_NS)}{also}"
        )
    if job.stuck and not unlike and num_without >= THRESHOLDS.majority_share * num:
        return insufficient(
            f"only {num - num_without} of {num} ranks have a dump of the flight recorder, so it is"
            " unknown which of the others is missing: collect the dumps of all hosts"
            if not is_ras
            else f"only {num - num_without} of {num} ranks answered NCCL's RAS, so it is unknown"
            " which of the others is missing"
        )
    return None


def _unlike(job: _Job) -> Finding | None:
    """Return the hang in the first communication that ranks entered with unlike operations.

    One that has ended comes first: those after it need not belong together.

    Those that differ from more than half are named. Without such a majority it is what all alike
    groups called there, if they did, and else unknown who is wrong.
    """
    unlike = [comm for comm in job.stuck if len(comm.sides) > 1]
    unlike.sort(key=lambda comm: (comm.steps or (NONE, NONE), comm.instance))
    unlike = [*job.ended_unlike, *unlike]
    if not unlike:
        return None
    comm = unlike[0]
    sides = comm.sides
    right = sides[0][1] if len(sides[0][1]) > THRESHOLDS.majority_share * len(comm.entered) else ()
    entered = _read_entered(job.epoch.epoch, job.spans, _find_alike(job.epoch, comm))
    alike = {(entry.name, entry.num_bytes) for entry in entered}
    if not right and len(alike) == 1:
        right = tuple(
            entry.rank for entry in comm.entered if (entry.name, entry.num_bytes) in alike
        )
    odd = {entry.rank for entry in comm.entered} - set(right) if right else set()
    has_ended = comm in job.ended_unlike
    texts = [
        f"{format_ranks(ranks)} called {name}" if has_ended else f"{_they_are(ranks)} in {name}"
        for name, ranks in reversed([*sides[:1], *sides[1:][-MAX_ODD:]])
    ]
    group = f"group {comm.group_name or f'{comm.instance.group_id:016x}'}"
    text = f"{' and '.join(texts)} of {group}, which all its ranks must call alike"
    if has_ended:
        text += "; it has ended all the same, so its result is undefined, and those after it may be"
        text += " calls that do not belong together"
    if num_more := len({other.instance.group_id for other in unlike} - {comm.instance.group_id}):
        text += f"; so are calls of {format_count(num_more, 'other group')}"
    # Ranks with a dump that others wait for, and that are in no communication.
    silent = _follow_waits(job.stuck)[0] & job.dumps.keys() - job.blocked - job.without_dump
    elsewhere = () if has_ended else tuple(sorted(silent.difference(comm.members)))
    if elsewhere:
        text += f"; {format_ranks(elsewhere)} never entered what members of another group are in"
        odd |= set(elsewhere)
    return job.finding(
        odd, text + ("" if odd else "; which of them is wrong is unknown"), steps=comm.steps
    )


def _they_are(ranks: tuple[int, ...]) -> str:
    """Return "rank 5 is" or "ranks 1 and 2 are"."""
    return f"{format_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'}"


def _not_entered(job: _Job) -> Finding | None:  # noqa: PLR0911  # one for each end of the waits
    last_ranks, last_instances = _follow_waits(job.stuck)
    silent = last_ranks - job.blocked
    ends = [comm for comm in job.stuck if comm.instance in last_instances]
    if silent and silent <= job.not_received:
        # What the others wait for may be explained without those of which nothing has arrived.
        _, received_instances = _follow_waits(job.stuck, ignored=job.not_received)
        of_received = [comm for comm in job.stuck if comm.instance in received_instances]
        if odd := _odd_of_circle(job, of_received, job.not_received) - job.not_received:
            last_ranks, silent, ends = set(odd), set(), of_received
    if not silent and job.left_behind:
        stops = _stop_texts(job, job.left_behind)
        certainty = 1.0 if len(stops) == len(job.left_behind) else THRESHOLDS.doubt_factor
        text = "; ".join((_left_text(job), *stops[:MAX_ODD]))
        return job.finding(job.left_behind, text, steps=None, certainty=certainty)
    if not silent and (endless := _entered_by_all(job, ends)):
        return endless
    traced = {info.rank for info in job.epoch.ranks} - _without_capture(job)
    absent = _find_absent(job, silent)
    if silent and not silent & traced and not absent:
        return insufficient(
            f"ranks are blocked in {job.stuck[0]}, and the communication of"
            f" {format_ranks(tuple(sorted(silent)))} was not recorded, so it is unknown which rank"
            " is missing: trace every rank"
        )
    behind = _least_advanced(job, silent & traced)
    if silent and silent <= job.not_received and (unknown := _hosts_not_received(job, silent)):
        return unknown
    odd = _odd_of_circle(job, ends)
    suspects = job.suspects(behind)
    if suspects and (partners := _odd_partners(job, suspects)):
        odd, suspects, silent = frozenset(partners), set(), set()
    culprits = absent or suspects or odd - job.not_received or odd or last_ranks & traced
    culprits |= job.left_behind.keys() & traced
    shown = next((comm for comm in job.stuck if comm.missing & culprits), None)
    if shown is None or _is_saving(job, silent):
        return None
    if silent and (extra := _one_too_many(job, shown)):
        return extra
    certainty = 1.0
    if {
        failure.ended.rank for failure in job.failures if failure.reason is ExitClass.LOST
    } & culprits or (job.without_dump | absent) & culprits:
        certainty *= THRESHOLDS.doubt_factor
    num_others = len(shown.members) - len(shown.missing & culprits)
    certainty *= len(shown.inside) / max(num_others, 1)
    if not silent and not odd:
        certainty = min(certainty, THRESHOLDS.undecided_certainty / THRESHOLDS.ended_confidence)
    text = _evidence(job, shown, culprits) + _records_text(job, culprits, absent)
    return job.finding(culprits, text, steps=shown.steps, certainty=certainty)


def _records_text(job: _Job, culprits: Collection[int], absent: Collection[int]) -> str:
    text = ""
    if absent:
        text += "; nothing of it was ever recorded: it never joined, or is not traced"
    missing = frozenset[int]().union(*(comm.missing for comm in job.stuck))
    if not_received := (job.not_received & missing).difference(culprits):
        text += f"; nothing has arrived from {format_count(len(not_received), 'other rank')} since"
    return text


def _hosts_not_received(job: _Job, silent: set[int]) -> Finding | None:
    """Return the hang for which several hosts may be the reason, from which nothing arrived.

    None of one host: that is the reason.
    """
    hosts = {info.host or f"rank {info.rank}" for info in job.epoch.ranks if info.rank in silent}
    if len(hosts) == 1:
        return None
    text = (
        f"ranks are blocked in {job.stuck[0]}, and nothing has arrived since from"
        f" {format_ranks(tuple(sorted(silent)))} on {len(hosts)} hosts: which of them the others"
        " wait for is unknown"
    )
    steps = job.stuck[0].steps
    return job.finding((), text, steps=steps, certainty=THRESHOLDS.doubt_factor)


def _find_absent(job: _Job, silent: set[int]) -> set[int]:
    """Return the silent ranks of which nothing was ever recorded, if the others wait for these.

    Before the first step has ended, they never joined. Later, one that is the only such rank may
    also be one that is not traced; of several it is unknown which is missing.
    """
    if job.dumps:  # a rank without a readable dump may have joined
        return set()
    recorded = {info.rank for info in job.epoch.ranks}
    if not bool((job.steps.epoch == job.epoch.epoch).any()):
        return silent - recorded
    return silent if not silent & recorded and job.world_size - len(recorded) == 1 else set()


def _is_saving(job: _Job, silent: set[int]) -> bool:
    """Return whether a silent rank writes a checkpoint that may still end.

    It will not if the others timed out meanwhile, or if it lasts `SILENT_STEPS` times as long as
    the longest one before. Without an earlier one it may.
    """
    entries = (entry for rank in silent for entry in job.opened.get(rank, ()))
    begun_ns = [
        int(entry.get("start_ns") or 0)
        for entry in entries
        if entry.get("kind") == SpanKind.CHECKPOINT
    ]
    if not begun_ns or any(failure.reason is ExitClass.TIMEOUT for failure in job.failures):
        return False
    usual_ns = job.spans.duration_ns[job.spans.kind == KIND_CODES[SpanKind.CHECKPOINT]]
    if not len(usual_ns) or min(begun_ns) <= 0:
        return True
    lasted_ns = max((event.at_ns for event in job.signs), default=0) - min(begun_ns)
    return max(lasted_ns, STALL_NS // 2) <= SILENT_STEPS * int(usual_ns.max())


def _follow_waits(
    stuck: Iterable[_Stuck], *, ignored: frozenset[int] = frozenset()
) -> tuple[set[int], set[Instance]]:
    """Return the ranks, and the communications, at which the waits of blocked ranks end.

    A rank waits for the communication in which it is, and that for its missing members. What waits
    for nothing outside itself is an end: a rank that is blocked nowhere, a communication without
    missing members, or all that is in a circle. Where the members are unknown, the rank is the end.

    Args:
        ignored: Ranks for which nothing waits.
    """
    import networkx as nx  # slow to import, and few runs hang

    waits = _build_waits(stuck, ignored)
    ends: set[int | Instance] = set()
    # nx.attracting_components builds another graph of all components: of 12,288 ranks, slowly.
    for component in nx.strongly_connected_components(waits):
        if all(node in component for waiting in component for node in waits[waiting]):
            ends |= component
    ranks = {end for end in ends if isinstance(end, int)}
    return ranks, {end for end in ends if not isinstance(end, int)}


def _build_waits(stuck: Iterable[_Stuck], ignored: frozenset[int]) -> nx.DiGraph[int | Instance]:
    import networkx as nx

    waits: nx.DiGraph[int | Instance] = nx.DiGraph()
    for comm in stuck:
        waits.add_nodes_from(entry.rank for entry in comm.inside)
        if comm.members:
            waits.add_edges_from((entry.rank, comm.instance) for entry in comm.inside)
            waits.add_edges_from((comm.instance, rank) for rank in comm.missing - ignored)
    return waits


def _odd_of_circle(
    job: _Job, ends: Iterable[_Stuck], ignored: frozenset[int] = frozenset()
) -> frozenset[int]:
    """Return the ranks that are in another communication than the others, which wait for them.

    They are missing where most members are, and all others there wait for these; or they are in a
    collective that no other group calls, or not in one that others do (`_odd_of_group`); or it is
    the only rank without whose wait there is no circle.
    """
    import networkx as nx

    ends = tuple(ends)
    for comm in ends:
        inside = {entry.rank for entry in comm.inside}
        others = (other for other in ends if other is not comm)
        if len(inside) > THRESHOLDS.majority_share * len(comm.members) > 0 and all(
            inside <= other.missing for other in others
        ):
            return comm.missing
    if odd := _odd_of_group(job, ends, ignored):
        return odd
    waits = _build_waits(ends, ignored)
    if nx.is_directed_acyclic_graph(waits):
        return frozenset()
    in_circle = {node for edge in nx.find_cycle(waits) for node in edge if isinstance(node, int)}
    breaking = [
        rank
        for rank in sorted(in_circle)
        if nx.is_directed_acyclic_graph(nx.restricted_view(waits, [rank], []))
    ]
    return frozenset(breaking) if len(breaking) == 1 else frozenset()


def _odd_of_group(job: _Job, ends: Collection[_Stuck], ignored: frozenset[int]) -> frozenset[int]:
    """Return the ranks that called a collective, or left it out, unlike those of alike groups.

    It is one that no more than half of its members have entered, and that waits only for ranks in
    communications in which most are. If an alike group has called it, those missing are odd, and
    else those inside. Empty if there is no alike group.
    """
    in_usual, rest = set[int](), []
    for comm in ends:
        if len(comm.inside) > THRESHOLDS.majority_share * len(comm.members) > 0:
            in_usual |= {entry.rank for entry in comm.inside}
        else:
            rest.append(comm)
    odd: set[int] = set()
    for comm in rest:
        missing, alike = comm.missing - ignored, _find_alike(job.epoch, comm)
        if alike and missing and missing <= in_usual:
            stuck = (
                entry for each in job.stuck if each.instance in alike for entry in each.entered
            )
            called = (*_read_entered(job.epoch.epoch, job.spans, alike), *stuck)
            is_usual = any(entry.name == comm.inside[0].name for entry in called)
            odd |= missing if is_usual else {entry.rank for entry in comm.inside}
    return frozenset(odd)


def _find_alike(epoch: EpochInfo, comm: _Stuck) -> set[Instance]:
    """Return the collectives of the same number of groups of the same axis without its members."""
    kinds = set() if comm.entered[0].is_p2p else {entry.kind for entry in comm.entered}
    members = set(comm.members)
    return {
        Instance(group.group_id, comm.instance.seq)
        for group in epoch.groups
        if group.kind in kinds
        and len(group.members) == len(members)
        and members.isdisjoint(group.members)
    }


def _one_too_many(job: _Job, shown: _Stuck) -> Finding | None:
    """Return the hang in a communication that its missing members never had to enter.

    They ended without an error, or finished the step from which the others are blocked. If more
    ranks of the job did than are blocked, those inside are named; of as many, none is.
    """
    since = max(entry.step for entry in shown.inside)
    if since < 0 and job.dumps:  # a dump knows no steps
        since = MAX_STEP
    rows = (job.steps.epoch == job.epoch.epoch) & (job.steps.step >= max(since, 0))
    passed = (job.ended | set(job.steps.rank[rows].tolist())) - job.blocked
    if not shown.missing <= passed or len(job.blocked) > len(passed):
        return None
    inside = tuple(sorted(entry.rank for entry in shown.inside))
    did = "ended without an error" if shown.missing <= job.ended else "went on"
    text = f"{_they_are(inside)} blocked in {shown}, and"
    text += f" {format_ranks(tuple(sorted(shown.missing)))} {did} and never entered it: {TOO_MANY}"
    if len(job.blocked) == len(passed):
        text += " here or too few there; which of them is wrong is unknown"
        inside = ()
    return job.finding(inside, text, steps=shown.steps)


def _entered_by_all(job: _Job, ends: Iterable[_Stuck]) -> Finding | None:
    """Return the hang in the first communication that all members have entered.

    That they are inside is normal for a moment, and a hang if one of them was stalled there or
    timed out, or if the job was stopped after it had been silent. The transfer itself does not end
    then, or a process is frozen. A frozen one does not report that its step lasts long. If members
    have left, those that have not are named.
    """
    timed_out = {
        failure.ended.rank for failure in job.failures if failure.reason is ExitClass.TIMEOUT
    }
    stalled = {
        (event.rank, event.data.get("step")) for event in job.events if event.kind == "stalled"
    }
    endless = [
        comm
        for comm in sorted(ends, key=lambda comm: comm.instance.seq)
        if not comm.missing and len(comm.members) > 1
        if job.silent_ns
        or any(
            entry.rank in timed_out
            or entry.rank in job.dumps
            or (entry.rank, entry.step) in stalled
            for entry in comm.inside
        )
    ]
    if not endless:
        return None
    comm, reporting = endless[0], job.reporting
    inside = {entry.rank for entry in comm.inside}
    frozen = inside - reporting if reporting else set()
    hosts = {info.rank: info.host or info.rank for info in job.epoch.ranks}
    if len({hosts.get(rank) for rank in frozen}) > 1:
        frozen = set()  # one process or host freezes: of others the stacks are missing
    named = tuple(sorted(frozen or (inside if len(inside) < len(comm.members) else ())))
    if not named and all(len(each.members) == 2 for each in endless):  # noqa: PLR2004  # a link
        named = tuple(sorted({rank for each in endless for rank in each.members}))
    names = _they_are(named) if named else ""
    text = f"all {len(comm.members):,} members have entered {comm}, which does not end: "
    if frozen:
        text += f"{names} frozen in it, without the reports of a long step that the other"
        text += f" {len(reporting):,} sent"
    else:
        text += f"only {names} still in it; " if len(inside) < len(comm.members) else ""
        text += "a link, an adapter or a device of theirs, or a frozen process"
    return job.finding(named, text, steps=comm.steps)


def _without_capture(job: _Job) -> set[int]:
    """Return the ranks whose capture of communication had failed in their last step.

    A rank that leaves communication out by request still reports where it is blocked, and then the
    others that leave it out do so as well.
    """
    steps = job.steps
    rows = steps.epoch == job.epoch.epoch
    last = dict(zip(steps.rank[rows].tolist(), steps.left_out[rows].tolist(), strict=True))
    failed = {rank for rank, left_out in last.items() if left_out & COMMUNICATION_BITS}
    return set() if job.blocked & failed else failed


def _least_advanced(job: _Job, silent: set[int]) -> set[int]:
    """Return the silent ranks without those that came further than a silent partner.

    Tensor-parallel partners do the same work. If their communication is not traced, those that
    wait for a partner inside a forward or backward are silent as well. A span that is still open
    has begun.
    """
    places, spans = _read_places(job.epoch), job.spans
    rows = np.isin(spans.rank, list(silent)) & (spans.epoch == job.epoch.epoch)
    begun = [*zip(spans.step[rows].tolist(), spans.rank[rows].tolist(), strict=True)]
    begun += [
        (int(entry.get("step") or 0), rank) for rank in silent for entry in job.opened.get(rank, ())
    ]
    counts = Counter(begun)
    progress = dict.fromkeys(silent, (NONE, 0))
    progress |= {rank: (step, num) for (step, rank), num in sorted(counts.items())}
    least: dict[tuple[int, int, int], tuple[int, int]] = {}
    for rank, done in progress.items():
        least[places[rank]] = min(done, least.get(places[rank], done))
    return {rank for rank, done in progress.items() if done == least[places[rank]]}


def _read_places(epoch: EpochInfo) -> dict[int, tuple[int, int, int]]:
    """Return the position of each rank, equal for tensor-parallel partners."""
    return {info.rank: (info.coords.pp, info.coords.dp, info.coords.cp) for info in epoch.ranks}


def _odd_partners(job: _Job, suspects: set[int]) -> set[int]:
    """Return the tensor-parallel partners for which suspects wait in untraced communication.

    A partner that has entered another communication, which less than half of its members have, is
    where it should not be. Empty if there is none, or the stack of a suspect does not wait.
    """
    waiting = job.places(suspects)
    if any(waiting.get(rank) is not StackPlace.COLLECTIVE for rank in suspects):
        return set()
    places = _read_places(job.epoch)
    of_suspects = {places[rank] for rank in suspects}
    return {
        entry.rank
        for comm in job.stuck
        if len(comm.entered) < THRESHOLDS.majority_share * len(comm.members)
        for entry in comm.inside
        if places.get(entry.rank) in of_suspects
    }


def _find_left_behind(
    epoch: EpochInfo, blocked: Iterable[Entry], left: Iterable[Entry]
) -> dict[int, Entry]:
    """Return the ranks that have not left a collective that all of its other members have left.

    The others can't have left it without this rank's part, so the rank took part in it, and does
    not see its end: its device or driver fails, or the thread that asks for it is blocked.

    Args:
        blocked: The communications in which ranks are.
        left: Those that ranks have left, by the dumps of their flight recorders.
    """
    ranks_left: dict[Instance, set[int]] = defaultdict(set)
    for entry in left:
        ranks_left[entry.instance].add(entry.rank)
    if not ranks_left:
        return {}
    members = {group.group_id: frozenset(group.members) for group in epoch.groups}
    inside: dict[Instance, dict[int, Entry]] = defaultdict(dict)
    for entry in blocked:
        if not entry.is_p2p and entry.instance in ranks_left:
            inside[entry.instance][entry.rank] = entry
    behind: dict[int, Entry] = {}
    for instance, entries in sorted(inside.items()):
        if ranks_left[instance] | entries.keys() >= members.get(instance.group_id, frozenset()):
            behind = entries | behind
    return behind


def _left_text(job: _Job) -> str:
    by_group: dict[str, list[int]] = defaultdict(list)
    names = {group.group_id: group.name for group in job.epoch.groups}
    for rank, entry in sorted(job.left_behind.items()):
        group_id = entry.instance.group_id
        name = names.get(group_id) or f"{group_id:016x}"
        by_group[f"{entry.name} {entry.instance.seq} of group {name}"].append(rank)
    parts = [f"{_they_are(tuple(ranks))} still in {text}" for text, ranks in by_group.items()]
    others = f" and in {format_count(len(parts) - MAX_ODD, 'more')}" if len(parts) > MAX_ODD else ""
    return (
        f"{', '.join(parts[:MAX_ODD])}{others}, which all other members have left: a device or its"
        " driver that failed, or a thread that no longer asks for the end"
    )


def _find_ended_unlike(
    epoch: EpochInfo, blocked: Iterable[Entry], dumps: Mapping[int, EventRecord]
) -> tuple[_Stuck, ...]:
    """Return the first communication that ranks called unlike in each group, without open ones."""
    groups = {group.group_id: group for group in epoch.groups}
    is_open = {entry.instance for entry in blocked}
    called: dict[Instance, dict[int, Entry]] = defaultdict(dict)
    for entry in _read_dumps(epoch, dumps, "unlike"):
        if entry.instance not in is_open and entry.instance.group_id in groups:
            called[entry.instance][entry.rank] = entry
    unlike = (
        _Stuck(
            instance=instance,
            inside=(),
            entered=tuple(entries.values()),
            members=groups[instance.group_id].members,
            group_name=groups[instance.group_id].name,
        )
        for instance, entries in called.items()
    )
    return tuple(
        sorted(
            (comm for comm in unlike if len(comm.sides) > 1),
            key=lambda comm: (min(entry.start_ns for entry in comm.entered), comm.instance),
        )
    )


def _find_stuck(
    epoch: EpochInfo,
    spans: SpanTable,
    blocked: Iterable[Entry],
    failed: Iterable[Entry],
    left: Iterable[Entry],
) -> tuple[_Stuck, ...]:
    """Return the communications with blocked members, those with most of them first.

    A collective that all have entered is left out if a member waits in another one, which not all
    have entered: on a device it has ended, and its end was not recorded yet.

    Args:
        failed: The last communications of ranks that failed. A library may record one as ended that
            timed out; without all members, or with unlike ones, it can't have ended.
        left: Communications that ranks have left, by the dumps of their flight recorders.
    """
    groups = {group.group_id: group for group in epoch.groups}
    inside: dict[Instance, dict[int, Entry]] = defaultdict(dict)
    for entry in blocked:
        inside[entry.instance][entry.rank] = entry
    certain = frozenset(inside)
    for entry in failed:
        inside[entry.instance].setdefault(entry.rank, entry)
    entered = {instance: dict(ranks) for instance, ranks in inside.items()}
    of_dumps = (entry for entry in left if entry.instance in inside)
    for entry in (*_read_entered(epoch.epoch, spans, inside), *of_dumps):
        entered[entry.instance].setdefault(entry.rank, entry)
    communications = []
    for instance, ranks in inside.items():
        group = groups.get(instance.group_id)
        members = () if group is None else group.members
        if any(entry.is_p2p for entry in ranks.values()):
            members = () if NONE in instance[2:] else instance[2:]
        comm = _Stuck(
            instance=instance,
            inside=tuple(ranks.values()),
            entered=tuple(entered[instance].values()),
            members=members,
            group_name="" if group is None else group.name,
        )
        if instance in certain or comm.missing or len(comm.sides) > 1:
            communications.append(comm)
    waiting = {entry.rank for comm in communications if comm.missing for entry in comm.inside}
    kept = (
        comm
        for comm in communications
        if comm.missing
        or comm.inside[0].is_p2p
        or len(comm.sides) > 1
        or waiting.isdisjoint(entry.rank for entry in comm.entered)
    )
    return tuple(sorted(kept, key=lambda comm: (-len(comm.inside), comm.instance)))


def _evidence(job: _Job, shown: _Stuck, culprits: Iterable[int]) -> str:
    named = set(culprits)
    missing = format_ranks(tuple(sorted(shown.missing & named)))
    inside = tuple(sorted(entry.rank for entry in shown.inside))
    there = f"{_they_are(inside)} blocked"
    elsewhere = [comm for comm in job.stuck if {entry.rank for entry in comm.inside} & named]
    if elsewhere:
        reason = OTHER_ORDER
        if not all(comm.members for comm in elsewhere):
            reason = "the other side of that is unknown"
        text = f"no rank is silent: {there} in {shown}, which {missing} has not entered, because it"
        text += f" is blocked in another communication, {elsewhere[0]}; {reason}"
    else:
        text = f"{missing} never entered {shown}, in which {there}"
        for rank in sorted(named - shown.missing - job.blocked)[:MAX_ODD]:
            also = next((comm for comm in job.stuck if rank in comm.missing), None)
            text += f"; rank {rank} never entered {also}" if also else ""
        last = job.last_step(named)
        text += "" if last is None else f"; the last step that it finished is {last}"
        text += _odd_step_text(job, named)
    group_id = shown.instance.group_id
    text += _dump_text(job, shown, sorted(named))
    num_more = sum(bool(comm.missing) for comm in job.stuck if comm.instance.group_id != group_id)
    if num_more:
        text += f"; members are missing in {format_count(num_more, 'other communication')}"
    return text


def _odd_step_text(job: _Job, named: Collection[int]) -> str:
    """Return in which step a rank first ran more or fewer passes than all others, who agree; "".

    A rank that skips a batch calls one collective less from then on, which hangs at the end of the
    data: what it skipped is steps before. Ranks that differ in most steps have other work.
    """
    if len(named) != 1:
        return ""
    (culprit,) = named
    spans = job.spans
    rows = np.isin(spans.kind, list(PASSES)) & (spans.epoch == job.epoch.epoch) & (spans.step >= 0)
    ended = np.isin(spans.step, job.steps.step[job.steps.epoch == job.epoch.epoch])
    rows = np.flatnonzero(rows & ended & (spans.flags & UNFINISHED == 0))
    ranks, steps = sorted_unique(spans.rank[rows]), sorted_unique(spans.step[rows])
    if culprit not in ranks or len(ranks) == 1:
        return ""
    odd: dict[int, list[str]] = {}
    for kind, noun in PASSES.items():
        mine = rows[spans.kind[rows] == kind]
        number = np.zeros((len(ranks), len(steps)), dtype=np.int64)
        at = np.searchsorted(ranks, spans.rank[mine]), np.searchsorted(steps, spans.step[mine])
        np.add.at(number, at, 1)
        own, others = number[ranks == culprit][0], number[ranks != culprit]
        agree = (others == others[0]).all(axis=0)
        for column in np.flatnonzero(agree & (own != others[0])).tolist():
            text = f"{own[column]} {noun} (the others {others[0, column]})"
            odd.setdefault(int(steps[column]), []).append(text)
    last = job.last_step(named)
    known = sorted(step for step in odd if last is None or step <= last)
    if not known or len(known) > THRESHOLDS.majority_share * len(steps):
        return ""
    return f"; in step {known[0]} it ran {' and '.join(odd[known[0]])}"


def _dump_text(job: _Job, shown: _Stuck, named: list[int]) -> str:
    if not job.dumps:
        return ""
    without = tuple(rank for rank in named if rank in job.without_dump)
    queued = tuple(
        entry.rank
        for entry in _read_dumps(job.epoch, job.dumps, "queued")
        if entry.rank in named and entry.instance == shown.instance
    )
    text = f"; {format_ranks(without)} wrote no dump" if without else ""
    idle = tuple(
        rank
        for rank in named
        if rank in job.dumps and rank not in without and not job.dumps[rank].data.get("open")
    )
    if idle:
        text += f"; no communication is in flight in the dump of {format_ranks(idle)}"
    if queued:
        text += f"; {format_ranks(queued)} had launched it, but the device has not begun it"
    text += f"; {_left_text(job)}" if job.left_behind.keys() & set(named) else ""
    text += "".join(f"; {stop}" for stop in _stop_texts(job, named)[:MAX_ODD])
    of_named = {rank: event for rank, event in job.dumps.items() if rank in named}
    for entry in sorted(_read_dumps(job.epoch, of_named, "last"))[:1]:
        place = of_named[entry.rank].place
        text += f"; rank {entry.rank} last called {entry.name} {entry.instance.seq}"
        text += f" at {place}" if place else ""
    return text


def _stop_texts(job: _Job, named: Collection[int]) -> list[str]:
    """Return in which group each named rank stopped furthest before the others, by the dumps."""
    called: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, event in job.dumps.items():
        numbers = event.data.get("called")
        for group_id, seq in numbers.items() if isinstance(numbers, dict) else ():
            if isinstance(seq, int):
                called[group_id][rank] = seq
    furthest: dict[int, tuple[int, str]] = {}
    for group in job.epoch.groups:
        seqs = called.get(f"{group.group_id:016x}", {})
        least = min((seq for rank, seq in seqs.items() if rank not in named), default=0)
        for rank in seqs.keys() & set(named):
            text = (
                f"rank {rank} stopped at {seqs[rank]} of group {group.name}, the others at {least}"
            )
            if least - seqs[rank] > furthest.get(rank, (0, ""))[0]:
                furthest[rank] = least - seqs[rank], text
    return [furthest[rank][1] for rank in sorted(furthest)]


def _read_dumps(epoch: EpochInfo, dumps: Mapping[int, EventRecord], state: str) -> Iterable[Entry]:
    """Yield the communications of a state in the dumps of flight recorders.

    Args:
        state: ``open``, ``queued`` (launched, and not begun by the device), ``ended``, or ``last``:
            the last that was called.
    """
    members = {group.group_id: group.members for group in epoch.groups}
    for rank, event in dumps.items():
        entries: Any = event.data.get(state)
        listed = entries if isinstance(entries, list) else [entries]
        dicts = (entry for entry in listed if isinstance(entry, dict))
        yield from _read_open(rank, dicts, members)


def _find_blocked(
    epoch: EpochInfo, spans: SpanTable, opened: Mapping[int, list[dict[str, Any]]]
) -> Iterable[Entry]:
    unfinished = _entries(epoch.epoch, spans, (spans.flags & UNFINISHED) != 0)
    blocked = {(entry.rank, entry.instance): entry for entry in unfinished}
    members = {group.group_id: group.members for group in epoch.groups}
    for rank, entries in opened.items():
        for entry in _read_open(rank, entries, members):
            blocked.setdefault((rank, entry.instance), entry)
    return blocked.values()


def _last_entries(
    epoch: int, spans: SpanTable, steps: StepTable, ranks: list[int]
) -> Iterable[Entry]:
    """Return the communications of these ranks in the steps that they have not finished."""
    rows = steps.epoch == epoch
    last = dict(zip(steps.rank[rows].tolist(), steps.step[rows].tolist(), strict=True))
    finished = {rank: last.get(rank, NONE) for rank in ranks}
    traced = sorted_unique(spans.rank)
    limit = np.array([finished.get(rank, MAX_STEP) for rank in traced.tolist()], dtype=np.int64)
    return _entries(epoch, spans, spans.step > limit[np.searchsorted(traced, spans.rank)])


def _read_entered(epoch: int, spans: SpanTable, wanted: Iterable[Instance]) -> Iterable[Entry]:
    wanted = frozenset(wanted)
    groups = np.array([instance.group_id for instance in wanted], dtype=np.uint64)
    seqs = np.array([instance.seq for instance in wanted], dtype=np.int64)
    chosen = np.isin(spans.seq, seqs) & np.isin(spans.group_id, groups)
    return (entry for entry in _entries(epoch, spans, chosen) if entry.instance in wanted)


def _entries(epoch: int, spans: SpanTable, chosen: NDArray[np.bool_]) -> Iterable[Entry]:
    is_wait = spans.kind == KIND_CODES[SpanKind.WAIT]
    chosen = chosen & (spans.epoch == epoch) & (spans.group_id != 0) & ~is_wait
    pair = is_p2p(spans)
    for row in np.flatnonzero(chosen).tolist():
        sides = (spans.src_rank[row], spans.dst_rank[row]) if pair[row] else (NONE, NONE)
        yield Entry(
            rank=int(spans.rank[row]),
            step=int(spans.step[row]),
            instance=Instance(int(spans.group_id[row]), int(spans.seq[row]), *map(int, sides)),
            kind=KINDS[spans.kind[row]].value,
            name=spans.names[spans.name[row]],
            num_bytes=max(int(spans.num_bytes[row]), 0),
        )


def _open_spans(
    epoch: int, events: Iterable[EventRecord], steps: StepTable
) -> dict[int, list[dict[str, Any]]]:
    """Return, by rank, the open spans in its last event that reports some and is not stale."""
    rows = steps.epoch == epoch
    ended_ns = dict(zip(steps.rank[rows].tolist(), steps.end_ns[rows].tolist(), strict=True))
    opened = {}
    for event in events:
        # A stalled rank that goes on finishes steps `STALL_NS` later at the earliest.
        has_gone_on = ended_ns.get(event.rank, 0) > event.at_ns + STALL_NS // 2
        if event.kind == "lost" or (event.kind == "stalled" and not has_gone_on):
            opened[event.rank] = event.open_spans
    return opened


def _read_open(
    rank: int, entries: Iterable[dict[str, Any]], members: Mapping[int, tuple[int, ...]]
) -> Iterable[Entry]:
    """Yield the communications among a rank's open spans; malformed entries are skipped.

    Args:
        entries: Its open spans. In a group of two, the sides of a p2p are known if they lack them.
    """
    for entry in entries:
        try:
            group_id, seq, step = int(entry["group_id"], 16), int(entry["seq"]), int(entry["step"])
            num_bytes, start_ns = (
                max(int(entry.get("num_bytes", 0)), 0),
                int(entry.get("start_ns", 0)),
            )
            sides = tuple(map(int, entry.get("sides") or ()))
        except (KeyError, TypeError, ValueError):
            continue
        if not group_id or seq < 0:
            continue
        communication = Entry(
            rank=rank,
            step=step,
            instance=Instance(group_id, seq),
            kind=str(entry.get("kind", "")),
            name=str(entry.get("name", "")),
            num_bytes=num_bytes,
            dtype=str(entry.get("dtype") or ""),
            start_ns=start_ns,
        )
        pair = members.get(group_id, ())
        if not sides and communication.is_p2p and len(pair) == 2 and rank in pair:  # noqa: PLR2004
            (other,) = set(pair) - {rank}  # of an older tracer
            is_send = communication.kind == SpanKind.PP_SEND or communication.name == "send"
            sides = (rank, other) if is_send else (other, rank)
        if sides:
            communication = communication._replace(instance=Instance(group_id, seq, *sides[:2]))
        yield communication
