"""Pipeline schedules: 1F1B, interleaved 1F1B, and the zero-bubble schedules ZB-H1 and ZB-V.

A schedule is the order in which a stage runs its forwards and backwards. It is the same for all
ranks of a stage and all steps, so it is computed once per run.

Zero-bubble schedules split the backward: first the gradients of the input, which the previous stage
waits for, and later those of the weights, which fill the bubble.

Source:
    Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241: ZB-H1 and ZB-V.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


class Schedule(StrEnum):
    """Kinds of schedules."""

    ONE_F_ONE_B = "1f1b"
    """One forward, one backward; interleaved if a stage has several chunks."""

    ZERO_BUBBLE = "zero-bubble"
    """ZB-H1: gradients of the weights come later than those of the input; interleaved if a stage
    has several chunks."""

    ZERO_BUBBLE_V = "zero-bubble-v"
    """ZB-V: two chunks per stage, arranged as a V: those of the last stage are neighbours."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One forward or backward of one micro-batch through one chunk of one stage."""

    stage: int
    is_forward: bool
    microbatch: int
    chunk: int
    """Number of the chunk on this stage, 0 for the first in the model."""

    is_weight: bool = False
    """Whether this is the second part of a split backward, which nothing waits for."""


def stage_slots(stage: int, *, pp: int, vpp: int, num_microbatches: int) -> list[Slot]:
    """Return the slots of one stage in the order in which 1F1B runs them.

    First the warm-up forwards, then forwards and backwards alternate, then the remaining backwards.

    Source:
        Narayanan et al., arXiv 2104.04473: 1F1B warms up with ``pp - 1 - stage``
        forwards, the interleaved schedule with ``2 (pp - 1 - stage) + (vpp - 1) pp``.
    """
    total = num_microbatches * vpp
    warm_up = pp - 1 - stage if vpp == 1 else 2 * (pp - 1 - stage) + (vpp - 1) * pp
    warm_up = min(warm_up, total)
    forwards = [slot_at(stage, k, pp=pp, vpp=vpp, is_forward=True) for k in range(total)]
    backwards = [slot_at(stage, k, pp=pp, vpp=vpp, is_forward=False) for k in range(total)]
    slots = forwards[:warm_up]
    for k in range(total - warm_up):
        slots += [forwards[warm_up + k], backwards[k]]
    return slots + backwards[total - warm_up :]


def run_order(
    waiting: list[list[Slot]], *, vpp: int, schedule: Schedule = Schedule.ONE_F_ONE_B
) -> tuple[Slot, ...]:
    """Return the slots of all stages, each after those that it depends on."""
    done: set[Slot] = set()
    order: list[Slot] = []

    def begin(slot: Slot) -> bool:
        sender = sender_of(slot, pp=len(waiting), vpp=vpp, schedule=schedule)
        if sender is not None and sender not in done:
            return False
        done.add(slot)
        order.append(slot)
        return True

    _run_in_turns(waiting, begin, order, f"{schedule} of pp {len(waiting)} vpp {vpp}")
    return tuple(order)


def _run_in_turns(
    waiting: Sequence[Sequence[T]], begin: Callable[[T], bool], order: Sequence[object], what: str
) -> None:
    """Begin the actions of each stage in its order; ``begin`` appends what it does to ``order``."""
    at = [0] * len(waiting)
    while any(place < len(actions) for place, actions in zip(at, waiting, strict=True)):
        before = len(order)
        for stage, actions in enumerate(waiting):
            while at[stage] < len(actions) and begin(actions[at[stage]]):
                at[stage] += 1
        if len(order) == before:
            raise AssertionError(f"{what} deadlocks")


def sender_of(
    slot: Slot, *, pp: int, vpp: int, schedule: Schedule = Schedule.ONE_F_ONE_B
) -> Slot | None:
    """Return the slot whose output ``slot`` receives; None if it receives nothing."""
    return _neighbour(slot, -1 if slot.is_forward else 1, pp=pp, vpp=vpp, schedule=schedule)


def receiver_of(
    slot: Slot, *, pp: int, vpp: int, schedule: Schedule = Schedule.ONE_F_ONE_B
) -> Slot | None:
    """Return the slot that receives the output of ``slot``; None if no slot does."""
    return _neighbour(slot, 1 if slot.is_forward else -1, pp=pp, vpp=vpp, schedule=schedule)


def _neighbour(slot: Slot, step: int, *, pp: int, vpp: int, schedule: Schedule) -> Slot | None:
    """Return the slot of the same micro-batch ``step`` chunks further in the model."""
    if slot.is_weight:
        return None
    is_v = schedule is Schedule.ZERO_BUBBLE_V
    back = is_v and slot.chunk % 2 == 1
    place = slot.chunk * pp + (pp - 1 - slot.stage if back else slot.stage) + step
    if not 0 <= place < pp * vpp:
        return None
    chunk, stage = divmod(place, pp)
    stage = pp - 1 - stage if is_v and chunk % 2 == 1 else stage
    return Slot(stage, slot.is_forward, slot.microbatch, chunk)


