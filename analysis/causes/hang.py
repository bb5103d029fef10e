"""Hangs: which rank never entered the collective in which the others stand."""

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
from ..report.text import format_ranks
from .crash import ExitClass, find_failures, is_silence
from .detector import INSUFFICIENT_EVIDENCE, Cause

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from ..trace.context import EventRecord, RunContext
    from ..trace.tables import EpochInfo, RunInfo, SpanTable, StepTable
    from .detector import Record

CONFIDENCE = 0.95
"""Every other member stands in the collective."""

LOST_FACTOR = 0.8
"""The silent rank's process is gone: it may have been killed before the others timed out."""

DROPPED_FACTOR = 0.8
"""Records of this run were dropped: that of the silent rank's entry may be among them."""

MISMATCH_CONFIDENCE = 0.5
"""Nobody is silent: ranks stand in collectives that others have not entered, in a circle."""

COMMUNICATION_BITS = np.uint32(pack_kinds(COMM_KINDS))

P2P = frozenset({SpanKind.PP_SEND, SpanKind.PP_RECV})

P2P_NAMES = frozenset({"send", "recv", "recv_any_source"})
"""What torch calls them; inside a group of another axis they have that axis's kind."""

UNFINISHED = int(SpanFlag.OPEN | SpanFlag.ERROR)

Instance = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _StuckInstance:
    """One communication with members inside and members missing."""

    inside: tuple[Blocked, ...]
    missing: frozenset[int]
    members: tuple[int, ...]
    group_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """One rank inside a communication that it has not left."""

    rank: int
    group_id: int
    seq: int
    kind: str
    name: str
    step: int
    src_rank: int = NONE
    """Of a p2p; `NONE` where it is a collective, or nobody told."""

    dst_rank: int = NONE

    @property
    def is_p2p(self) -> bool:
        """Whether it has two sides; which they are may not be known."""
        told = NONE not in (self.src_rank, self.dst_rank)
        return told or self.kind in P2P or self.name in P2P_NAMES

    @property
    def instance(self) -> Instance:
        """What all members of one communication share."""
        return self.group_id, self.seq, self.src_rank, self.dst_rank


CAUSE = Cause(
    name="hang",
    one="hangs",
    several="hang",
    ends_run=True,
    has_place=True,
)


def detect(record: Record) -> tuple[Finding, ...]:
    """Return the hang of each epoch that had one."""
    return find_hangs(record.run, record.spans, record.steps, record.context)


def find_hangs(
    run: RunInfo, spans: SpanTable, steps: StepTable, context: RunContext
) -> tuple[Finding, ...]:
    """Name, for each epoch, the ranks that are missing where the others stand.

    On a communication timeout the healthy ranks tell the operation that they
    stand in, so the silent one is the culprit. A rank that is missing in one
    collective because it stands in another waits itself, and is not accused, nor
    is a silent tensor-parallel mate that came further in its step; while a
    silent rank writes a checkpoint the others wait for it, and nothing hangs;
    where that leaves nobody, the ranks entered their collectives in different
    orders, and those that are missing are named as such. What a rank stands in
    is told by spans flagged open or error, and by the open spans in the events
    ``stalled`` and ``lost``.

    Confidence, not calibrated: 0.95 x the share of the other members that stand
    in the collective or left it, x 0.8 where the silent process is gone, x 0.8
    where records were dropped; 0.5 for a circle.

    Args:
        run: Groups and ranks.
        spans: Of the steps that are looked at.
        steps: Of the same steps: an event that a later step has overtaken is stale.
        context: Events and exits.

    Source:
        arXiv 2402.15627, section 4.3: the rank that logged no operation.
    """
    found = (_epoch_hang(run, epoch, spans, steps, context) for epoch in run.epochs)
    return tuple(finding for finding in found if finding is not None)


def _epoch_hang(
    run: RunInfo, epoch: EpochInfo, spans: SpanTable, steps: StepTable, context: RunContext
) -> Finding | None:
    deaths = find_failures(epoch, context)
    if any(not death.follows for death in deaths) and not is_silence(deaths):
        return None  # a crash: the ranks that stand still do so because of it
    ended = {one.rank for one in context.exits if one.epoch == epoch.epoch and one.state == "ended"}
    told = find_blocked_ranks(epoch.epoch, spans, steps, context)
    standing = [one for one in told if one.rank not in ended]
    stuck = _stuck_instances(epoch, standing, find_entered_ranks(epoch.epoch, spans, standing))
    missing = frozenset[int]().union(*(one.missing for one in stuck))
    if not missing:
        return None
    traced = {info.rank for info in epoch.ranks} - _without_capture(epoch.epoch, steps, standing)
    silent = missing - {one.rank for one in standing}
    if silent and not silent & traced:
        return _untraced(stuck[0], tuple(sorted(silent)))
    lost = {death.ended.rank for death in deaths if death.reason is ExitClass.LOST}
    work = open_work(epoch.epoch, context)
    if any(SpanKind.CHECKPOINT in work.get(rank, ()) for rank in silent):
        return None
    behind = _least_advanced(epoch, silent & traced, spans)
    culprits = tuple(sorted(behind or missing & traced))
    if not culprits:
        return None
    finding = _finding(run, stuck, culprits, is_circle=not silent, lost=lost, steps=steps)
    early = "; it had ended well by then" if ended & set(culprits) else ""
    return replace(finding, evidence=finding.evidence + _own_work(culprits, work) + early)


