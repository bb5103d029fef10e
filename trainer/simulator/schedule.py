"""In which order a stage runs its forwards and backwards: 1F1B, plain and interleaved.

The order is the same for all ranks of a stage, so it is found once for a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Slot:
    """One forward or backward of one micro-batch through one chunk of one stage."""

    stage: int
    is_forward: bool
    microbatch: int
    chunk: int
    """Of this stage, 0 the first in the model."""


def stage_slots(stage: int, *, pp: int, vpp: int, num_microbatches: int) -> list[Slot]:
    """Return the slots of one stage in the order in which it runs them.

    Warm-up forwards, then one forward and one backward in turn, then the
    remaining backwards.

    Source:
        Narayanan et al., arXiv 2104.04473: 1F1B warms up with ``pp - 1 - stage``
        forwards, the interleaved schedule with ``2 (pp - 1 - stage) + (vpp - 1) pp``.
    """
    total = num_microbatches * vpp
    warm_up = pp - 1 - stage if vpp == 1 else 2 * (pp - 1 - stage) + (vpp - 1) * pp
    warm_up = min(warm_up, total)
    forwards = [_slot(stage, k, pp=pp, vpp=vpp, is_forward=True) for k in range(total)]
    backwards = [_slot(stage, k, pp=pp, vpp=vpp, is_forward=False) for k in range(total)]
    slots = forwards[:warm_up]
    for k in range(total - warm_up):
        slots += [forwards[warm_up + k], backwards[k]]
    return slots + backwards[total - warm_up :]


def run_order(*, pp: int, vpp: int, num_microbatches: int) -> tuple[Slot, ...]:
    """Return the slots of all stages, each after the ones it depends on."""
    waiting = [
        stage_slots(stage, pp=pp, vpp=vpp, num_microbatches=num_microbatches) for stage in range(pp)
    ]
    at = [0] * pp
    done: set[Slot] = set()
    order: list[Slot] = []
    while len(order) < sum(map(len, waiting)):
        before = len(order)
        for stage, slots in enumerate(waiting):
            for slot in _ready(slots, at[stage], done, pp=pp, vpp=vpp):
                at[stage] += 1
                done.add(slot)
                order.append(slot)
        if len(order) == before:
            raise AssertionError(f"the schedule pp {pp} vpp {vpp} m {num_microbatches} deadlocks")
    return tuple(order)


def sender_of(slot: Slot, *, pp: int, vpp: int) -> Slot | None:
    """Return the slot whose output ``slot`` receives; None where it needs none."""
    step = -1 if slot.is_forward else 1
    stage, chunk = slot.stage + step, slot.chunk
    if not 0 <= stage < pp:
        stage, chunk = stage % pp, chunk + step
    if not 0 <= chunk < vpp:
        return None
    return Slot(stage, slot.is_forward, slot.microbatch, chunk)


def receiver_of(slot: Slot, *, pp: int, vpp: int) -> Slot | None:
    """Return the slot that receives the output of ``slot``; None where it is the last."""
    step = 1 if slot.is_forward else -1
    stage, chunk = slot.stage + step, slot.chunk
    if not 0 <= stage < pp:
        stage, chunk = stage % pp, chunk + step
    if not 0 <= chunk < vpp:
        return None
    return Slot(stage, slot.is_forward, slot.microbatch, chunk)


def _ready(slots: list[Slot], first: int, done: set[Slot], *, pp: int, vpp: int) -> Iterator[Slot]:
    for slot in slots[first:]:
        sender = sender_of(slot, pp=pp, vpp=vpp)
        if sender is not None and sender not in done:
            return
        yield slot


def _slot(stage: int, k: int, *, pp: int, vpp: int, is_forward: bool) -> Slot:
    """Return the ``k``-th forward or backward of a stage: chunks take ``pp`` micro-batches each."""
    if vpp == 1:
        return Slot(stage, is_forward, k, 0)
    chunk = k % (pp * vpp) // pp
    microbatch = k // (pp * vpp) * pp + k % pp
    return Slot(stage, is_forward, microbatch, chunk if is_forward else vpp - 1 - chunk)


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages that one stage sends and receives in one call, and waits for together."""

    stage: int
    sends: tuple[Slot, ...] = ()
    """Slots of this stage whose output goes out."""

    receives: tuple[Slot, ...] = ()
    """Slots of this stage whose input comes in."""


@dataclass(frozen=True, slots=True)
class Posted:
    """A stage comes to an exchange."""

    exchange: Exchange


@dataclass(frozen=True, slots=True)
class Finished:
    """All partners of an exchange have come to theirs: it can end."""

    exchange: Exchange


Action = Slot | Posted | Finished


def stage_exchanges(stage: int, *, pp: int, num_microbatches: int) -> list[Slot | Exchange]:
    """Return what a stage does when it waits for what it sends as well.

    In the steady state each forward's output goes out in one call with the
    backward's input, and the other way round: apart, two neighbours that both
    send first would wait for each other for ever.

    Source:
        Narayanan et al., arXiv 2104.04473: 1F1B without interleaving.
    """
    slots = stage_slots(stage, pp=pp, vpp=1, num_microbatches=num_microbatches)
    actions: list[Slot | Exchange] = []
    for before, slot in zip([None, *slots], [*slots, None], strict=True):
        sends = (before,) if before and receiver_of(before, pp=pp, vpp=1) else ()
        receives = (slot,) if slot and sender_of(slot, pp=pp, vpp=1) else ()
        if before and slot and before.is_forward == slot.is_forward:
            # Warming up and cooling down: out first, then in.
            actions += [Exchange(stage, sends=sends)] if sends else []
            actions += [Exchange(stage, receives=receives)] if receives else []
        elif sends or receives:
            actions.append(Exchange(stage, sends=sends, receives=receives))
        actions += [slot] if slot else []
    return actions


def exchange_order(*, pp: int, num_microbatches: int) -> tuple[Action, ...]:
    """Return the actions of all stages, each after the ones it depends on."""
    waiting = [
        stage_exchanges(stage, pp=pp, num_microbatches=num_microbatches) for stage in range(pp)
    ]
    at = [0] * pp
    posted: set[tuple[Slot, bool]] = set()
    order: list[Action] = []
    while any(place < len(actions) for place, actions in zip(at, waiting, strict=True)):
        before = len(order)
        for stage, actions in enumerate(waiting):
            while at[stage] < len(actions):
                action = actions[at[stage]]
                if isinstance(action, Slot):
                    order.append(action)
                elif not _exchange(action, posted, order, pp=pp):
                    break
                at[stage] += 1
        if len(order) == before:
            raise AssertionError(f"the exchanges of pp {pp} m {num_microbatches} deadlock")
    return tuple(order)


def _exchange(
    exchange: Exchange, posted: set[tuple[Slot, bool]], order: list[Action], *, pp: int
) -> bool:
    """Post an exchange once; return whether it could be finished."""
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
