"""Hangs: ranks that never entered the collective in which the others are blocked."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

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
from .crash import ExitClass, find_failures, own_failures
from .detector import Cause, insufficient

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from ..trace.context import RunContext
    from ..trace.tables import EpochInfo, RunInfo, SpanTable, StepTable
    from .crash import Failure
    from .detector import Record


COMMUNICATION_BITS = np.uint32(pack_kinds(COMM_KINDS))

P2P = frozenset({SpanKind.PP_SEND, SpanKind.PP_RECV})
P2P_NAMES = frozenset({"send", "recv", "recv_any_source"})
"""Torch's names of p2p operations. In a group of another axis they have that axis's kind."""

UNFINISHED = int(SpanFlag.OPEN | SpanFlag.ERROR)


class Instance(NamedTuple):
    """Identity of a communication, equal for all of its members."""

    group_id: int
    seq: int
    src_rank: int = NONE
    """Source of a p2p; `NONE` for a collective, or if it is unknown."""

    dst_rank: int = NONE


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
    step: int
    instance: Instance
    kind: str
    name: str

    @property
    def is_p2p(self) -> bool:
        """Return whether it has two sides, known or unknown."""
        is_known = NONE not in self.instance[2:]
        return is_known or self.kind in P2P or self.name in P2P_NAMES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stuck:
    """A communication with blocked members."""

    instance: Instance
    inside: tuple[Blocked, ...]
    missing: frozenset[int]
    """Members that have not entered it."""

    members: tuple[int, ...]
    """Empty if they are unknown."""

    group_name: str

    def __str__(self) -> str:
        """Write it: "all_reduce 41 (dp-comm) of group dp with 8 ranks"."""
        one, (group_id, seq, src_rank, dst_rank) = self.inside[0], self.instance
        text = f"{one.name} {seq} ({one.kind})"
        if one.is_p2p:
            return f"{text} from rank {src_rank} to rank {dst_rank}"
        group = self.group_name or f"{group_id:016x}"
        return f"{text} of group {group} with {len(self.members):,} ranks"


def detect(record: Record) -> tuple[Finding, ...]:
    """Return the hang of each epoch that had one."""
    return find_hangs(record.run, record.spans, record.steps, record.context)


def find_hangs(
    run: RunInfo, spans: SpanTable, steps: StepTable, context: RunContext
) -> tuple[Finding, ...]:
    """Find, in each epoch, what the blocked ranks wait for in the end.

    A blocked rank waits for a communication, and that for its members that have not entered it.
    Followed to the end, these waits lead to one of three things:

    * Ranks that are blocked nowhere: they are silent, and named. Not named are those that came
      further than a silent partner, or that report their long step while others are frozen. While
      a silent rank writes a checkpoint, nothing hangs.
    * A communication that all members have entered, if one of them was stalled there or timed out.
      Its transfer does not end, or a process is frozen in it (`_entered_by_all`).
    * A circle: the ranks entered their collectives in different orders, and those in it are named.

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
    ended = {one.rank for one in context.exits if one.epoch == epoch.epoch and one.state == "ended"}
    opened = _open_spans(epoch.epoch, context)
    known = find_blocked_ranks(epoch, spans, steps, opened)
    blocked = [one for one in known if one.rank not in ended]
    stuck = _find_stuck(epoch, blocked, _entered_ranks(epoch.epoch, spans, blocked))
    if own_failures(failures) or not stuck:
        return None  # a crash is why the others are blocked
    last_ranks, last_instances = _follow_waits(stuck)
    silent = last_ranks - {one.rank for one in blocked}
    reporting = _reporting_ranks(epoch, context, since=min(one.inside[0].step for one in stuck))
    certainty = THRESHOLDS.doubt_factor if run.num_dropped else 1.0
    entered = [one for one in stuck if one.instance in last_instances and not one.missing]
    if not silent and (ends := _find_endless(entered, epoch, failures, context)):
        return _entered_by_all(ends, reporting, certainty)
    traced = {info.rank for info in epoch.ranks} - _without_capture(epoch.epoch, steps, blocked)
    if silent and not silent & traced:
        return insufficient(
            f"ranks are blocked in {stuck[0]}, and the communication of"
            f" {format_ranks(tuple(sorted(silent)))} was not recorded, so it is unknown which rank"
            " is missing: trace every rank"
        )
    behind = _least_advanced(epoch, silent & traced, spans)
    culprits = tuple(sorted(behind - reporting or behind or last_ranks & traced))
    work = {rank: {str(entry.get("kind", "")) for entry in opened.get(rank, ())} for rank in silent}
    shown = next((one for one in stuck if one.missing & set(culprits)), None)
    if shown is None or any(SpanKind.CHECKPOINT in kinds for kinds in work.values()):
        return None
    if {one.ended.rank for one in failures if one.reason is ExitClass.LOST} & set(culprits):
        certainty *= THRESHOLDS.doubt_factor
    num_others = len(shown.members) - len(shown.missing & set(culprits))
    certainty *= THRESHOLDS.ended_confidence * len(shown.inside) / max(num_others, 1)
    evidence = _evidence(stuck, shown, culprits, last_step=_last_step(culprits, steps))
    kinds = sorted({kind for rank in culprits for kind in work.get(rank, ()) if kind})
    evidence += f"; it was inside {', '.join(kinds)}" if kinds else ""
    evidence += "; it had already ended without an error" if ended & set(culprits) else ""
    return Finding(
        cause=CAUSE.name,
        ranks=culprits,
        steps=_steps_of(shown),
        confidence=certainty if silent else min(certainty, THRESHOLDS.undecided_certainty),
        evidence=evidence,
    )


