"""The dumps of all ranks' flight recorders: which communications had not ended, and on whom.

A dump says nothing of steps or compute. Of each process group, it is compared which communication
each member had called last, how far that had come, and from which number on members called unlike
operations.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

from rankscope.tracer.span import FLIGHT_RECORDER, NONE, SpanKind
from rankscope.tracer.topology import AXES, AxisGroup, derive_layout

from ..errors import TraceError
from .flight_recorder_dump import COALESCED, Call, Dump, State, find_rank, read_dump
from .kineto_reader import MAX_MEMBERS, WHOLE_JOB, Group, axis_of
from .spool_folder import Process, make_group_id, make_process_uuid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ..identity import Row

MAX_LISTED = 256
"""Communications in one event."""

ROOTED = ("broadcast", "_broadcast", "reduce", "_reduce", "gather", "scatter")
"""Collectives that a member may leave before another one has entered."""

Key = tuple[str, tuple[int, ...]]
"""Name and members of a group: PyTorch may give one name to several groups."""


@dataclass(slots=True, kw_only=True)
class Recorded:
    """The dumps of a job."""

    dumps: dict[int, Dump]
    """By rank. A rank whose file is missing has none."""

    unread: dict[int, str]
    """Why the file of a rank could not be read."""

    left_out: list[str]
    """What is to be said of files that were left out, one line each."""

    world_size: int
    silent_ns: int | None
    """Longest possible time from the newest record of all dumps until they were written; None if
    that is unknown. A file that is copied may get a later time."""

    groups: dict[Key, Group] = field(default_factory=dict)
    source: str = FLIGHT_RECORDER
    """Program that wrote them."""

    hosts: dict[int, str] = field(default_factory=dict)
    """By rank, if they say it."""

    @property
    def newest_ns(self) -> int:
        """Unix time of the newest record; 0 if there is none."""
        return max((dump.newest_ns for dump in self.dumps.values()), default=0)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks without a file."""
        return tuple(set(range(self.world_size)) - self.dumps.keys() - self.unread.keys())


def read_dumps(
    files: Sequence[Path], *, show: Callable[[int], object] = lambda _: None
) -> Recorded:
    """Read the dumps of a job. A file that can't be read is left out, and named.

    Args:
        files: Those of all ranks, and others, which are left out, too.
        show: Takes the number of files that have been read.

    Raises:
        TraceError: No file can be read, or the groups have more than `MAX_MEMBERS`.
    """
    recorded = Recorded(dumps={}, unread={}, left_out=[], world_size=0, silent_ns=None)
    written_ns = 0
    ordered = sorted(files, key=lambda path: (find_rank(path), path.suffix != "", path))
    for number, path in enumerate(ordered):
        show(number)
        rank = find_rank(path)
        if rank == NONE:
            recorded.left_out.append(f"{path} is left out: its name does not end with a rank")
            continue
        if rank in recorded.dumps:
            other = recorded.dumps[rank].path
            recorded.left_out.append(f"{path} is left out: {other} is of rank {rank}, too")
            continue
        try:
            status = path.stat()
            is_empty = not status.st_size
            dump = Dump(path=path, rank=rank, members={}) if is_empty else read_dump(path, rank)
        except (TraceError, OSError) as error:
            recorded.unread[rank] = str(error)
            recorded.left_out.append(f"{error}: it is left out")
            continue
        recorded.dumps[rank] = dump
        recorded.unread.pop(rank, None)
        written_ns = max(written_ns, status.st_mtime_ns)
    if not recorded.dumps:
        raise TraceError(files[0], f"there is no dump: {'; '.join(recorded.left_out[:3])}")
    known = [member for dump in recorded.dumps.values() for _, ranks in dump.members.values()
             for member in ranks]  # fmt: skip
    recorded.world_size = 1 + max(*recorded.dumps, *recorded.unread, *known, 0)
    if 0 < recorded.newest_ns <= written_ns:
        recorded.silent_ns = written_ns - recorded.newest_ns
    _find_groups(recorded)
    for rank in _find_stale(recorded):
        path = recorded.dumps.pop(rank).path
        reason = "all its calls are older than those of the other dumps, which went on without it"
        recorded.unread[rank] = f"{path}: {reason}"
        recorded.left_out.append(f"{path} is left out: {reason}: it is of an earlier start")
    return recorded


