"""Import of Chrome traces in which a training framework wrote its own begin and end events.

MegaScan (a fork of Megatron-LM) and ndtimeline (veScale) write forward and backward of each
micro-batch, the communication of the pipeline and collectives, so an event is one of our spans. Its
name says its kind (`chrome_names`), its arguments the rest (`chrome_events`). What a trace does not
have is not guessed:

* **Members of a group** follow from the axis that the name implies and the ranks' positions, else
  from ``args.group``. MegaScan's own ``group`` of tensor-parallel collectives has the
  data-parallel ranks too, so positions come first. A communication whose members or ends are
  unknown is refused.
* **Number of a communication**: its place in the step, counted from the step's end, because
  ndtimeline lacks the first communication of a job.
* **A send or receive of a stage without a neighbour** communicated nothing: Megatron-LM calls it
  on the first and last stage as well.
* **Times** are those of the device: both programs record CUDA events.
* **Communication on the thread of the compute** blocked it; on another thread it is asynchronous.
* **Communication that no rank recorded** is derived from the passes, if they imply it
  (`chrome_transfers`), else reported as not recorded.

The spool that comes of it is that of docs/spool-format.md.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import COMM_KINDS, NONE, SpanFlag, SpanKind, pack_kinds
from rankscope.tracer.topology import GROUP_KINDS, Layout

from ..errors import TraceError
from .chrome_events import MAX_RANKS, MAX_US, sort_by_rank
from .chrome_names import (
    COLLECTIVES,
    ENDS,
    OTHER_COLLECTIVE,
    PIPELINE,
    TRANSFER,
    Move,
    kind_of,
    plain_name,
)
from .chrome_transfers import Pass, derive_syncs, derive_transfers
from .event_stream import read_json
from .spool_folder import ON_DEVICE, Comm, Process, Record, make_group_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from .chrome_events import Interval, RankEvents
    from .chrome_transfers import Sync, Transfers

DERIVED = ON_DEVICE | SpanFlag.END_BOUND
"""How long a derived communication took is unknown, so that it is not compared with others."""

PASSES = frozenset({SpanKind.FORWARD, SpanKind.BACKWARD})
AXES = ("dp", "pp", "tp")
KIND_OF_AXIS = {"dp": SpanKind.DP_COMM, "pp": SpanKind.PP_RECV, "tp": SpanKind.TP_COMM}
"""Communication without which ranks of an axis would not be one job."""

PROFILER_CATEGORIES = frozenset({"kernel", "cpu_op", "cuda_runtime", "gpu_memcpy"})
FIRST_UNIX_NS = 946_684_800_000_000_000
"""The year 2000: earlier times count from an origin of their own."""

DERIVED_TRACK = "derived"
"""Track of the sends that a trace does not have."""

MAX_SHOWN = 5
MAX_NS = 1 << 62
NUM_PER_STEP = 1 << 24
"""Numbers of the communications of one group in one step."""


@dataclass(slots=True, kw_only=True)
class Job:
    """The ranks of a trace and their positions."""

    path: Path
    ranks: dict[int, RankEvents]
    coords: dict[int, dict[str, int]]
    """By rank; empty if the trace names no axis, or its axes do not place each rank alone."""

    sizes: dict[str, int]
    along: dict[tuple[str, int], tuple[int, ...]]
    """By axis and rank: the ranks that differ from it on this axis alone, by their positions."""

    num_chunks: int
    base_ns: int
    """Unix time of the trace's origin."""

    groups: dict[int, tuple[str, str, tuple[int, ...]]] = field(default_factory=dict)
    """Kind, axis and members of those of the collectives, by id."""