def _without_capture(epoch: int, steps: StepTable, standing: Iterable[Blocked]) -> set[int]:
    """Return the ranks whose capture of communication had failed when they were last heard of.

    Whoever left it out by request still tells where it stands, and so do the others.
    """
    rows = np.flatnonzero(steps.epoch == epoch)
    rows = rows[np.lexsort((steps.step[rows], steps.rank[rows]))]
    rank = steps.rank[rows]
    is_last = np.append(rank[1:] != rank[:-1], np.ones(min(len(rank), 1), dtype=np.bool_))
    unheard = is_last & ((steps.left_out[rows] & COMMUNICATION_BITS) != 0)
    silent = set(rank[unheard].tolist())
    return set() if any(one.rank in silent for one in standing) else silent


def _least_advanced(
    epoch: EpochInfo, silent: frozenset[int] | set[int], spans: SpanTable
) -> set[int]:
    """Leave out silent ranks that came further in their last step than a silent mate.

    Tensor-parallel mates do the same work; where their own communication is not
    traced, those that wait for a mate inside a forward or backward are silent, too.
    """
    places = {info.rank: (info.coords.pp, info.coords.dp, info.coords.cp) for info in epoch.ranks}
    rows = np.isin(spans.rank, list(silent)) & (spans.epoch == epoch.epoch)
    progress = dict.fromkeys(silent, (NONE, 0))
    for step in np.unique(spans.step[rows])[-2:].tolist():
        ranks, counts = np.unique(spans.rank[rows & (spans.step == step)], return_counts=True)
        progress.update(zip(ranks.tolist(), ((step, num) for num in counts.tolist()), strict=True))
    least: dict[tuple[int, int, int], tuple[int, int]] = {}
    for rank, came in progress.items():
        least[places[rank]] = min(came, least.get(places[rank], came))
    return {rank for rank, came in progress.items() if came == least[places[rank]]}


def _stuck_instances(
    epoch: EpochInfo, standing: Iterable[Blocked], entered: Mapping[Instance, set[int]]
) -> tuple[_StuckInstance, ...]:
    """Return the communications that lack somebody, that with most members inside first."""
    groups = {group.group_id: group for group in epoch.groups}
    inside: dict[Instance, list[Blocked]] = defaultdict(list)
    for one in standing:
        inside[one.instance].append(one)
    found = []
    for instance, there in inside.items():
        group = groups.get(instance[0])
        members = _members(there[0], () if group is None else group.members)
        missing = frozenset(members) - {one.rank for one in there} - entered.get(instance, set())
        if missing:
            found.append(
                _StuckInstance(
                    inside=tuple(there),
                    missing=missing,
                    members=members,
                    group_name=group.name if group is not None else "",
                )
            )
    return tuple(sorted(found, key=lambda one: (-len(one.inside), one.inside[0].instance)))


def _members(one: Blocked, of_group: tuple[int, ...]) -> tuple[int, ...]:
    """Return who takes part; nobody where that is not known."""
    if not one.is_p2p:
        return of_group
    sides = (one.src_rank, one.dst_rank)
    return sides if NONE not in sides else ()


def _finding(
    run: RunInfo,
    stuck: tuple[_StuckInstance, ...],
    culprits: tuple[int, ...],
    *,
    is_circle: bool,
    lost: set[int],
    steps: StepTable,
) -> Finding:
    shown = next(one for one in stuck if one.missing & set(culprits))
    others = len(shown.members) - len(shown.missing & set(culprits))
    confidence = CONFIDENCE * len(shown.inside) / max(others, 1)
    confidence *= LOST_FACTOR if lost & set(culprits) else 1.0
    confidence *= DROPPED_FACTOR if run.num_dropped else 1.0
    numbers = [one.step for one in shown.inside if one.step >= 0]
    return Finding(
        cause=CAUSE.name,
        ranks=culprits,
        steps=(min(numbers), max(numbers)) if numbers else None,
        slowdown=None,
        recoverable_ratio=None,
        confidence=min(confidence, MISMATCH_CONFIDENCE if is_circle else 1.0),
        evidence=_evidence(shown, culprits, len(stuck), steps, is_circle=is_circle),
    )