def _find_groups(recorded: Recorded) -> None:
    """Find the groups of the job, and give each dump the members of all that it uses.

    Gloo writes no members: these are the ranks that called something in a group of this name, and
    all ranks in the default group.
    """
    callers: dict[str, set[int]] = defaultdict(set)
    descriptions: dict[str, str] = {}
    for dump in recorded.dumps.values():
        for call in dump.calls:
            if call.group not in dump.members:
                callers[call.group].add(dump.rank)
                descriptions[call.group] = call.description
    whole = tuple(range(recorded.world_size))
    for name, ranks in callers.items():
        members = whole if descriptions[name] == WHOLE_JOB else tuple(sorted(ranks))
        for rank in ranks:
            recorded.dumps[rank].members[name] = descriptions[name], members
    num_members = 0
    for dump in recorded.dumps.values():
        for name, (description, members) in dump.members.items():
            if (name, members) in recorded.groups:
                continue
            num_members += len(members)
            if num_members > MAX_MEMBERS:
                reason = (
                    f"has process groups of more than {MAX_MEMBERS:,} members, with those before"
                )
                raise TraceError(dump.path, reason)
            recorded.groups[name, members] = Group(
                name=" ".join(filter(None, (description, name))),
                axis=axis_of(description),
                members=members,
                group_id=make_group_id(f"{FLIGHT_RECORDER} {name}", tuple(sorted(members))),
            )
    if not {group.axis for group in recorded.groups.values()} & AXES:
        # Without a named axis, the job is data parallel over the group of all ranks.
        for key, group in recorded.groups.items():
            if tuple(sorted(group.members)) == whole and group.axis == WHOLE_JOB:
                recorded.groups[key] = group._replace(axis="dp")


def _find_stale(recorded: Recorded) -> list[int]:
    """Return the ranks whose dumps are of an earlier start of the job than those of others.

    In one start, no member leaves a collective that another one has not called. If one did and all
    calls of one of the two are older than those of the other, the older dump is of another start.
    After a timeout, a device may report as ended what never did, but then both have calls of the
    same time.
    """
    stale: set[int] = set()
    for key, group in recorded.groups.items():
        calls = _collectives_of(recorded, key, group)
        called = {rank: max(own) for rank, own in calls.items() if own}
        ended = {
            rank: max((seq for seq, call in own.items() if _needs_all(call)), default=NONE)
            for rank, own in calls.items()
        }
        latest = sorted(called, key=lambda rank: -recorded.dumps[rank].oldest_ns)
        most_ended = list(accumulate((ended[rank] for rank in latest), max))
        least_called = list(accumulate((called[rank] for rank in latest), min))
        begins = [-recorded.dumps[rank].oldest_ns for rank in latest]
        for rank in called:
            later = bisect_left(begins, -recorded.dumps[rank].newest_ns) - 1
            if later >= 0 and (
                most_ended[later] > called[rank] or ended[rank] > least_called[later]
            ):
                stale.add(rank)
    return sorted(stale)


def _needs_all(call: Call) -> bool:
    """Return whether a collective has ended, which it can't before all its members called it."""
    return (
        call.is_certain and not call.name.startswith(ROOTED) and not call.name.endswith(COALESCED)
    )