def read_events(files: Sequence[Path], run_id: str) -> Iterator[Process]:
    """Yield the process of each rank, with its records; the first one has the groups of all.

    Raises:
        TraceError: A file is no such trace, a rank is missing, an event has no rank or step, passes
            of a rank overlap, or the members of a communication are unknown.
    """
    events: list[Any] = []
    for path in files:
        own = _events_of(path, read_json(path))
        if len(files) > 1 and _span_ns(own)[0] < FIRST_UNIX_NS:
            reason = "has times from an origin of its own: import it alone, not with other files"
            raise TraceError(path, reason)
        events += own
    path = files[0]
    first_ns, last_ns = _span_ns(events)
    # A trace without an origin ended when its file was written, or shortly before.
    base_ns = 0 if first_ns >= FIRST_UNIX_NS else path.stat().st_mtime_ns - last_ns
    job = _describe(path, sort_by_rank(path, events), base_ns)
    records: dict[int, list[Record]] = {}
    all_passes: list[Pass] = []
    thread: dict[int, str] = {}
    for number, rank in sorted(job.ranks.items()):
        passes = _find_passes(path, rank)
        calls = _number(rank, _find_comm(job, rank))
        thread[number] = passes[0].event.thread if passes else ""
        all_passes += passes
        threads = {each.event.thread for each in passes}
        records[number] = list(_records(job, rank, calls, threads))
    kinds = {each.kind for own in records.values() for each in own if each.comm is not None}
    for number, record in _derive(job, all_passes, thread, kinds):
        kinds.add(record.kind)
        records[number].append(record)
    left_out = pack_kinds(_kinds_without_record(job, kinds))
    for number, rank in sorted(job.ranks.items()):
        own = records.pop(number)
        for start_ns, end_ns, step in rank.steps:
            times = base_ns + start_ns, base_ns + end_ns
            own.append(Record(None, "", "", step, *times, left_out=left_out))
        process = _to_process(job, rank, run_id, own)
        process.groups, job.groups = job.groups, {}
        yield process


def _events_of(path: Path, document: Any) -> list[Any]:  # noqa: ANN401  # of any JSON type
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list) or not events:
        reason = "has no list of events, by itself or as traceEvents: it is no Chrome trace"
        raise TraceError(path, reason)
    objects = [event for event in events if isinstance(event, dict)]
    if any(str(event.get("cat")) in PROFILER_CATEGORIES for event in objects):
        raise TraceError(path, "is a trace of torch.profiler: import it with --format kineto")
    if any("rel_ts" in event for event in objects):
        reason = (
            "is MegaScan's file of one rank, which has no common time: join the files of all ranks"
            " with its scripts/aggregate.py, and import the result"
        )
        raise TraceError(path, reason)
    if not any(kind_of(str(event.get("name"))) in PASSES for event in objects):
        usual = Counter(str(event.get("name"))[:40] for event in objects if event.get("ph") != "M")
        names = ", ".join(name for name, _ in usual.most_common(MAX_SHOWN))
        reason = (
            f"has no event that is named forward or backward (its names: {names}), so what is"
            " compute is unknown"
        )
        raise TraceError(path, reason)
    return objects


def _span_ns(events: list[Any]) -> tuple[int, int]:
    """Return the first and the last begin or end."""
    times = [event["ts"] for event in events if _is_time(event.get("ts"))]
    ends = [
        event["ts"] + event["dur"]
        for event in events
        if _is_time(event.get("ts")) and _is_time(event.get("dur"))
    ]
    return round(min(times, default=0) * 1000), round(max(times + ends, default=0) * 1000)


def _is_time(value: Any) -> bool:  # noqa: ANN401  # of any JSON type
    return isinstance(value, int | float) and 0 <= value < MAX_US


def _describe(path: Path, ranks: dict[int, RankEvents], base_ns: int) -> Job:
    named = [axis for axis in AXES if all(axis in each.coords for each in ranks.values())]
    coords = {rank: {axis: ranks[rank].coords[axis] for axis in named} for rank in sorted(ranks)}
    if named and "dp" not in named:  # ranks of one stage and tensor-parallel position are replicas
        replicas: Counter[tuple[int, ...]] = Counter()
        for own in coords.values():
            place = tuple(own.values())
            own["dp"] = replicas[place]
            replicas[place] += 1
    sizes = {axis: 1 + max(own[axis] for own in coords.values()) for axis in coords[min(coords)]}
    num = max(max(ranks) + 1, math.prod(sizes.values()))
    if num > MAX_RANKS or (missing := sorted(set(range(num)) - ranks.keys())):
        some = ", ".join(map(str, missing[:MAX_SHOWN])) if num <= MAX_RANKS else "0"
        reason = (
            f"has {len(ranks)} ranks of {num:,}, without rank {some}: import the files of all ranks"
            " together"
        )
        raise TraceError(path, reason)
    if len({tuple(own.values()) for own in coords.values()}) < num:
        coords, sizes = {}, {}
    chunks = {event.chunk for rank in ranks.values() for event in rank.intervals}
    return Job(
        path=path, ranks=ranks, coords=coords, sizes=sizes, along=_find_lines(coords),
        num_chunks=max(1, 1 + max(chunks)), base_ns=base_ns,
    )  # fmt: skip