def _follow_waits(stuck: Iterable[_Stuck]) -> tuple[set[int], set[Instance]]:
    """Return the ranks, and the communications, at which the waits of blocked ranks end.

    A rank waits for the communication in which it is, and that for its missing members. What waits
    for nothing outside itself is an end: a rank that is blocked nowhere, a communication without
    missing members, or all that is in a circle. Where the members are unknown, the rank is the end.
    """
    import networkx as nx  # slow to import, and few runs hang

    waits: nx.DiGraph[int | Instance] = nx.DiGraph()
    for one in stuck:
        waits.add_nodes_from(each.rank for each in one.inside)
        if one.members:
            waits.add_edges_from((each.rank, one.instance) for each in one.inside)
            waits.add_edges_from((one.instance, rank) for rank in one.missing)
    ends: set[int | Instance] = set().union(*nx.attracting_components(waits))
    ranks = {end for end in ends if isinstance(end, int)}
    return ranks, {end for end in ends if not isinstance(end, int)}


def _find_endless(
    entered: Iterable[_Stuck], epoch: EpochInfo, failures: Iterable[Failure], context: RunContext
) -> _Stuck | None:
    """Return the first communication that all members have entered and that does not end.

    That they are inside is normal for a moment, and a hang if one of them was stalled there or
    timed out.
    """
    timed_out = {each.ended.rank for each in failures if each.reason is ExitClass.TIMEOUT}
    stalled = {
        (event.rank, event.data.get("step"))
        for event in context.events
        if event.epoch == epoch.epoch and event.kind == "stalled"
    }
    for one in sorted(entered, key=lambda each: each.instance.seq):
        is_silent = any(
            each.rank in timed_out or (each.rank, each.step) in stalled for each in one.inside
        )
        if is_silent and len(one.members) > 1:
            return one
    return None


