"""The process groups of gloo's communication in profiles, whose events name none.

Each group of gloo has threads of its own, which start when it is made, and a communication is an
annotation on one of them. So the threads of a rank, by their numbers, belong to its groups in the
order in which these were made. Which groups have threads in the profile follows from the other
members: a group communicates as often in a step on all of them, and none ends before all have
begun.

Source: ``ProcessGroupGloo.cpp`` (``Options::threads``, two by default, and ``runLoop``).
"""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from rankscope.tracer.span import NONE

from .kineto_reader import index_around

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .kineto_reader import RankTrace

GROUP_NAME = "Process Group Name"
THREADS_OF_GROUP = 2
MAX_ASSIGNMENTS = 4096
"""Of the threads of a rank to its groups; with more, groups stay unknown."""

P2P = ("send", "recv")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
"""Collectives that a member may leave before another one has entered."""

Assignment = dict[str, str]
"""Name of the group by thread."""


class _Call(NamedTuple):
    step: int
    name: str
    start_ns: int
    end_ns: int


class _Rank(NamedTuple):
    """A rank, and how its threads may belong to its groups."""

    trace: RankTrace
    assignments: list[Assignment]
    calls: list[dict[int, list[_Call]]]
    """Of each assignment: collectives in the steps by id of their group, ascending by begin."""


def misses_groups(trace: RankTrace) -> bool:
    """Return whether the communication of a processor may be of several groups and names none."""
    members = {group.members for group in trace.groups.values() if len(group.members) > 1}
    return not trace.is_of_device and len(members) > 1 and bool(trace.comm)


def name_groups(traces: Sequence[RankTrace]) -> None:
    """Give communication of gloo the name of its group, if only one is possible on each rank.

    Args:
        traces: Of all ranks that were imported, of one window of steps.
    """
    ranks = {trace.rank: _list_assignments(trace) for trace in traces}
    left = {rank: set(range(len(each.assignments))) for rank, each in ranks.items()}
    is_stable = False
    while not is_stable:
        is_stable = True
        for rank, numbers in left.items():
            kept = {
                number
                for number in numbers
                if all(
                    any(_agree(ranks[rank], number, ranks[other], each) for each in others)
                    for other, others in left.items()
                    if other != rank
                )
            }
            is_stable &= kept == numbers
            left[rank] = kept
    if all(len(numbers) == 1 for numbers in left.values()):
        for rank, (number,) in left.items():
            for work in ranks[rank].trace.comm:
                group = ranks[rank].assignments[number][work.thread]
                work.event["args"].setdefault(GROUP_NAME, group)


def _list_assignments(trace: RankTrace) -> _Rank:
    """List how threads may belong to groups: in order, with at most two threads for each."""
    groups = [name for name, group in trace.groups.items() if len(group.members) > 1]
    threads = sorted({work.thread for work in trace.comm}, key=lambda thread: (len(thread), thread))
    assignments: list[Assignment] = []
    if (1 + THREADS_OF_GROUP) ** len(groups) <= MAX_ASSIGNMENTS:
        for counts in product(range(1 + THREADS_OF_GROUP), repeat=len(groups)):
            if sum(counts) == len(threads):
                names = (name for name, num in zip(groups, counts, strict=True) for _ in range(num))
                assignments.append(dict(zip(threads, names, strict=True)))
    return _Rank(trace, assignments, [_calls_by_group(trace, each) for each in assignments])


def _calls_by_group(trace: RankTrace, assignment: Assignment) -> dict[int, list[_Call]]:
    calls: dict[int, list[_Call]] = defaultdict(list)
    for work in trace.comm:
        index, name = index_around(trace.steps, work.launch_ns), work.event["name"].split(":")[-1]
        if index != NONE and name not in P2P:
            group = trace.groups[assignment[work.thread]]
            call = _Call(trace.steps[index][2], name, work.start_ns, work.end_ns)
            calls[group.group_id].append(call)
    return calls


def _agree(one: _Rank, number: int, other: _Rank, each: int) -> bool:
    """Return whether two ranks communicate alike in all groups that both are in."""
    is_one_clock = one.trace.host == other.trace.host
    return all(
        _are_alike(
            one.calls[number].get(group.group_id, []),
            other.calls[each].get(group.group_id, []),
            is_one_clock=is_one_clock,
        )
        for group in one.trace.groups.values()
        if other.trace.rank in group.members
    )


def _are_alike(own: Sequence[_Call], others: Sequence[_Call], *, is_one_clock: bool) -> bool:
    return len(own) == len(others) and all(
        one[:2] == other[:2]
        and (
            not is_one_clock
            or one.name.startswith(ROOTED)
            or max(one.start_ns, other.start_ns) <= min(one.end_ns, other.end_ns)
        )
        for one, other in zip(own, others, strict=True)
    )
