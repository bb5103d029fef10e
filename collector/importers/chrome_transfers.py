"""Communication that a trace of forwards and backwards does not have, and that they imply.

A forward needs what its micro-batch's forward on the stage before computed, and a backward what the
one on the stage after did; after the last stage comes the next model chunk on the first. So a stage
that idles until then waits for it, whether the trace has the send and the receive or not. Without
them, idle time would look like a late host. So with the gradients of replicas: none goes on before
all have ended their last backward.

Megatron-LM's interleaved schedule also exchanges: after a pass, a stage sends its result and
receives what the next pass of the same direction needs, in the order of its calls for each peer,
and the next such pass begins when both are done. So it also waits for the stage that receives from
it. Whether a job does so is seen from its passes: none begins before its exchange can have ended.

What is not known is when the data arrived: between the end of the producer and the begin of the
pass that needs it. A transfer is given the median of that time on its link, of passes for which a
stage waited, counted from when both sides were free; idle time beyond it is left to the host.

Source: ``send_forward_recv_forward`` and ``overlap_p2p_comm`` in Megatron-LM's
``core/pipeline_parallel/schedules.py``.
"""

from __future__ import annotations

from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from rankscope.tracer.span import NONE, SpanKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .chrome_events import Interval

MAX_OUT_OF_ORDER_RATIO = 0.05
"""Share of passes that may begin before what they need has ended. More: the chunks are placed in
another order than from stage to stage, and nothing is derived, or stages do not exchange."""

STEPS_OF = {SpanKind.FORWARD: 1, SpanKind.BACKWARD: -1}
"""Direction in which a pass moves over the stages."""


class Pass(NamedTuple):
    """A forward or backward of one micro-batch and model chunk on one rank."""

    rank: int
    kind: SpanKind
    event: Interval


class Transfer(NamedTuple):
    """A derived transfer. Times are ns since the trace's origin."""

    src: int
    dst: int
    kind: SpanKind
    """Of the pass that sends and of the one that needs it."""

    step: int
    microbatch: int
    chunk: int
    """Of the pass that needs it."""

    sent_ns: int
    """The sender was free, after the producer had ended."""

    posted_ns: int
    """The receiver was free."""

    end_ns: int
    is_waited: bool
    """Whether the receiving stage waited for it, so that its pass shows the end."""


class Wait(NamedTuple):
    """Derived wait of a stage for a transfer, before a pass. Times are ns since the origin."""

    rank: int
    transfer: int
    """Its index."""

    begin_ns: int
    end_ns: int


class Transfers(NamedTuple):
    """The derived transfers of a job, in the order in which each link carried them."""

    transfers: list[Transfer]
    waits: list[Wait] | None
    """None: stages do not exchange. Each receive is a wait, then, and no send is."""


class Sync(NamedTuple):
    """Derived synchronisation of the gradients of replicas. Times are ns since the origin."""

    members: tuple[int, ...]
    step: int
    begins_ns: tuple[int, ...]
    """By member: its last pass ended."""

    end_ns: int
    """The last member's begin: how long the reduction took is unknown."""


class Handover(NamedTuple):
    """A pass and what it needs, on another rank."""

    producer: int
    """Index of the pass."""

    consumer: int
    posted_ns: int
    """The consumer's stage was free."""

    src: int
    dst: int
    kind: SpanKind
    end_ns: int
    """Of the producer."""

    start_ns: int
    """Of the consumer."""


def derive_transfers(
    passes: Sequence[Pass],
    along: Mapping[int, tuple[int, ...]],
    num_chunks: int,
    step_begins: Mapping[tuple[int, int], int],
) -> Transfers:
    """Return the transfers that passes imply, and the waits for them.

    Args:
        passes: Of all ranks, ascending by begin on each.
        along: By rank: the ranks of its pipeline, by stage.
        num_chunks: Model chunks of a stage.
        step_begins: By rank and step, ns since the trace's origin.

    Returns:
        Empty if more passes than `MAX_OUT_OF_ORDER_RATIO` begin before what they need has ended.
    """
    handovers = list(_find_handovers(passes, along, num_chunks, step_begins))
    sound = [handover for handover in handovers if handover.end_ns <= handover.start_ns]
    if len(handovers) - len(sound) > MAX_OUT_OF_ORDER_RATIO * len(handovers):
        return Transfers([], None)
    before = _find_before(passes)
    sides = _follow_exchanges(passes, sound, before)
    if sides is None or not _are_kept(passes, sound, sides, before):
        sides = [(each.end_ns, each.posted_ns) for each in sound]
        return Transfers(_time_transfers(passes, sound, sides), None)
    transfers = _time_transfers(passes, sound, sides)
    return Transfers(transfers, list(_find_waits(passes, sound, transfers, before)))


