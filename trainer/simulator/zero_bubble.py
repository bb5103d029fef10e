"""Schedules whose backward is split: first the gradients of the input, which the stage before
waits for, and later those of the weights, which fill the bubble.

Source:
    Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241: ZB-H1 and ZB-V.
"""

from __future__ import annotations

from dataclasses import replace

from .scenario import V_CHUNKS
from .schedule import Slot, slot_at


def deferring_slots(stage: int, *, pp: int, vpp: int, num_microbatches: int) -> list[Slot]:
    """Return the slots of one stage of ZB-H1, interleaved where it has several chunks.

    The order is that of 1F1B; the weights' gradients begin ``stage`` backwards
    late, and after the last backward the rest of them follow. No stage holds
    more activations than under 1F1B.
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

    Laid out for at least ``2 pp - 1`` micro-batches; of fewer the missing ones' slots drop out.
    """
    num = max(2 * pp - 1, num_microbatches)
    work = _Counter(stage)
    for _ in range(2 * (pp - stage) - 1):
        work.forward(0)
    for _ in range(stage):
        work.forward(1)
        work.forward(0)
    for _ in range(pp - stage):
        work.forward(1)
        work.backward(1)
        work.weights(1)
    while work.num_forwards[1] < num:
        if work.num_forwards[0] < num:
            work.forward(0)
        work.backward(0)
        work.weights(0)
        work.forward(1)
        work.backward(1)
        work.weights(1)
    for _ in range(stage):
        work.backward(0)
        work.backward(1)
    for _ in range(pp - stage):
        work.backward(0)
        work.weights(0)
    for chunk in (1, 0):
        while work.num_weights[chunk] < num:
            work.weights(chunk)
    return [slot for slot in work.slots if slot.microbatch < num_microbatches]


class _Counter:
    """Hands out each chunk's forwards and backwards in the order of its micro-batches."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self.slots: list[Slot] = []
        self.num_forwards = [0] * V_CHUNKS
        self.num_backwards = [0] * V_CHUNKS
        self.num_weights = [0] * V_CHUNKS

    def forward(self, chunk: int) -> None:
        self._add(self._slot(self.num_forwards[chunk], chunk, is_forward=True))
        self.num_forwards[chunk] += 1

    def backward(self, chunk: int) -> None:
        self._add(self._slot(self.num_backwards[chunk], chunk, is_forward=False))
        self.num_backwards[chunk] += 1

    def weights(self, chunk: int) -> None:
        self._add(_weights(self._slot(self.num_weights[chunk], chunk, is_forward=False)))
        self.num_weights[chunk] += 1

    def _slot(self, microbatch: int, chunk: int, *, is_forward: bool) -> Slot:
        return Slot(self._stage, is_forward, microbatch, chunk)

    def _add(self, slot: Slot) -> None:
        self.slots.append(slot)


def _weights(slot: Slot) -> Slot:
    return replace(slot, is_weight=True)