def _entered_by_all(one: _Stuck, reporting: frozenset[int], certainty: float) -> Finding:
    """Return the hang in a communication that all members have entered.

    The transfer itself does not end then, or a process is frozen. A frozen one does not report that
    its step lasts long. If members have left, those that have not are named.

    Args:
        one: The communication.
        reporting: Ranks that report their long step.
        certainty: Factor of the confidence.
    """
    inside = {each.rank for each in one.inside}
    frozen = tuple(sorted(inside - reporting)) if reporting else ()
    named = frozen or tuple(sorted(inside if len(inside) < len(one.members) else ()))
    verb = "is" if len(named) == 1 else "are"
    text = f"all {len(one.members):,} members have entered {one}, which does not end: "
    if frozen:
        others = f"the other {len(reporting):,} sent"
        text += f"{format_ranks(frozen)} {verb} frozen in it, without the reports of a long step"
        text += f" that {others}"
    else:
        text += f"only {format_ranks(named)} {verb} still in it; " if named else ""
        text += "a link, an adapter or a device of theirs, or a frozen process"
    return Finding(
        cause=CAUSE.name,
        ranks=named,
        steps=_steps_of(one),
        confidence=THRESHOLDS.ended_confidence * certainty,
        evidence=text,
    )


def _reporting_ranks(epoch: EpochInfo, context: RunContext, *, since: int) -> frozenset[int]:
    """Return the ranks whose process reports that its own step lasts long (event ``stack``).

    A process that is frozen sends none. Empty if no more than half of the ranks do, or all: then
    that says nothing about the others.

    Args:
        epoch: The epoch.
        context: Events of the run.
        since: Step from which on a report counts.
    """
    found = frozenset(
        event.rank
        for event in context.events
        if event.epoch == epoch.epoch
        and event.kind == "stack"
        and event.data.get("step", NONE) >= since
    )
    num = len(epoch.ranks)
    return found if num > len(found) > THRESHOLDS.majority_share * num else frozenset()


def _steps_of(one: _Stuck) -> tuple[int, int] | None:
    """Return the first and the last step from which members are blocked; None if unknown."""
    steps = [each.step for each in one.inside if each.step >= 0]
    return (min(steps), max(steps)) if steps else None


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
) -> tuple[_Stuck, ...]:
    """Return the communications with blocked members, those with most of them first."""
    groups = {group.group_id: group for group in epoch.groups}
    by_instance: dict[Instance, list[Blocked]] = defaultdict(list)
    for one in blocked:
        by_instance[one.instance].append(one)
    found = []
    for instance, inside in by_instance.items():
        group = groups.get(instance.group_id)
        members = () if group is None else group.members
        if inside[0].is_p2p:
            members = () if NONE in instance[2:] else instance[2:]
        found.append(
            _Stuck(
                instance=instance,
                inside=tuple(inside),
                missing=frozenset(members) - {one.rank for one in inside} - entered[instance],
                members=members,
                group_name="" if group is None else group.name,
            )
        )
    return tuple(sorted(found, key=lambda one: (-len(one.inside), one.instance)))


def _evidence(
    stuck: Iterable[_Stuck], shown: _Stuck, culprits: tuple[int, ...], *, last_step: str
) -> str:
    """Return where ranks are blocked and why the culprits are named."""
    missing = format_ranks(tuple(sorted(shown.missing & set(culprits))))
    inside = tuple(sorted(one.rank for one in shown.inside))
    there = f"{format_ranks(inside)} {'is' if len(inside) == 1 else 'are'} blocked"
    elsewhere = [each for each in stuck if {one.rank for one in each.inside} & set(culprits)]
    if elsewhere:
        reason = "the order of collectives differs between ranks"
        if not all(each.members for each in elsewhere):
            reason = "the other side of that is unknown"
        text = f"no rank is silent: {there} in {shown}, which {missing} has not entered"
        text += f", because it is blocked in another communication; {reason}"
    else:
        text = f"{missing} never entered {shown}, in which {there}{last_step}"
    num_more = sum(bool(each.missing) for each in stuck) - 1
    if num_more:
        text += f"; members are missing in {format_count(num_more, 'other communication')}"
    return text


def _last_step(culprits: tuple[int, ...], steps: StepTable) -> str:
    rows = np.isin(steps.rank, culprits)
    if not rows.any():
        return ""
    return f"; the last step that it finished is {int(steps.step[rows].max())}"