def _time_transfers(
    passes: Sequence[Pass], handovers: Sequence[Handover], sides: Sequence[tuple[int, int]]
) -> list[Transfer]:
    """Return the transfers with their ends.

    Args:
        sides: Of each handover: when the sender and when the receiver was free. Later than the
            pass that needs it: not known better than by the passes.
    """
    took: dict[tuple[object, ...], list[int]] = defaultdict(list)
    waited: dict[tuple[object, ...], list[int]] = defaultdict(list)
    plain = ((each.end_ns, each.posted_ns) for each in handovers)
    sides = [
        both if max(both) <= each.start_ns else own
        for each, both, own in zip(handovers, sides, plain, strict=True)
    ]
    for each, both in zip(handovers, sides, strict=True):
        link, ready_ns = (each.src, each.dst, each.kind), max(both)
        took[link].append(each.start_ns - max(ready_ns, each.posted_ns))
        if ready_ns > each.posted_ns:
            waited[link].append(each.start_ns - ready_ns)
    usual = {link: round(median(waited[link] or times)) for link, times in took.items()}
    return [
        Transfer(
            src=each.src,
            dst=each.dst,
            kind=each.kind,
            step=passes[each.consumer].event.step,
            microbatch=passes[each.consumer].event.microbatch,
            chunk=passes[each.consumer].event.chunk,
            sent_ns=sent_ns,
            posted_ns=posted_ns,
            end_ns=min(
                max(sent_ns, posted_ns) + usual[each.src, each.dst, each.kind], each.start_ns
            ),
            is_waited=max(sent_ns, posted_ns) > each.posted_ns,
        )
        for each, (sent_ns, posted_ns) in zip(handovers, sides, strict=True)
    ]


def _find_before(passes: Sequence[Pass]) -> list[int]:
    """Return the pass before each one of its direction on its rank in its step; `NONE`: none."""
    newest: dict[tuple[object, ...], int] = {}
    before = []
    for index, each in enumerate(passes):
        place = each.rank, each.event.step, each.kind
        before.append(newest.get(place, NONE))
        newest[place] = index
    return before


def _follow_exchanges(
    passes: Sequence[Pass], handovers: Sequence[Handover], before: Sequence[int]
) -> list[tuple[int, int]] | None:
    """Return when both sides of each handover began at the earliest, if stages exchange.

    A send is called after its pass, a receive after the pass before of its direction, and each
    begins when those that its rank called before for the same peer are done. A transfer is done
    when both sides have begun.

    Returns:
        None if the transfers would block each other.
    """
    called: dict[tuple[int, int, int], dict[int, list[int]]] = defaultdict(
        lambda: defaultdict(list)
    )
    sides: list[tuple[tuple[int, int, int], int, int]] = []
    for number, each in enumerate(handovers):
        step = passes[each.producer].event.step
        receive = before[each.consumer]
        receive_ns = each.posted_ns if receive == NONE else passes[receive].event.end_ns
        sent = (each.src, each.dst, step), each.end_ns
        received = (each.dst, each.src, step), receive_ns
        for link, at_ns in (sent, received):
            called[link][at_ns].append(number)
            sides.append((link, at_ns, number))
    earlier: dict[tuple[tuple[int, int, int], int], list[int]] = {}
    for link, by_time in called.items():
        times = sorted(by_time)
        earlier |= {(link, at_ns): by_time[last] for last, at_ns in pairwise(times)}
    needs: dict[int, set[int]] = defaultdict(set)
    for link, at_ns, number in sides:
        needs[number].update(earlier.get((link, at_ns), ()))
    done_ns: dict[int, int] = {}
    begins: dict[int, tuple[int, int]] = {}
    try:
        for number in TopologicalSorter(needs).static_order():
            both = [
                max(at_ns, *(done_ns[other] for other in earlier.get((link, at_ns), ())), 0)
                for link, at_ns, _ in sides[2 * number : 2 * number + 2]
            ]
            begins[number] = both[0], both[1]
            done_ns[number] = max(both)
    except CycleError:
        return None
    return [begins[number] for number in range(len(handovers))]


def _are_kept(
    passes: Sequence[Pass],
    handovers: Sequence[Handover],
    sides: Sequence[tuple[int, int]],
    before: Sequence[int],
) -> bool:
    """Return whether the passes that an exchange delays beyond their inputs begin after it."""
    input_ns, sent_ns, received_ns = ([0] * len(passes) for _ in range(3))
    for handover, both in zip(handovers, sides, strict=True):
        input_ns[handover.consumer] = handover.end_ns
        received_ns[handover.consumer] = max(both)
        sent_ns[handover.producer] = max(both)
    num_later = num_early = 0
    free_ns: dict[int, int] = {}
    for index, each in enumerate(passes):
        needed_ns = max(input_ns[index], free_ns.get(each.rank, 0))
        free_ns[each.rank] = each.event.end_ns
        exchanged_ns = max(received_ns[index], sent_ns[before[index]] if before[index] >= 0 else 0)
        if exchanged_ns > needed_ns:
            num_later += 1
            num_early += each.event.start_ns < exchanged_ns
    return num_later > 0 and num_early <= MAX_OUT_OF_ORDER_RATIO * num_later