def to_processes(recorded: Recorded, run_id: str) -> Iterator[Process]:
    """Yield the process of each rank that has a dump, or no file at all.

    What its dump has is an event, and the process has no records: a dump has neither steps nor
    compute.
    """
    groups = {
        group.group_id: (str(group.kind), group.name, tuple(sorted(group.members)))
        for group in recorded.groups.values()
    }
    notes = [
        f"no dump of rank {rank} could be read: {why}" for rank, why in recorded.unread.items()
    ]
    for rank, event in to_events(recorded).items():
        dump = recorded.dumps.get(rank)
        yield Process(
            run_id=run_id,
            rank=rank,
            world_size=recorded.world_size,
            host=recorded.hosts.get(rank, ""),
            manifest={
                **_find_layout(recorded, rank),
                "config": {"imported": recorded.source.replace("-", " ")},
                "started_ns": min((call.created_ns for call in dump.calls), default=None)
                if dump else None,
            },
            groups=groups,
            events=[event],
            state="unknown",
            notes=notes,
        )  # fmt: skip
        groups, notes = {}, []


def to_rows(recorded: Recorded, run_id: str, epoch: int) -> tuple[list[Row], list[Row]]:
    """Return the rows of ``groups`` and of ``events`` for an epoch of a run that is stored."""
    groups: list[Row] = [
        {
            "run_id": run_id,
            "epoch": epoch,
            "group_id": group.group_id,
            "kind": str(group.kind),
            "name": group.name,
            "members": sorted(group.members),
        }
        for group in recorded.groups.values()
    ]
    events: list[Row] = [
        {
            "run_id": run_id,
            "epoch": epoch,
            "rank": rank,
            **event,
            "data": json.dumps(event["data"]),
            "process": make_process_uuid(run_id, rank).hex(),
            "line": 0,
        }
        for rank, event in to_events(recorded).items()
    ]
    return groups, events


def _find_layout(recorded: Recorded, rank: int) -> dict[str, dict[str, int] | None]:
    """Return sizes and positions of the parallel axes, from the descriptions of the groups.

    Experts that span tensor-parallel ranks, too, as in Megatron-LM, are no axis of a layout here.
    """
    axes = [
        AxisGroup(axis=group.axis, members=group.members)
        for group in recorded.groups.values()
        if group.axis in AXES and rank in group.members
    ]
    for chosen in (axes, [axis for axis in axes if axis.axis != "ep"]):
        derived = derive_layout(chosen, rank=rank, world_size=recorded.world_size)
        if derived is not None:
            sizes, positions = derived.layout.to_dict(), derived.coords.to_dict()
            if len(chosen) < len(axes):
                del sizes["ep"], positions["ep"]
            return {"layout": sizes, "coords": positions}
    return {"layout": None, "coords": None}


def to_events(recorded: Recorded) -> dict[int, dict[str, Any]]:
    """Return an event with the content of each rank's dump, by rank.

    ``open`` are the communications that a rank had called and not ended: the oldest one of each
    group, and those in which other members are. ``queued`` are those that its device had not begun,
    if the dump has begins. ``ended`` are those that it has ended, and others have not. ``unlike``
    is, of each group, the first one that members called with unlike operations, sizes or types,
    ended or not: those after it need not belong together. ``last`` is the last one that it called,
    and ``called`` the number of the last collective in each group in which members differ.
    """
    listed: dict[int, dict[str, list[dict[str, Any]]]] = {
        rank: {"open": [], "queued": [], "ended": [], "unlike": []} for rank in recorded.dumps
    }
    called: dict[int, dict[str, int]] = defaultdict(dict)
    for key, group in recorded.groups.items():
        collectives = _collectives_of(recorded, key, group)
        newest = {rank: max(own) for rank, own in collectives.items() if own}
        if len(set(newest.values())) > 1:
            for rank, seq in newest.items():
                called[rank][f"{group.group_id:016x}"] = seq
        for rank, state, call in _compare_collectives(recorded, key, collectives):
            listed[rank][state].append(_to_entry(call, group))
        for rank, state, call in _compare_p2p(recorded, key, collectives):
            listed[rank][state].append(_to_entry(call, group))
        for rank, call in _find_unlike(collectives):
            listed[rank]["unlike"].append(_to_entry(call, group))
    at_ns = recorded.newest_ns
    events = {}
    for rank in sorted({*recorded.dumps, *recorded.missing}):
        dump = recorded.dumps.get(rank)
        data: dict[str, Any] = {
            state: list(islice(sorted(calls, key=lambda call: call["start_ns"]), MAX_LISTED))
            for state, calls in listed.get(rank, {}).items()
        }
        data["called"] = dict(islice(called[rank].items(), MAX_LISTED))
        data["has_dump"] = dump is not None and bool(dump.members)
        if dump is not None and dump.calls:
            call = max(dump.calls, key=lambda call: call.created_ns)
            group = recorded.groups[call.group, dump.members[call.group][1]]
            data["last"] = _to_entry(call, group) | {"frames": list(call.frames)}
        if recorded.silent_ns is not None:
            data["silent_ns"] = recorded.silent_ns
        if recorded.source != FLIGHT_RECORDER:
            data["source"] = recorded.source
        text = "no dump" if dump is None else f"dump {dump.path.name}"
        num_open = len(data.get("open", ()))
        events[rank] = {
            "at_ns": at_ns,
            "kind": FLIGHT_RECORDER,
            "text": f"{text}: {num_open} communications not ended" if dump else text,
            "data": data,
        }
    return events