def slot_at(stage: int, k: int, *, pp: int, vpp: int, is_forward: bool) -> Slot:
    """Return the ``k``-th forward or backward of a stage; chunks alternate every ``pp`` of them."""
    if vpp == 1:
        return Slot(stage, is_forward, k, 0)
    chunk = k % (pp * vpp) // pp
    microbatch = k // (pp * vpp) * pp + k % pp
    return Slot(stage, is_forward, microbatch, chunk if is_forward else vpp - 1 - chunk)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages that a stage sends and receives in one call, and waits for together."""

    stage: int
    sends: tuple[Slot, ...] = ()
    """Slots of this stage whose output is sent."""

    receives: tuple[Slot, ...] = ()
    """Slots of this stage whose input is received."""


@dataclass(frozen=True, slots=True)
class Posted:
    """A stage starts an exchange."""

    exchange: Exchange


@dataclass(frozen=True, slots=True)
class Finished:
    """All partners of an exchange have started theirs, so that it can end."""

    exchange: Exchange


Action = Slot | Posted | Finished


def stage_exchanges(stage: int, *, pp: int, num_microbatches: int) -> list[Slot | Exchange]:
    """Return the slots and exchanges of a stage whose sends block.

    In the steady state a forward's output is sent in one call with receiving the backward's input,
    and vice versa. As separate calls, two neighbours that both send first would deadlock.

    Source:
        Narayanan et al., arXiv 2104.04473: 1F1B without interleaving.
    """
    slots = stage_slots(stage, pp=pp, vpp=1, num_microbatches=num_microbatches)
    actions: list[Slot | Exchange] = []
    for before, slot in zip([None, *slots], [*slots, None], strict=True):
        sends = (before,) if before and receiver_of(before, pp=pp, vpp=1) else ()
        receives = (slot,) if slot and sender_of(slot, pp=pp, vpp=1) else ()
        if before and slot and before.is_forward == slot.is_forward:
            # Warm-up and cool-down: send first, then receive.
            actions += [Exchange(stage, sends=sends)] if sends else []
            actions += [Exchange(stage, receives=receives)] if receives else []
        elif sends or receives:
            actions.append(Exchange(stage, sends=sends, receives=receives))
        actions += [slot] if slot else []
    return actions


def exchange_order(*, pp: int, num_microbatches: int) -> tuple[Action, ...]:
    """Return the actions of all stages, each after those that it depends on."""
    waiting = [
        stage_exchanges(stage, pp=pp, num_microbatches=num_microbatches) for stage in range(pp)
    ]
    posted: set[tuple[Slot, bool]] = set()
    order: list[Action] = []

    def begin(action: Slot | Exchange) -> bool:
        if isinstance(action, Exchange):
            return _exchange(action, posted, order, pp=pp)
        order.append(action)
        return True

    _run_in_turns(waiting, begin, order, f"the exchanges of pp {pp} m {num_microbatches}")
    return tuple(order)


def _exchange(
    exchange: Exchange, posted: set[tuple[Slot, bool]], order: list[Action], *, pp: int
) -> bool:
    """Post an exchange, the first time, and return whether it could be finished."""
    producers = [sender_of(slot, pp=pp, vpp=1) for slot in exchange.receives]
    mine = {(slot, True) for slot in exchange.sends}
    mine |= {(slot, False) for slot in producers if slot}
    if not mine <= posted:
        posted |= mine
        order.append(Posted(exchange))
    if not {(slot, not is_send) for slot, is_send in mine} <= posted:
        return False
    order.append(Finished(exchange))
    return True


V_CHUNKS = 2
"""Chunks a stage of a V-shaped pipeline."""


def deferring_slots(stage: int, *, pp: int, vpp: int, num_microbatches: int) -> list[Slot]:
    """Return the slots of one stage of ZB-H1, interleaved if it has several chunks.

    The order is that of 1F1B. The weights' gradients are ``stage`` backwards late; the rest of them
    follow after the last backward. No stage holds more activations than with 1F1B.
    """
    total = num_microbatches * vpp
    warm_up = min(pp - 1 - stage + (vpp - 1) * pp, total)
    forwards = [slot_at(stage, k, pp=pp, vpp=vpp, is_forward=True) for k in range(total)]
    backwards = [slot_at(stage, k, pp=pp, vpp=vpp, is_forward=False) for k in range(total)]
    slots = forwards[:warm_up]
    for k in range(total):
        slots += [*forwards[warm_up + k : warm_up + k + 1], backwards[k]]
        slots += [_weights(backwards[k - stage])] if k >= stage else []
    return slots + [_weights(slot) for slot in backwards[max(total - stage, 0) :]]


def v_slots(stage: int, *, pp: int, num_microbatches: int) -> list[Slot]:
    """Return the slots of one stage of ZB-V.

    Built for at least ``2 pp - 1`` micro-batches; slots of micro-batches beyond the actual number
    are removed.
    """
    num = max(2 * pp - 1, num_microbatches)
    slots: list[Slot] = []
    counts: Counter[str] = Counter()

    def run(*parts: str) -> None:
        """Add the next forward (F), backward (B) or weights' gradients (W) of chunk 0 or 1."""
        for part in parts:
            kind, chunk = part[0], int(part[1])
            slots.append(Slot(stage, kind == "F", counts[part], chunk, kind == "W"))
            counts[part] += 1

    for _ in range(2 * (pp - stage) - 1):
        run("F0")
    for _ in range(stage):
        run("F1", "F0")
    for _ in range(pp - stage):
        run("F1", "B1", "W1")
    while counts["F1"] < num:
        if counts["F0"] < num:
            run("F0")
        run("B0", "W0", "F1", "B1", "W1")
    for _ in range(stage):
        run("B0", "B1")
    for _ in range(pp - stage):
        run("B0", "W0")
    for part in ("W1", "W0"):
        while counts[part] < num:
            run(part)
    return [slot for slot in slots if slot.microbatch < num_microbatches]


def _weights(slot: Slot) -> Slot:
    return replace(slot, is_weight=True)
