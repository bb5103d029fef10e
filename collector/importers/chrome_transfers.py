"""Communication that a trace of forwards and backwards does not have, and that they imply.

A forward needs what its micro-batch's forward on the stage before computed, and a backward what the
one on the stage after did; after the last stage comes the next model chunk on the first. So a stage
that idles until then waits for it, whether the trace has the send and the receive or not. Without
them, idle time would look like a late host. So with the gradients of replicas: none goes on before
all have ended their last backward.

What is not known is when the data arrived: between the end of the producer and the begin of the
pass that needs it. A transfer is given the median of that time on its link, counted from when both
sides were free; idle time beyond it is left to the host.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from rankscope.tracer.span import SpanKind

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from .chrome_events import Interval

MAX_OUT_OF_ORDER_RATIO = 0.05
"""Share of passes that may begin before what they need has ended. More: the chunks are placed in
another order than from stage to stage, and nothing is derived."""

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
    """The producer ended."""

    posted_ns: int
    """The receiving stage was free."""

    end_ns: int


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

    producer: Pass
    consumer: Pass
    posted_ns: int

    @property
    def ready_ns(self) -> int:
        """Return when both sides were free."""
        return max(self.producer.event.end_ns, self.posted_ns)


def derive_transfers(
    passes: Sequence[Pass],
    along: Mapping[int, tuple[int, ...]],
    num_chunks: int,
    step_begins: Mapping[tuple[int, int], int],
) -> list[Transfer]:
    """Return the transfers that passes imply, in the order in which each link carried them.

    Args:
        passes: Of all ranks, ascending by begin on each.
        along: By rank: the ranks of its pipeline, by stage.
        num_chunks: Model chunks of a stage.
        step_begins: By rank and step, ns since the trace's origin.

    Returns:
        Empty if more passes than `MAX_OUT_OF_ORDER_RATIO` begin before what they need has ended.
    """
    handovers = list(_find_handovers(passes, along, num_chunks, step_begins))
    sound = [
        handover
        for handover in handovers
        if handover.producer.event.end_ns <= handover.consumer.event.start_ns
    ]
    if len(handovers) - len(sound) > MAX_OUT_OF_ORDER_RATIO * len(handovers):
        return []
    took: dict[tuple[int, int, SpanKind], list[int]] = defaultdict(list)
    for handover in sound:
        took[_link(handover)].append(handover.consumer.event.start_ns - handover.ready_ns)
    usual = {link: round(median(times)) for link, times in took.items()}
    return [
        Transfer(
            src=handover.producer.rank,
            dst=handover.consumer.rank,
            kind=handover.consumer.kind,
            step=handover.consumer.event.step,
            microbatch=handover.consumer.event.microbatch,
            chunk=handover.consumer.event.chunk,
            sent_ns=handover.producer.event.end_ns,
            posted_ns=handover.posted_ns,
            end_ns=min(
                handover.ready_ns + usual[_link(handover)], handover.consumer.event.start_ns
            ),
        )
        for handover in sound
    ]


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


def _link(handover: Handover) -> tuple[int, int, SpanKind]:
    return handover.producer.rank, handover.consumer.rank, handover.consumer.kind


def _find_handovers(
    passes: Sequence[Pass],
    along: Mapping[int, tuple[int, ...]],
    num_chunks: int,
    step_begins: Mapping[tuple[int, int], int],
) -> Iterator[Handover]:
    """Yield each first pass of a micro-batch and chunk on a rank that needs one of another rank."""
    first: dict[tuple[object, ...], Pass] = {}
    for each in passes:  # of a split backward, the first part hands over
        first.setdefault(_place(each), each)
    free_ns: dict[int, int] = {}
    for each in passes:
        event, direction = each.event, STEPS_OF[each.kind]
        begin_ns = step_begins[each.rank, event.step]
        posted_ns = min(max(free_ns.get(each.rank, begin_ns), begin_ns), event.start_ns)
        free_ns[each.rank] = event.end_ns
        line, chunk = along[each.rank], max(event.chunk, 0)
        stage = line.index(each.rank) - direction
        if not 0 <= stage < len(line):
            stage, chunk = stage % len(line), chunk - direction
        producer = first.get((line[stage], each.kind, event.step, event.microbatch, chunk))
        is_first = first[_place(each)] is each
        if is_first and 0 <= chunk < num_chunks and producer and producer.rank != each.rank:
            yield Handover(producer, each, posted_ns)


def _place(each: Pass) -> tuple[object, ...]:
    event = each.event
    return each.rank, each.kind, event.step, event.microbatch, max(event.chunk, 0)