def _collectives_of(recorded: Recorded, key: Key, group: Group) -> dict[int, dict[int, Call]]:
    """Return the collectives of a group by rank, of those with a dump, and number."""
    return {
        rank: {call.seq: call for call in _numbered(recorded.dumps[rank], key) if not call.is_p2p}
        for rank in group.members
        if rank in recorded.dumps
    }


def _find_unlike(calls: Mapping[int, Mapping[int, Call]]) -> list[tuple[int, Call]]:
    """Return, by rank, what members called under the first number under which that was unlike."""
    for seq in sorted({seq for own in calls.values() for seq in own}):
        called = [(rank, own[seq]) for rank, own in calls.items() if seq in own]
        names = {"p2p" if call.is_p2p else call.name for _, call in called}
        sizes = {call.num_bytes for _, call in called}
        dtypes = {call.dtype for _, call in called}
        are_sized = len(sizes) > 1 and min(sizes) > 0
        are_typed = len(dtypes) > 1 and "" not in dtypes
        if len(names) > 1 or are_sized or are_typed:
            return called
    return []


def _numbered(dump: Dump, key: Key) -> Iterator[Call]:
    """Yield the calls of a rank in a group, with their number in the group.

    Torchcomms numbers the calls of all groups of a process together, so that ranks with other
    groups count otherwise. If it has all calls, their place in the group is their number.
    """
    name, members = key
    if dump.members.get(name, ("", ()))[1] != members:
        return
    calls = [call for call in dump.calls if call.group == name]
    if not dump.is_counted_together:
        yield from calls
        return
    counts = {True: 0, False: 0}
    for call in calls:
        counts[call.is_p2p] += 1
        yield call._replace(seq=counts[call.is_p2p]) if dump.is_whole else call


def _compare_collectives(
    recorded: Recorded, key: Key, calls: Mapping[int, Mapping[int, Call]]
) -> Iterator[tuple[int, str, Call]]:
    """Yield how far each member is in the collectives in which a member is.

    A rank is in the oldest one that it has not ended: those after it wait for it. It has ended what
    is older than its oldest record, and what its dump leaves out between others.
    """
    newest = max((max(own, default=NONE) for own in calls.values()), default=NONE)
    is_complete = all(newest in own for own in calls.values())
    states: dict[int, dict[int, State]] = {}
    for rank, own in calls.items():
        states[rank] = {seq: call.state for seq, call in own.items()}
        last = own.get(newest)
        # What a member has not called can't have ended: the record was closed after a timeout.
        needs_all = last is not None and not last.name.startswith(ROOTED)
        if last is not None and needs_all and not is_complete and not last.is_certain:
            states[rank][newest] = min(last.state, State.LAUNCHED)
    fronts = {
        min((seq for seq, state in own.items() if state < State.ENDED), default=NONE)
        for own in states.values()
    } - {NONE}
    for seq in sorted(fronts):
        example = next(own[seq] for own in calls.values() if seq in own)
        for rank, own in calls.items():
            dump = recorded.dumps[rank]
            state = states[rank].get(seq)
            if state is None:
                has_ended = seq < max(own, default=NONE) or seq <= dump.completed.get(key[0], NONE)
                if has_ended:
                    # Its record is gone. What it called is unknown, and taken for the same.
                    yield rank, "ended", example
            else:
                yield rank, _place(dump, own[seq]._replace(state=state)), own[seq]