def find_blocked_ranks(
    epoch: EpochInfo, spans: SpanTable, steps: StepTable, opened: Mapping[int, list[dict[str, Any]]]
) -> tuple[Blocked, ...]:
    """Return each communication that a rank has entered and not left.

    Args:
        epoch: The epoch and its groups.
        spans: Spans of the steps that are analysed.
        steps: The same steps.
        opened: Open spans that a rank's last event reported.
    """
    found = {(one.rank, one.instance): one for one in _read_spans(epoch.epoch, spans)}
    rows = steps.epoch == epoch.epoch
    finished = dict(zip(steps.rank[rows].tolist(), steps.step[rows].tolist(), strict=True))
    members = {group.group_id: group.members for group in epoch.groups}
    for rank, entries in opened.items():
        for one in _read_entries(rank, entries, members):
            if one.step > finished.get(rank, NONE):
                found.setdefault((rank, one.instance), one)
    return tuple(found.values())


def _open_spans(epoch: int, context: RunContext) -> dict[int, list[dict[str, Any]]]:
    """Return, by rank, the open spans in its last event that reports some."""
    found = {}
    for event in context.events:
        if event.epoch == epoch and event.kind in ("stalled", "lost"):
            entries: Any = event.data.get("open")
            known = entries if isinstance(entries, list) else []
            found[event.rank] = [entry for entry in known if isinstance(entry, dict)]
    return found


def _read_spans(epoch: int, spans: SpanTable) -> Iterable[Blocked]:
    unfinished = (spans.flags & UNFINISHED) != 0
    is_wait = spans.kind == KIND_CODES[SpanKind.WAIT]
    chosen = (spans.epoch == epoch) & (spans.group_id != 0) & unfinished & ~is_wait
    rows = np.flatnonzero(chosen)
    for row, instance in zip(rows.tolist(), _instances(spans, rows), strict=True):
        yield Blocked(
            rank=int(spans.rank[row]),
            step=int(spans.step[row]),
            instance=instance,
            kind=KINDS[spans.kind[row]].value,
            name=spans.names[spans.name[row]],
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
    return [Instance(*values) for values in zip(*(each.tolist() for each in columns), strict=True)]


def _read_entries(
    rank: int, entries: Iterable[dict[str, Any]], members: Mapping[int, tuple[int, ...]]
) -> Iterable[Blocked]:
    """Yield the communications among a rank's open spans; malformed entries are skipped.

    Args:
        rank: The rank.
        entries: Its open spans. They name no sides of a p2p; in a group of two they are known.
        members: Members of each group.
    """
    for entry in entries:
        try:
            group_id, seq, step = int(entry["group_id"], 16), int(entry["seq"]), int(entry["step"])
        except (KeyError, TypeError, ValueError):
            continue
        if not group_id or seq < 0:
            continue
        one = Blocked(
            rank=rank,
            step=step,
            instance=Instance(group_id, seq),
            kind=str(entry.get("kind", "")),
            name=str(entry.get("name", "")),
        )
        others = [each for each in members.get(group_id, ()) if each != rank]
        if one.is_p2p and len(others) == 1:
            is_send = one.kind == SpanKind.PP_SEND or one.name == "send"
            sides = (rank, others[0]) if is_send else (others[0], rank)
            one = replace(one, instance=Instance(group_id, seq, *sides))
        yield one


def _entered_ranks(
    epoch: int, spans: SpanTable, blocked: Iterable[Blocked]
) -> Mapping[Instance, set[int]]:
    """Return, by communication with blocked ranks, all ranks with a span of it."""
    wanted = {one.instance for one in blocked}
    groups = np.array(sorted({instance.group_id for instance in wanted}), dtype=np.uint64)
    seqs = np.array(sorted({instance.seq for instance in wanted}), dtype=np.int64)
    is_wait = spans.kind == KIND_CODES[SpanKind.WAIT]
    chosen = (spans.epoch == epoch) & np.isin(spans.seq, seqs) & np.isin(spans.group_id, groups)
    rows = np.flatnonzero(chosen & ~is_wait)
    found: dict[Instance, set[int]] = defaultdict(set)
    for instance, rank in zip(_instances(spans, rows), spans.rank[rows].tolist(), strict=True):
        found[instance].add(rank)
    return found