def _find_lines(coords: dict[int, dict[str, int]]) -> dict[tuple[str, int], tuple[int, ...]]:
    along: dict[tuple[str, int], tuple[int, ...]] = {}
    for axis in next(iter(coords.values()), ()):
        lines: dict[tuple[int, ...], list[int]] = {}
        for rank, own in sorted(coords.items(), key=lambda item: item[1][axis]):
            lines.setdefault(tuple(own[each] for each in own if each != axis), []).append(rank)
        along |= {(axis, rank): tuple(line) for line in lines.values() for rank in line}
    return along


def _to_process(job: Job, rank: RankEvents, run_id: str, records: list[Record]) -> Process:
    layout = Layout(**job.sizes, vpp=job.num_chunks).to_dict() if job.sizes else None
    return Process(
        run_id=run_id,
        rank=rank.rank,
        world_size=len(job.ranks),
        host="",
        manifest={
            "layout": layout,
            "coords": job.coords.get(rank.rank),
            "config": {"imported": "chrome trace"},
        },
        groups={},
        records=records,
    )


def _find_passes(path: Path, rank: RankEvents) -> list[Pass]:
    """Return the outermost forwards and backwards; those without a micro-batch are counted."""
    count: Counter[tuple[int, SpanKind, int]] = Counter()
    passes: list[Pass] = []
    until: dict[SpanKind, int] = {}
    end_of_thread: dict[str, int] = {}
    for event in rank.intervals:
        kind = kind_of(event.name)
        if kind not in PASSES or event.end_ns <= end_of_thread.get(event.thread, 0):
            continue
        if event.start_ns < max(until.get(kind, 0), end_of_thread.get(event.thread, 0)):
            reason = (
                f"has passes that overlap on rank {rank.rank}, in step {event.step}: give events"
                " args.rank if several ranks have one pid, and import each run on its own"
            )
            raise TraceError(path, reason)
        until[kind] = end_of_thread[event.thread] = event.end_ns
        if event.microbatch == NONE:
            event.microbatch = count[event.step, kind, event.chunk]
            count[event.step, kind, event.chunk] += 1
        passes.append(Pass(rank.rank, kind, event))
    return passes


def _records(
    job: Job, rank: RankEvents, calls: dict[int, list[Comm]], threads: set[str]
) -> Iterator[Record]:
    """Yield a record of each interval, one for each transfer of a call."""
    for place, event in enumerate(rank.intervals):
        comms = calls.get(place, ())
        flags = ON_DEVICE
        if comms and event.thread not in threads:
            flags |= SpanFlag.ASYNC
        if len(comms) > 1:
            flags |= SpanFlag.COALESCED
        for comm in comms or (None,):
            yield Record(
                comm.kind if comm else kind_of(event.name) or SpanKind.OTHER, event.name,
                event.thread, event.step, job.base_ns + event.start_ns, job.base_ns + event.end_ns,
                flags, launch_ns=NONE, microbatch=event.microbatch, chunk=max(event.chunk, 0),
                depth=event.depth, comm=comm, interval_id=place + 1 if len(comms) > 1 else 0,
            )  # fmt: skip


def _derive(
    job: Job, passes: list[Pass], thread: dict[int, str], kinds: set[SpanKind | None]
) -> Iterator[tuple[int, Record]]:
    """Yield what passes imply of the communication that no rank recorded, with its rank.

    Args:
        thread: By rank: that of its passes.
        kinds: Of the communication that is recorded.
    """
    if job.sizes.get("dp", 1) > 1 and SpanKind.DP_COMM not in kinds:
        replicas = {number: job.along["dp", number] for number in job.ranks}
        syncs = derive_syncs(passes, replicas, _goes_on(job))
        for sync in syncs:
            for rank in sync.members:
                job.ranks[rank].extend_step(sync.step, sync.end_ns)
        yield from _sync_records(job, syncs, thread)
    if job.sizes.get("pp", 1) > 1 and not kinds & {SpanKind.PP_SEND, SpanKind.PP_RECV}:
        pipelines = {number: job.along["pp", number] for number in job.ranks}
        begins = {
            (number, step): begin
            for number, rank in job.ranks.items()
            for begin, _, step in rank.steps
        }
        derived = derive_transfers(passes, pipelines, job.num_chunks, begins)
        yield from _transfer_records(job, derived, thread)


def _goes_on(job: Job) -> dict[tuple[int, int], int]:
    """Return, by rank and step, when a rank goes on after its last pass of the step."""
    goes_on: dict[tuple[int, int], int] = {}
    for number, rank in job.ranks.items():
        for _, end, step in rank.steps:
            goes_on[number, step] = MAX_NS if step in rank.unmarked else end
        before: int | None = None
        for event in rank.intervals:
            kind = kind_of(event.name)
            has_ended = kind is SpanKind.OPTIMIZER or (kind in PASSES and event.step != before)
            if before is not None and has_ended:
                goes_on[number, before] = event.start_ns
            if kind is SpanKind.OPTIMIZER:
                before = None
            elif kind in PASSES:
                before = event.step
    return goes_on


