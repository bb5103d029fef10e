"""What the planted faults do on one rank, at each place of a step where one can act.

Compute faults set the timer's slowdown. All else happens where it would in a
real job: a stalled host between two launches, a slow loader before the first
forward, a collection of garbage before a forward, a late launch before the
gradients' reduction, a checkpoint after the update.
"""

from __future__ import annotations

import math
import os
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ..checkpoint import save_checkpoint
from ..lengths import compute_factor, draw_documents
from ..model import pack
from ..ranks import coords_of
from .ending import die, stand_still
from .garbage import GarbageHeap
from .links import Links
from .spec import ENDING_CAUSES, FaultCause, slowdown_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch

    from ..config import TrainerConfig
    from ..model import Stage
    from ..pace import SegmentTimer
    from .spec import Fault

NS_PER_S = 1e9
SKEW_PERIOD_STEPS = 8.0
"""Steps after which the same member of a skewed group is late again; the simulator's too."""


class PlantedFaults:
    """The faults of one rank; it does nothing before the first `begin_step`.

    Args:
        config: The job, with what is planted.
        rank: This rank.
        stage: Its part of the model.
        timer: Of its segments.
    """

    def __init__(
        self, config: TrainerConfig, *, rank: int, stage: Stage, timer: SegmentTimer
    ) -> None:
        self._config = config
        self._rank = rank
        self._coords = coords_of(rank, config.layout)
        self._stage = stage
        self._timer = timer
        self._step: int | None = None
        self._slowdown = 1.0
        self._heaps: dict[int, GarbageHeap] = {}
        self._links: Links | None = None
        self._folder: TemporaryDirectory[str] | None = None
        self.documents: tuple[tuple[int, ...], ...] | None = None
        """Of each micro-batch of this step, the lengths of its sequences' documents; None: each
        sequence is one document."""

    def prepare(self) -> None:
        """Make ready what takes time; all ranks must call, after the warm-up."""
        if self._planted(FaultCause.SLOW_LINK):
            self._links = Links()
        for fault in self._planted(FaultCause.GC_PAUSE):
            if fault.extra_ns not in self._heaps:
                self._heaps[fault.extra_ns] = GarbageHeap(fault.extra_ns)

    def begin_step(self, step: int) -> None:
        """Say that ``step`` begins."""
        config = self._config
        self._step = step
        self._slowdown = slowdown_of(config.faults, config.layout, rank=self._rank, step=step)
        self._timer.slowdown = self._slowdown
        self._draw_documents(step)
        if self._links is not None:
            self._links.set_slowness(self._slow_peers())

    def read_input(self, *, in_span: bool) -> None:
        """Lose what the loader loses, inside its span or after it."""
        for fault in self._here(FaultCause.DATA_STALL):
            if fault.has_spans == in_span:
                time.sleep(fault.extra_ns / NS_PER_S)

    def before_forward(self, microbatch: int) -> None:
        """Do what is due before a forward."""
        self._end(microbatch)
        self._stall()
        self._pause(microbatch)
        self._take_up(microbatch)

    def before_backward(self, microbatch: int) -> None:
        """Do what is due before a backward."""
        self._stall()
        self._take_up(microbatch)

    def before_reduction(self) -> None:
        """Do what is due between the last backward and the launch of the gradients' reduction."""
        self._timer.slowdown = self._slowdown
        for fault in self._here(FaultCause.LAUNCH_SKEW):
            time.sleep(self._skew_ns(fault) / NS_PER_S)

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Save a checkpoint where one is due; the step ends later by what it takes."""
        for fault in self._here(FaultCause.CHECKPOINT):
            if self._step is None or (self._step + 1) % fault.every:
                continue
            save_checkpoint(
                self._checkpoint_path(),
                self._stage,
                optimizer,
                delay_ns=fault.extra_ns,
                is_seen=fault.has_spans,
            )

    # -- which ---------------------------------------------------------------

    def _planted(self, cause: FaultCause) -> Sequence[Fault]:
        return [fault for fault in self._config.faults if fault.cause is cause]

    def _here(self, *causes: FaultCause) -> Iterator[Fault]:
        """Yield the faults of these causes that hold on this rank in this step."""
        if self._step is None:
            return
        for fault in self._config.faults:
            if (
                fault.cause in causes
                and fault.is_active(self._step)
                and self._rank in fault.culprits(self._config.layout)
            ):
                yield fault

    # -- what they do --------------------------------------------------------

    def _end(self, microbatch: int) -> None:
        if microbatch != self._config.num_microbatches // 2:
            return
        for fault in self._here(*ENDING_CAUSES):
            if fault.step != self._step:
                continue
            if fault.cause is FaultCause.HANG:
                stand_still()
            die(fault.crash_kind, rank=self._rank, step=fault.step or 0)

    def _stall(self) -> None:
        for fault in self._here(FaultCause.HOST_STALL):
            time.sleep(fault.extra_ns / NS_PER_S)

    def _pause(self, microbatch: int) -> None:
        for fault in self._here(FaultCause.GC_PAUSE):
            place = f"{self._config.seed}/{self._rank}/{self._step}/{microbatch}"
            chance = random.Random(place)  # noqa: S311  # no secret
            if chance.random() < fault.probability:
                self._heaps[fault.extra_ns].collect(is_seen=fault.has_spans)

    def _skew_ns(self, fault: Fault) -> float:
        """Return a lag that wanders from member to member and grows over the fault's steps."""
        first, last = fault.steps or (0, self._config.num_steps - 1)
        step = self._step or 0
        grown = fault.extra_ns * (step - first + 1) / (last - first + 1)
        turn = step / SKEW_PERIOD_STEPS + self._coords.dp / self._config.layout.dp
        return grown * (1 + math.sin(2 * math.pi * turn)) / 2

    def _slow_peers(self) -> dict[int, float]:
        """Return by which factor the link to each peer is slow in this step."""
        slow: dict[int, float] = {}
        for fault in self._planted(FaultCause.SLOW_LINK):
            if self._step is None or not fault.is_active(self._step):
                continue
            for peer in range(self._config.layout.world_size):
                if peer != self._rank and is_slow(fault, self._rank, peer):
                    slow[peer] = slow.get(peer, 1.0) * fault.factor
        return slow

    def _draw_documents(self, step: int) -> None:
        planted = self._planted(FaultCause.SEQUENCE_IMBALANCE)
        if not planted:
            return
        spread = math.hypot(*(fault.spread for fault in planted if fault.is_active(step)))
        self.documents = tuple(
            draw_documents(
                self._config, step=step, dp=self._coords.dp, microbatch=number, spread=spread
            )
            for number in range(self._config.num_microbatches)
        )

    def _take_up(self, microbatch: int) -> None:
        """Make model and pace those of a micro-batch's documents."""
        if self.documents is None:
            return
        documents = self.documents[microbatch]
        pack(self._stage, documents)
        if self._config.pace_ms is not None:
            self._timer.slowdown = self._slowdown * compute_factor(self._config, documents)

    def _checkpoint_path(self) -> Path:
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="rankscope-checkpoint-")
        return Path(self._folder.name) / f"rank-{self._rank}.pt"


def set_environment(faults: Iterable[Fault], *, rank: int) -> None:
    """Set the environment variables that are wrong on this rank; before the job is joined."""
    for fault in faults:
        if fault.cause is FaultCause.MISCONFIGURATION and rank in fault.ranks:
            os.environ[fault.variable] = fault.value


def is_slow(fault: Fault, rank: int, peer: int) -> bool:
    """Tell whether a slow link is that between these two ranks."""
    if fault.ranks:
        return rank in fault.ranks or peer in fault.ranks
    return {rank, peer} == {fault.src, fault.dst}
