"""Hangs: ranks that never entered the collective in which the others are blocked."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from rankscope.tracer.span import (
    COMM_KINDS,
    KIND_CODES,
    KINDS,
    NONE,
    SpanFlag,
    SpanKind,
    pack_kinds,
)

from ..readers.waits import is_p2p
from ..report.report import Finding
from ..report.text import format_count, format_ranks
from ..statistics.thresholds import THRESHOLDS
from .crash import ExitClass, find_failures, is_silence
from .detector import Cause, insufficient

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from ..trace.context import EventRecord, RunContext
    from ..trace.tables import EpochInfo, RunInfo, SpanTable, StepTable
    from .crash import Failure
    from .detector import Record


COMMUNICATION_BITS = np.uint32(pack_kinds(COMM_KINDS))

P2P = frozenset({SpanKind.PP_SEND, SpanKind.PP_RECV})
P2P_NAMES = frozenset({"send", "recv", "recv_any_source"})
"""Torch's names of p2p operations. In a group of another axis they have that axis's kind."""

UNFINISHED = int(SpanFlag.OPEN | SpanFlag.ERROR)

Instance = tuple[int, int, int, int]
"""(group_id, seq, src_rank, dst_rank): equal for all members of one communication."""

CAUSE = Cause(
    name="hang",
    one="hangs",
    several="hang",
    sentence="The job hangs",
    ends_run=True,
    has_place=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """A rank inside a communication that it has not left."""

    rank: int
    group_id: int
    seq: int
    kind: str
    name: str
    step: int
    src_rank: int = NONE
    """Source of a p2p; `NONE` for a collective, or if it is unknown."""

    dst_rank: int = NONE

    @property
    def is_p2p(self) -> bool:
        """Return whether it has two sides, known or unknown."""
        is_known = NONE not in (self.src_rank, self.dst_rank)
        return is_known or self.kind in P2P or self.name in P2P_NAMES

    @property
    def instance(self) -> Instance:
        """Return the communication, equal for all of its members."""
        return self.group_id, self.seq, self.src_rank, self.dst_rank


@dataclass(frozen=True, slots=True, kw_only=True)
class _StuckInstance:
    """A communication with blocked members and missing members."""

    blocked: tuple[Blocked, ...]
    missing: frozenset[int]
    members: tuple[int, ...]
    group_name: str


def detect(record: Record) -> tuple[Finding, ...]:
    """Return the hang of each epoch that had one."""
    return find_hangs(record.run, record.spans, record.steps, record.context)


def find_hangs(
    run: RunInfo, spans: SpanTable, steps: StepTable, context: RunContext
) -> tuple[Finding, ...]:
    """Find, in each epoch, the ranks that are missing where the others are blocked.

    When communication times out, the healthy ranks report the operation in which they are blocked,
    and the silent rank is the culprit. Not named are ranks that are blocked elsewhere, because they
    wait themselves, and silent tensor-parallel partners that came further in their step. While a
    silent rank writes a checkpoint, nothing hangs. If no rank is silent, and a rank has been
    stalled in a communication that all members have entered, its transfer does not end
    (`_find_entered_by_all`). Otherwise the ranks entered their collectives in different orders, and
    those that are missing are named.

    Blocked ranks are those with spans flagged open or error, or with open spans in the events
    ``stalled`` and ``lost``.

    The confidence is not calibrated: `ended_confidence` times the share of the other members that
    are blocked in the collective, times `doubt_factor` if the silent process is gone, times
    `doubt_factor` if records were dropped; at most `undecided_certainty` if no rank is
    silent.

    Args:
        run: Groups and ranks.
        spans: Spans of the steps that are analysed.
        steps: The same steps: an event of a rank that has finished a later step is stale.
        context: Events and exits.

    Source:
        arXiv 2402.15627, section 4.3: the rank that logged no operation.
    """
    found = (_find_hang(run, epoch, spans, steps, context) for epoch in run.epochs)
    return tuple(finding for finding in found if finding is not None)


def _find_hang(
    run: RunInfo, epoch: EpochInfo, spans: SpanTable, steps: StepTable, context: RunContext
) -> Finding | None:
    failures = find_failures(epoch, context)
    if any(not failure.follows for failure in failures) and not is_silence(failures):
        return None  # a crash, which is why the others are blocked
    ended = {one.rank for one in context.exits if one.epoch == epoch.epoch and one.state == "ended"}
    known = find_blocked_ranks(epoch.epoch, spans, steps, context)
    blocked = [one for one in known if one.rank not in ended]
    stuck = _find_stuck(epoch, blocked, find_entered_ranks(epoch.epoch, spans, blocked))
    missing = frozenset[int]().union(*(one.missing for one in stuck))
    if not missing - {one.rank for one in blocked}:
        entered_by_all = _find_entered_by_all(run, epoch, blocked, failures, context)
        if entered_by_all is not None or not missing:
            return entered_by_all
    traced = {info.rank for info in epoch.ranks} - _without_capture(epoch.epoch, steps, blocked)
    silent = missing - {one.rank for one in blocked}
    if silent and not silent & traced:
        return insufficient(
            f"ranks are blocked in {_format_instance(stuck[0])}, and the communication of"
            f" {format_ranks(tuple(sorted(silent)))} was not recorded, so it is unknown which rank"
            " is missing: trace every rank"
        )
    lost = {failure.ended.rank for failure in failures if failure.reason is ExitClass.LOST}
    work = open_work(epoch.epoch, context)
    if any(SpanKind.CHECKPOINT in work.get(rank, ()) for rank in silent):
        return None
    culprits = tuple(sorted(_least_advanced(epoch, silent & traced, spans) or missing & traced))
    if not culprits:
        return None
    finding = _finding(run, stuck, culprits, is_cycle=not silent, lost=lost, steps=steps)
    after = "; it had already ended without an error" if ended & set(culprits) else ""
    return replace(finding, evidence=finding.evidence + _work_text(culprits, work) + after)


def _find_entered_by_all(
    run: RunInfo,
    epoch: EpochInfo,
    blocked: Iterable[Blocked],
    failures: Iterable[Failure],
    context: RunContext,
) -> Finding | None:
    """Return the hang in a communication that all members have entered; the earliest one.

    That all are inside is a hang only if one of them was stalled there or timed out. The transfer
    itself does not end then, or a process is frozen. Each process reports where its own step
    lasts long (event ``stack``): if most members did, the others are frozen.
    """
    events = [event for event in context.events if event.epoch == epoch.epoch]
    stalled = {(event.rank, event.data.get("step")) for event in events if event.kind == "stalled"}
    timed_out = {one.ended.rank for one in failures if one.reason is ExitClass.TIMEOUT}
    groups = {group.group_id: group for group in epoch.groups}
    inside: dict[Instance, dict[int, Blocked]] = defaultdict(dict)
    for one in blocked:
        inside[one.instance][one.rank] = one
    for instance in sorted(inside, key=lambda each: each[1]):
        found, group = inside[instance], groups.get(instance[0])
        shown = next(iter(found.values()))
        members = _members(shown, () if group is None else group.members)
        places = {(rank, one.step) for rank, one in found.items()}
        is_silent = timed_out & found.keys() or stalled & places
        if len(members) > 1 and set(members) == found.keys() and is_silent:
            break
    else:
        return None
    reported = {
        event.rank
        for event in events
        if event.kind == "stack"
        and event.rank in found
        and event.data.get("step") == found[event.rank].step
    }
    num = len(members)
    is_known = num > len(reported) > num / 2
    frozen = tuple(sorted(set(members) - reported)) if is_known else ()
    confidence = THRESHOLDS.ended_confidence * (THRESHOLDS.doubt_factor if run.num_dropped else 1.0)
    entered = _StuckInstance(
        blocked=(shown,),
        missing=frozenset(),
        members=members,
        group_name="" if group is None else group.name,
    )
    text = f"all {num:,} members have entered {_format_instance(entered)}, which does not end: "
    text += (
        f"{format_ranks(frozen)} {'is' if len(frozen) == 1 else 'are'} frozen in it, without the"
        f" reports of a long step that the other {len(reported):,} sent"
        if frozen
        else "a link, an adapter or a device of theirs, or a frozen process"
    )
    steps = [one.step for one in found.values() if one.step >= 0]
    return Finding(
        cause=CAUSE.name,
        ranks=frozen,
        steps=(min(steps), max(steps)) if steps else None,
        confidence=confidence,
        evidence=text,
    )


def _without_capture(epoch: int, steps: StepTable, blocked: Iterable[Blocked]) -> set[int]:
    """Return the ranks whose capture of communication had failed in their last step.

    A rank that leaves communication out by request still reports where it is blocked, and then the
    others that leave it out do so as well.
    """
    rows = np.flatnonzero(steps.epoch == epoch)
    rows = rows[np.lexsort((steps.step[rows], steps.rank[rows]))]
    rank = steps.rank[rows]
    is_last = np.append(rank[1:] != rank[:-1], np.ones(min(len(rank), 1), dtype=np.bool_))
    is_left_out = is_last & ((steps.left_out[rows] & COMMUNICATION_BITS) != 0)
    found = set(rank[is_left_out].tolist())
    return set() if any(one.rank in found for one in blocked) else found


def _least_advanced(
    epoch: EpochInfo, silent: frozenset[int] | set[int], spans: SpanTable
) -> set[int]:
    """Return the silent ranks without those that came further than a silent partner.

    Tensor-parallel partners do the same work. If their communication is not traced, those that
    wait for a partner inside a forward or backward are silent as well.
    """
    places = {info.rank: (info.coords.pp, info.coords.dp, info.coords.cp) for info in epoch.ranks}
    rows = np.isin(spans.rank, list(silent)) & (spans.epoch == epoch.epoch)
    progress = dict.fromkeys(silent, (NONE, 0))
    for step in np.unique(spans.step[rows])[-2:].tolist():
        ranks, counts = np.unique(spans.rank[rows & (spans.step == step)], return_counts=True)
        progress.update(zip(ranks.tolist(), ((step, num) for num in counts.tolist()), strict=True))
    least: dict[tuple[int, int, int], tuple[int, int]] = {}
    for rank, done in progress.items():
        least[places[rank]] = min(done, least.get(places[rank], done))
    return {rank for rank, done in progress.items() if done == least[places[rank]]}


def _find_stuck(
    epoch: EpochInfo, blocked: Iterable[Blocked], entered: Mapping[Instance, set[int]]
) -> tuple[_StuckInstance, ...]:
    """Return the communications with missing members, those with most blocked members first."""
    groups = {group.group_id: group for group in epoch.groups}
    by_instance: dict[Instance, list[Blocked]] = defaultdict(list)
    for one in blocked:
        by_instance[one.instance].append(one)
    found = []
    for instance, inside in by_instance.items():
        group = groups.get(instance[0])
        members = _members(inside[0], () if group is None else group.members)
        missing = frozenset(members) - {one.rank for one in inside} - entered.get(instance, set())
        if missing:
            found.append(
                _StuckInstance(
                    blocked=tuple(inside),
                    missing=missing,
                    members=members,
                    group_name=group.name if group is not None else "",
                )
            )
    return tuple(sorted(found, key=lambda one: (-len(one.blocked), one.blocked[0].instance)))


def _members(one: Blocked, group: tuple[int, ...]) -> tuple[int, ...]:
    """Return the members of a communication; empty if they are unknown."""
    if not one.is_p2p:
        return group
    sides = (one.src_rank, one.dst_rank)
    return sides if NONE not in sides else ()


def _finding(
    run: RunInfo,
    stuck: tuple[_StuckInstance, ...],
    culprits: tuple[int, ...],
    *,
    is_cycle: bool,
    lost: set[int],
    steps: StepTable,
) -> Finding:
    shown = next(one for one in stuck if one.missing & set(culprits))
    num_others = len(shown.members) - len(shown.missing & set(culprits))
    confidence = THRESHOLDS.ended_confidence * len(shown.blocked) / max(num_others, 1)
    confidence *= THRESHOLDS.doubt_factor if lost & set(culprits) else 1.0
    confidence *= THRESHOLDS.doubt_factor if run.num_dropped else 1.0
    numbers = [one.step for one in shown.blocked if one.step >= 0]
    return Finding(
        cause=CAUSE.name,
        ranks=culprits,
        steps=(min(numbers), max(numbers)) if numbers else None,
        confidence=min(confidence, THRESHOLDS.undecided_certainty if is_cycle else 1.0),
        evidence=_evidence(shown, culprits, len(stuck), steps, is_cycle=is_cycle),
    )


def _evidence(
    shown: _StuckInstance,
    culprits: tuple[int, ...],
    num_stuck: int,
    steps: StepTable,
    *,
    is_cycle: bool,
) -> str:
    missing = format_ranks(tuple(sorted(shown.missing & set(culprits))))
    blocked = format_ranks(tuple(sorted(one.rank for one in shown.blocked)))
    verb = "is" if len(shown.blocked) == 1 else "are"
    if is_cycle:
        text = (
            f"no rank is silent: {blocked} {verb} blocked in {_format_instance(shown)}, which"
            f" {missing} has not entered, because it is blocked in another collective; the order"
            " of collectives differs between ranks"
        )
    else:
        text = (
            f"{missing} never entered {_format_instance(shown)}, in which {blocked} {verb} blocked"
        )
        text += _last_step_text(culprits, steps)
    if num_stuck > 1:
        text += f"; members are missing in {format_count(num_stuck - 1, 'other communication')}"
    return text


def _format_instance(shown: _StuckInstance) -> str:
    one = shown.blocked[0]
    if one.is_p2p:
        return f"{one.name} {one.seq} ({one.kind}) from rank {one.src_rank} to rank {one.dst_rank}"
    return (
        f"{one.name} {one.seq} ({one.kind}) of group {shown.group_name or f'{one.group_id:016x}'}"
        f" with {len(shown.members):,} ranks"
    )


def _work_text(culprits: tuple[int, ...], work: Mapping[int, tuple[str, ...]]) -> str:
    kinds = sorted({kind for rank in culprits for kind in work.get(rank, ()) if kind})
    return f"; it was inside {', '.join(kinds)}" if kinds else ""


def _last_step_text(culprits: tuple[int, ...], steps: StepTable) -> str:
    rows = np.isin(steps.rank, culprits)
    if not rows.any():
        return ""
    return f"; the last step that it finished is {int(steps.step[rows].max())}"


def find_blocked_ranks(
    epoch: int, spans: SpanTable, steps: StepTable, context: RunContext
) -> tuple[Blocked, ...]:
    """Return each communication that a rank has entered and not left.

    Args:
        epoch: The epoch.
        spans: Spans of the steps that are analysed.
        steps: The same steps.
        context: Events of the run.
    """
    found = {(one.rank, one.instance): one for one in _read_spans(epoch, spans)}
    rows = steps.epoch == epoch
    finished = dict(zip(steps.rank[rows].tolist(), steps.step[rows].tolist(), strict=True))
    for event in _latest_events(epoch, context).values():
        for one in _read_event(event):
            if one.step > finished.get(one.rank, NONE):
                found.setdefault((one.rank, one.instance), one)
    return tuple(found.values())


def open_work(epoch: int, context: RunContext) -> Mapping[int, tuple[str, ...]]:
    """Return, by rank, the kinds of the open spans that its last event reported."""
    return {
        rank: tuple(sorted({str(entry.get("kind", "")) for entry in _open_entries(event)}))
        for rank, event in _latest_events(epoch, context).items()
    }


def _latest_events(epoch: int, context: RunContext) -> Mapping[int, EventRecord]:
    """Return the last event of each rank that reports open spans."""
    return {
        event.rank: event
        for event in context.events
        if event.epoch == epoch and event.kind in ("stalled", "lost")
    }


def _read_spans(epoch: int, spans: SpanTable) -> Iterable[Blocked]:
    unfinished = (spans.flags & UNFINISHED) != 0
    is_wait = spans.kind == KIND_CODES[SpanKind.WAIT]
    chosen = (spans.epoch == epoch) & (spans.group_id != 0) & unfinished & ~is_wait
    rows = np.flatnonzero(chosen)
    for row, instance in zip(rows.tolist(), _instances(spans, rows), strict=True):
        group_id, seq, src_rank, dst_rank = instance
        yield Blocked(
            rank=int(spans.rank[row]),
            group_id=group_id,
            seq=seq,
            src_rank=src_rank,
            dst_rank=dst_rank,
            kind=KINDS[spans.kind[row]].value,
            name=spans.names[spans.name[row]],
            step=int(spans.step[row]),
        )


def _instances(spans: SpanTable, rows: NDArray[np.int64]) -> list[Instance]:
    """Return the communication of each of these rows."""
    pair = is_p2p(spans)[rows]
    columns = (
        spans.group_id[rows],
        spans.seq[rows],
        np.where(pair, spans.src_rank[rows], NONE),
        np.where(pair, spans.dst_rank[rows], NONE),
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _read_event(event: EventRecord) -> Iterable[Blocked]:
    """Yield the open communications that an event reports; malformed entries are skipped."""
    for entry in _open_entries(event):
        try:
            group_id, seq, step = int(entry["group_id"], 16), int(entry["seq"]), int(entry["step"])
        except (KeyError, TypeError, ValueError):
            continue
        if group_id and seq >= 0:
            yield Blocked(
                rank=event.rank,
                group_id=group_id,
                seq=seq,
                kind=str(entry.get("kind", "")),
                name=str(entry.get("name", "")),
                step=step,
            )


def _open_entries(event: EventRecord) -> list[dict[str, Any]]:
    entries: Any = event.data.get("open")
    if not isinstance(entries, list):
        return []
    return [entry for entry in entries if isinstance(entry, dict)]


def find_entered_ranks(
    epoch: int, spans: SpanTable, blocked: Iterable[Blocked]
) -> Mapping[Instance, set[int]]:
    """Return, by communication with blocked ranks, all ranks with a span of it."""
    wanted = {one.instance for one in blocked}
    groups = np.array(sorted({instance[0] for instance in wanted}), dtype=np.uint64)
    seqs = np.array(sorted({instance[1] for instance in wanted}), dtype=np.int64)
    is_wait = spans.kind == KIND_CODES[SpanKind.WAIT]
    chosen = (spans.epoch == epoch) & np.isin(spans.seq, seqs) & np.isin(spans.group_id, groups)
    rows = np.flatnonzero(chosen & ~is_wait)
    found: dict[Instance, set[int]] = defaultdict(set)
    for instance, rank in zip(_instances(spans, rows), spans.rank[rows].tolist(), strict=True):
        found[instance].add(rank)
    return found