def _find_waits(
    passes: Sequence[Pass],
    handovers: Sequence[Handover],
    transfers: Sequence[Transfer],
    before: Sequence[int],
) -> Iterator[Wait]:
    """Yield the waits of each pass: for its input, and for the send after the one before."""
    waited: dict[int, list[int]] = defaultdict(list)
    sent: dict[int, list[int]] = defaultdict(list)
    for number, handover in enumerate(handovers):
        waited[handover.consumer].append(number)
        sent[handover.producer].append(number)
    free_ns: dict[tuple[int, int], int] = {}
    for index, each in enumerate(passes):
        numbers = [*waited[index], *(sent[before[index]] if before[index] != NONE else ())]
        place = each.rank, each.event.step
        begin_ns = free_ns.get(place, each.event.start_ns)
        for number in waited[index]:
            begin_ns = min(begin_ns, handovers[number].posted_ns)
        for number in sorted(numbers, key=lambda number: transfers[number].end_ns):
            end_ns = min(transfers[number].end_ns, each.event.start_ns)
            if end_ns > begin_ns:
                yield Wait(each.rank, number, begin_ns, end_ns)
                begin_ns = end_ns
        free_ns[place] = each.event.end_ns


def derive_syncs(
    passes: Sequence[Pass],
    along: Mapping[int, tuple[int, ...]],
    goes_on_ns: Mapping[tuple[int, int], int],
) -> list[Sync]:
    """Return the synchronisations of gradients that passes imply, one for each step and group.

    Args:
        passes: Of all ranks.
        along: By rank: the replicas of its part of the model.
        goes_on_ns: By rank and step: begin of what follows its last pass.

    Returns:
        Empty if in more than `MAX_OUT_OF_ORDER_RATIO` a replica went on before all had ended.
    """
    ends: dict[tuple[int, int], int] = {}
    for each in passes:
        key = each.rank, each.event.step
        ends[key] = max(each.event.end_ns, ends.get(key, 0))
    groups = [
        (members, step)
        for members in sorted(set(along.values()))
        for step in sorted({step for _, step in ends})
        if all((rank, step) in ends for rank in members)
    ]
    syncs = []
    for members, step in groups:
        begins_ns = tuple(ends[rank, step] for rank in members)
        if all(goes_on_ns[rank, step] >= max(begins_ns) for rank in members):
            syncs.append(Sync(members, step, begins_ns, max(begins_ns)))
    is_rare = len(groups) - len(syncs) <= MAX_OUT_OF_ORDER_RATIO * len(groups)
    return syncs if is_rare else []


def _find_handovers(
    passes: Sequence[Pass],
    along: Mapping[int, tuple[int, ...]],
    num_chunks: int,
    step_begins: Mapping[tuple[int, int], int],
) -> Iterator[Handover]:
    """Yield each first pass of a micro-batch and chunk on a rank that needs one of another rank."""
    first: dict[tuple[object, ...], int] = {}
    for index, each in enumerate(passes):  # of a split backward, the first part hands over
        first.setdefault(_place(each), index)
    free_ns: dict[int, int] = {}
    for index, each in enumerate(passes):
        event, direction = each.event, STEPS_OF[each.kind]
        begin_ns = step_begins[each.rank, event.step]
        posted_ns = min(max(free_ns.get(each.rank, begin_ns), begin_ns), event.start_ns)
        free_ns[each.rank] = event.end_ns
        line, chunk = along[each.rank], max(event.chunk, 0)
        stage = line.index(each.rank) - direction
        if not 0 <= stage < len(line):
            stage, chunk = stage % len(line), chunk - direction
        producer = first.get((line[stage], each.kind, event.step, event.microbatch, chunk))
        is_needed = first[_place(each)] == index and 0 <= chunk < num_chunks
        if is_needed and producer is not None and line[stage] != each.rank:
            yield Handover(
                producer=producer,
                consumer=index,
                posted_ns=posted_ns,
                src=line[stage],
                dst=each.rank,
                kind=each.kind,
                end_ns=passes[producer].event.end_ns,
                start_ns=event.start_ns,
            )


def _place(each: Pass) -> tuple[object, ...]:
    event = each.event
    return each.rank, each.kind, event.step, event.microbatch, max(event.chunk, 0)