def _kinds_without_record(job: Job, kinds: set[SpanKind | None]) -> set[SpanKind]:
    """Return the kinds of communication that the layout implies and the trace lacks.

    Without a layout, several ranks that communicate nothing lack all of it.
    """
    if not job.sizes:
        return set(COMM_KINDS) if len(job.ranks) > 1 and not kinds else set()
    needed = {axis: kind for axis, kind in KIND_OF_AXIS.items() if job.sizes.get(axis, 1) > 1}
    return {kind for kind in needed.values() if kind not in kinds}


def _sync_records(
    job: Job, syncs: list[Sync], thread: dict[int, str]
) -> Iterator[tuple[int, Record]]:
    """Yield the members of each derived synchronisation, with their ranks."""
    for sync in syncs:
        members = tuple(sorted(sync.members))
        group_id = make_group_id("dp", members)
        job.groups[group_id] = (SpanKind.DP_COMM, "dp", members)
        comm = Comm(group_id, "dp", SpanKind.DP_COMM, (sync.step + 1) * NUM_PER_STEP)
        for rank, begin_ns in zip(sync.members, sync.begins_ns, strict=True):
            yield (
                rank,
                Record(
                    SpanKind.DP_COMM, "gradients (derived)", thread[rank], sync.step,
                    job.base_ns + begin_ns, job.base_ns + sync.end_ns, DERIVED, launch_ns=NONE,
                    comm=comm,
                ),
            )  # fmt: skip


def _transfer_records(
    job: Job, derived: Transfers, thread: dict[int, str]
) -> Iterator[tuple[int, Record]]:
    """Yield the send and the receive of each derived transfer, and the waits, with their ranks.

    Of stages that exchange, both are asynchronous. Else a receive is the wait itself.
    """
    count: Counter[tuple[object, ...]] = Counter()
    comms: list[Comm] = []
    for transfer in derived.transfers:
        key = transfer.src, transfer.dst, transfer.kind, transfer.step
        flow, line = str(transfer.kind), job.along["pp", transfer.src]
        comm = Comm(
            make_group_id(f"pipeline {flow}", line), "pp", SpanKind.PP_SEND,
            transfer.step * NUM_PER_STEP + count[key], transfer.src, transfer.dst,
        )  # fmt: skip
        count[key] += 1
        comms.append(comm)
        begins = ((SpanKind.PP_SEND, transfer.src, transfer.sent_ns),
                  (SpanKind.PP_RECV, transfer.dst, transfer.posted_ns))  # fmt: skip
        for kind, rank, begin_ns in begins:
            is_receive = kind is SpanKind.PP_RECV
            is_wait = is_receive and derived.waits is None
            flags = ON_DEVICE if is_receive and transfer.is_waited else DERIVED
            yield (
                rank,
                Record(
                    kind, f"{flow} {kind.removeprefix('pp-')} (derived)",
                    thread[rank] if is_wait else DERIVED_TRACK, transfer.step,
                    job.base_ns + begin_ns, job.base_ns + transfer.end_ns,
                    flags if is_wait else flags | SpanFlag.ASYNC,
                    launch_ns=NONE, microbatch=transfer.microbatch, chunk=max(transfer.chunk, 0),
                    comm=comm._replace(kind=kind),
                ),
            )  # fmt: skip
    for wait in derived.waits or ():
        comm = comms[wait.transfer]
        kind = SpanKind.PP_SEND if comm.src_rank == wait.rank else SpanKind.PP_RECV
        yield (
            wait.rank,
            Record(
                SpanKind.WAIT, "wait (derived)", thread[wait.rank],
                derived.transfers[wait.transfer].step, job.base_ns + wait.begin_ns,
                job.base_ns + wait.end_ns, DERIVED, comm=comm._replace(kind=kind),
            ),
        )  # fmt: skip


def _find_comm(job: Job, rank: RankEvents) -> dict[int, list[Comm]]:
    """Return the communications of a rank, without numbers, by the index of their interval.

    An interval inside of another one that communicates is a part of it.
    """
    calls = {}
    call_end: dict[str, int] = {}
    for place, event in enumerate(rank.intervals):
        comms = _comms_of(job, rank, event)
        if comms and event.start_ns >= call_end.get(event.thread, 0):
            call_end[event.thread] = event.end_ns
            calls[place] = comms
    return calls