def _untraced(shown: _StuckInstance, silent: tuple[int, ...]) -> Finding:
    return Finding(
        cause=INSUFFICIENT_EVIDENCE.name,
        ranks=(),
        steps=None,
        slowdown=None,
        recoverable_ratio=None,
        confidence=1.0,
        evidence=(
            f"ranks stand in {_collective(shown)}, and the communication of {format_ranks(silent)}"
            " was not recorded, so nobody can say who is there: trace every rank"
        ),
    )


def _evidence(
    shown: _StuckInstance,
    culprits: tuple[int, ...],
    num_stuck: int,
    steps: StepTable,
    *,
    is_circle: bool,
) -> str:
    missing = format_ranks(tuple(sorted(shown.missing & set(culprits))))
    inside = format_ranks(tuple(sorted(one.rank for one in shown.inside)))
    stand = "stands" if len(shown.inside) == 1 else "stand"
    if is_circle:
        text = (
            f"no rank is silent: {inside} {stand} in {_collective(shown)}, which {missing} has not"
            " entered, standing in another collective instead; the order of collectives differs"
            " between ranks"
        )
    else:
        text = f"{missing} never entered {_collective(shown)}, in which {inside} {stand}"
        text += _last_done(culprits, steps)
    if num_stuck > 1:
        text += f"; {num_stuck - 1} more communications lack a member"
    return text


def _collective(shown: _StuckInstance) -> str:
    one = shown.inside[0]
    if one.is_p2p:
        return f"{one.name} {one.seq} ({one.kind}) from rank {one.src_rank} to rank {one.dst_rank}"
    return (
        f"{one.name} {one.seq} ({one.kind}) of group {shown.group_name or f'{one.group_id:016x}'}"
        f" with {len(shown.members):,} ranks"
    )


def _own_work(culprits: tuple[int, ...], work: Mapping[int, tuple[str, ...]]) -> str:
    told = sorted({kind for rank in culprits for kind in work.get(rank, ()) if kind})
    return f"; it was inside {', '.join(told)}" if told else ""


def _last_done(culprits: tuple[int, ...], steps: StepTable) -> str:
    rows = np.isin(steps.rank, culprits)
    if not rows.any():
        return ""
    return f"; the last step that it finished is {int(steps.step[rows].max())}"


def find_blocked_ranks(
    epoch: int, spans: SpanTable, steps: StepTable, context: RunContext
) -> tuple[Blocked, ...]:
    """Return each communication that a rank has not left, each once."""
    found = {(one.rank, one.instance): one for one in _of_spans(epoch, spans)}
    rows = steps.epoch == epoch
    done = dict(zip(steps.rank[rows].tolist(), steps.step[rows].tolist(), strict=True))
    for event in _latest_events(epoch, context).values():
        for one in _of_event(event):
            if one.step > done.get(one.rank, NONE):
                found.setdefault((one.rank, one.instance), one)
    return tuple(found.values())


def open_work(epoch: int, context: RunContext) -> Mapping[int, tuple[str, ...]]:
    """Return the kinds of what each rank that told had begun and not ended."""
    return {
        rank: tuple(sorted({str(entry.get("kind", "")) for entry in _open_entries(event)}))
        for rank, event in _latest_events(epoch, context).items()
    }


def _latest_events(epoch: int, context: RunContext) -> Mapping[int, EventRecord]:
    """Return the last event of each rank that tells what it stood in."""
    return {
        event.rank: event
        for event in context.events
        if event.epoch == epoch and event.kind in ("stalled", "lost")
    }


def _of_spans(epoch: int, spans: SpanTable) -> Iterable[Blocked]:
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
    """Return what communication each of these rows is part of."""
    pair = is_p2p(spans)[rows]
    columns = (
        spans.group_id[rows],
        spans.seq[rows],
        np.where(pair, spans.src_rank[rows], NONE),
        np.where(pair, spans.dst_rank[rows], NONE),
    )
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _of_event(event: EventRecord) -> Iterable[Blocked]:
    """Yield the open communications that an event tells; what is malformed is passed over."""
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
    told: Any = event.data.get("open")
    return [entry for entry in told if isinstance(entry, dict)] if isinstance(told, list) else []


def find_entered_ranks(
    epoch: int, spans: SpanTable, standing: Iterable[Blocked]
) -> Mapping[Instance, set[int]]:
    """Return who has a span of each communication in which somebody stands."""
    wanted = {one.instance for one in standing}
    groups = np.array(sorted({instance[0] for instance in wanted}), dtype=np.uint64)
    seqs = np.array(sorted({instance[1] for instance in wanted}), dtype=np.int64)
    is_wait = spans.kind == KIND_CODES[SpanKind.WAIT]
    chosen = (spans.epoch == epoch) & np.isin(spans.seq, seqs) & np.isin(spans.group_id, groups)
    rows = np.flatnonzero(chosen & ~is_wait)
    found: dict[Instance, set[int]] = defaultdict(set)
    for instance, rank in zip(_instances(spans, rows), spans.rank[rows].tolist(), strict=True):
        found[instance].add(rank)
    return found