def _compare_p2p(
    recorded: Recorded, key: Key, members: Iterable[int]
) -> Iterator[tuple[int, str, Call]]:
    """Yield the p2p operations that have not ended or are unlike, numbered alike on both sides.

    PyTorch counts them by rank, and not by pair. If both dumps have all calls since the beginning,
    the place in the pair is the number. Else those of a pair that have not ended are taken to
    follow the same one, the last that has.
    """
    by_pair: dict[tuple[int, int], dict[int, list[Call]]] = defaultdict(dict)
    for rank in members:
        for call in _numbered(recorded.dumps[rank], key):
            if call.is_p2p:
                sides = _global_sides(call, key[1], rank)
                by_pair[sides].setdefault(rank, []).append(call._replace(sides=sides))
    for by_rank in by_pair.values():
        is_whole = all(recorded.dumps[rank].is_whole for rank in by_rank)
        calls = {
            rank: [call for call in own if is_whole or call.state < State.ENDED]
            for rank, own in by_rank.items()
        }
        first = 0 if is_whole else max((own[0].seq for own in calls.values() if own), default=0)
        numbered = [
            (rank, call._replace(seq=number))
            for rank, own in calls.items()
            for number, call in enumerate(own, first)
        ]
        not_ended = {call.seq for _, call in numbered if call.state < State.ENDED}
        for rank, call in numbered:
            if call.seq in not_ended:
                yield rank, _place(recorded.dumps[rank], call), call
        if is_whole:
            by_number = {
                rank: {call.seq: call for of, call in numbered if of == rank} for rank in by_rank
            }
            yield from ((rank, "unlike", call) for rank, call in _find_unlike(by_number))


def _place(dump: Dump, call: Call) -> str:
    """Return whether a call is open, ended, or queued on the device."""
    if call.state == State.ENDED:
        return "ended"
    return "open" if call.state == State.BEGUN or not dump.sees_begins else "queued"


def _global_sides(call: Call, members: Sequence[int], rank: int) -> tuple[int, int]:
    """Return the ranks of source and destination; `NONE` if they are unknown.

    Torchcomms names none, but in a group of two it is the other one.
    """
    if call.sides is not None and max(call.sides) < len(members):
        return members[call.sides[0]], members[call.sides[1]]
    others = [member for member in members if member != rank]
    if len(others) != 1:
        return NONE, NONE
    return (rank, others[0]) if call.name == "send" else (others[0], rank)


def _to_entry(call: Call, group: Group) -> dict[str, Any]:
    """Return a communication as the events ``stalled`` and ``lost`` have them."""
    kind = group.kind
    if call.is_p2p:
        kind = SpanKind.PP_SEND if call.name == "send" else SpanKind.PP_RECV
    entry: dict[str, Any] = {
        "name": call.name,
        "kind": str(kind),
        "step": NONE,
        "start_ns": call.created_ns,
        "group_id": f"{group.group_id:016x}",
        "seq": call.seq,
    }
    if call.num_bytes > 0:
        entry["num_bytes"] = call.num_bytes
    if call.dtype:
        entry["dtype"] = call.dtype
    if call.is_p2p and call.sides is not None and NONE not in call.sides:
        entry["sides"] = call.sides
    return entry