def _number(rank: RankEvents, calls: dict[int, list[Comm]]) -> dict[int, list[Comm]]:
    """Number the communications of each step, the last one alike on all its members."""
    keys = {
        place: [(rank.intervals[place].step, comm[:-2]) for comm in comms]
        for place, comms in calls.items()
    }
    left = Counter(key for own in keys.values() for key in own)
    numbered: dict[int, list[Comm]] = {}
    for place, comms in calls.items():
        numbered[place] = []
        for comm, key in zip(comms, keys[place], strict=True):
            seq = ((key[0] + 1) * NUM_PER_STEP) - left[key]
            left[key] -= 1
            numbered[place].append(comm._replace(seq=seq))
    return numbered


def _comms_of(job: Job, rank: RankEvents, event: Interval) -> list[Comm]:
    """Return the communications that an interval is, empty if it is none."""
    name = plain_name(event.name)
    if name in PIPELINE:
        return _transfers(job, rank, event, PIPELINE[name])
    if transfer := TRANSFER.search(name):
        return _transfers(job, rank, event, (Move("", is_send=transfer[1] == "send"),))
    if name not in COLLECTIVES and not OTHER_COLLECTIVE.search(name):
        return []
    axis = COLLECTIVES.get(name, "")
    line = job.along.get(("pp" if axis == ENDS else axis, rank.rank))
    if line is not None:
        members = (line[0], line[-1]) if axis == ENDS else line
    else:
        members = _named_members(job, rank, event)
        axis = next((axis for axis in job.sizes if job.along[axis, rank.rank] == members), axis)
        if not axis and len(members) == len(job.ranks) and not job.sizes:
            axis = "dp"  # as in a job that names no layout
    if rank.rank not in members or set(members) == {rank.rank}:
        return []
    members = tuple(sorted(members))
    kind = SpanKind(GROUP_KINDS.get(axis, SpanKind.OTHER))
    group_id = make_group_id(axis, members)
    job.groups[group_id] = (kind, axis, members)
    return [Comm(group_id, axis, kind, NONE, num_bytes=event.num_bytes)]


def _transfers(job: Job, rank: RankEvents, event: Interval, moves: tuple[Move, ...]) -> list[Comm]:
    """Return the transfers of a call between stages."""
    line = job.along.get(("pp", rank.rank), ())
    is_named = "group" in event.args
    members = _named_members(job, rank, event) if is_named or not line else line
    comms = []
    for move in moves:
        if line and move.flow:
            to = line.index(rank.rank) + (1 if (move.flow == "forward") == move.is_send else -1)
            peer = line[to % len(line)]
            is_there = peer in members if is_named else 0 <= to < len(line) or job.num_chunks > 1
        else:
            others = [other for other in members if other != rank.rank]
            if len(others) > 1:
                raise _unknown_members(job, rank, event)
            peer, is_there = (others or [rank.rank])[0], True
        if not is_there or peer == rank.rank:
            continue
        ends = (rank.rank, peer) if move.is_send else (peer, rank.rank)
        kind = SpanKind.PP_SEND if move.is_send else SpanKind.PP_RECV
        group_id = make_group_id(f"pipeline {move.flow}", line or tuple(sorted(ends)))
        comms.append(Comm(group_id, "pp", kind, NONE, *ends))
    if len(comms) == 1 and len(moves) == 1:
        comms = [comms[0]._replace(num_bytes=event.num_bytes)]
    return comms


def _named_members(job: Job, rank: RankEvents, event: Interval) -> tuple[int, ...]:
    """Return the members that ``args.group`` names, ascending, and the rank itself."""
    named = event.args.get("group", event.args.get("ranks", ""))
    if named is None:  # MegaScan: the call communicated nothing
        return (rank.rank,)
    if isinstance(named, str):
        numbers = re.fullmatch(r"\d{1,9}(?:[ ,]+\d{1,9})*", named)
        named = [int(number) for number in re.split(r"[ ,]+", named)] if numbers else None
    if not isinstance(named, list) or not named or not all(other in job.ranks for other in named):
        raise _unknown_members(job, rank, event)
    return tuple(sorted({*named, rank.rank}))


def _unknown_members(job: Job, rank: RankEvents, event: Interval) -> TraceError:
    reason = (
        f"has a communication {event.name[:64]!r} on rank {rank.rank} whose members are unknown:"
        " it needs args.group, the list of their global ranks, or, in all events, the positions"
        " args.dp_rank, args.pp_rank and args.tp_rank"
    )
    return TraceError(job.path, reason)
