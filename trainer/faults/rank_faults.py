"""Effects of faults on one rank of the trainer, at each point of a step.

Compute faults set the slowdown of the segment timer. The others act where they would in a real job:
a host stall between two launches, a slow data loader before the first forward, a garbage collection
before a forward, a late launch before the gradients are reduced, a checkpoint after the update.
"""

from __future__ import annotations

import gc
import math
import os
import random
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from rankscope.tracer.span import NS_PER_S

from ..config import coords_of
from ..data import compute_factor, draw_documents
from ..errors import CrashFaultError
from ..model import pack
from ..parallel import local_part
from .extra_work import CPU_PROGRAM, MEMORY_PROGRAM, Evaluator, Hogs, Recompiler
from .links import Links
from .spec import ENDING_CAUSES, SKEW_PERIOD_STEPS, CrashKind, FaultCause, slowdown_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ..config import TrainerConfig
    from ..pace import SegmentTimer
    from .spec import Fault

HOG_PROGRAMS = {FaultCause.CPU_HOG: CPU_PROGRAM, FaultCause.MEMORY_HOG: MEMORY_PROGRAM}


class RankFaults:
    """The faults of one rank. It does nothing before the first `begin_step`."""

    def __init__(
        self, config: TrainerConfig, *, rank: int, stage: nn.Module, timer: SegmentTimer
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
        self._hogs: dict[FaultCause, Hogs] = {}
        self._recompiler: Recompiler | None = None
        self._evaluator: Evaluator | None = None
        self._recompiled_step: int | None = None
        self._folder: TemporaryDirectory[str] | None = None
        self.documents: tuple[tuple[int, ...], ...] | None = None
        """Lengths of the documents in each sequence, by micro-batch of this step; None if each
        sequence is one document."""

    def prepare(self) -> None:
        """Prepare what the faults need. All ranks must call this, after the warm-up."""
        if self._faults_of(FaultCause.SLOW_LINK):
            self._links = Links()
        for fault in self._faults_of(FaultCause.GC_PAUSE):
            if fault.extra_ns not in self._heaps:
                self._heaps[fault.extra_ns] = GarbageHeap(fault.extra_ns)
        for cause, program in HOG_PROGRAMS.items():
            if self._acts(cause):
                self._hogs[cause] = Hogs(program)
        if self._acts(FaultCause.EVALUATION):
            device = next(self._stage.parameters()).device
            self._evaluator = Evaluator(self._config, device)
        if self._acts(FaultCause.RECOMPILE):
            self._recompiler = Recompiler()
            for chunk in self._stage.children():
                chunk.register_forward_pre_hook(self._recompile)

    def begin_step(self, step: int) -> None:
        """Begin a step."""
        config = self._config
        self._step = step
        self._slowdown = slowdown_of(config.faults, config.layout, rank=self._rank, step=step)
        self._timer.slowdown = self._slowdown
        self._draw_documents(step)
        for cause, hogs in self._hogs.items():
            hogs.run(sum(fault.num_hogs for fault in self._here(cause)))
        if self._links is not None:
            self._links.set_slowness(self._slow_peers())

    @property
    def records_input(self) -> bool:
        """Return whether the input of this job is recorded: no data stall has ``spans=no``."""
        return all(fault.has_spans for fault in self._faults_of(FaultCause.DATA_STALL))

    def read_input(self) -> None:
        """Sleep for the data stalls of this step."""
        for fault in self._here(FaultCause.DATA_STALL):
            time.sleep(fault.extra_ns / NS_PER_S)

    def before_forward(self, microbatch: int, *, stage: int = 0) -> None:
        """Apply the faults before a forward of one of the rank's stages."""
        self._end(microbatch)
        self._stall()
        for fault in self._here(FaultCause.GC_PAUSE):
            place = f"{self._config.seed}/{self._rank}/{self._step}/{microbatch}/{stage}"
            chance = random.Random(place)  # noqa: S311  # no secret
            if chance.random() < fault.probability:
                self._heaps[fault.extra_ns].collect(is_traced=fault.has_spans)
        self._take_up(microbatch)

    def before_backward(self, microbatch: int) -> None:
        """Apply the faults before a backward."""
        self._stall()
        self._take_up(microbatch)

    def before_reduction(self) -> None:
        """Apply the faults between the last backward and the reduction of the gradients."""
        self._timer.slowdown = self._slowdown
        for fault in self._here(FaultCause.LAUNCH_SKEW):
            time.sleep(self._skew_ns(fault) / NS_PER_S)

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Evaluate, and save a checkpoint, if it is due in this step."""
        for fault in self._here(FaultCause.EVALUATION):
            if self._evaluator is not None:
                self._evaluator.run(fault.extra_ns)
        for fault in self._here(FaultCause.CHECKPOINT):
            if self._step is None or (self._step + 1) % fault.every:
                continue
            save_checkpoint(
                self._checkpoint_path(),
                self._stage,
                optimizer,
                delay_ns=fault.extra_ns,
                has_span=fault.has_spans,
            )

    def _faults_of(self, cause: FaultCause) -> Sequence[Fault]:
        return [fault for fault in self._config.faults if fault.cause is cause]

    def _acts(self, cause: FaultCause) -> bool:
        """Return whether a fault of this cause acts on this rank in some step."""
        layout = self._config.layout
        return any(self._rank in fault.culprits(layout) for fault in self._faults_of(cause))

    def _recompile(self, *_: object) -> None:
        if self._recompiler is None or self._recompiled_step == self._step:
            return
        self._recompiled_step = self._step
        for fault in self._here(FaultCause.RECOMPILE):
            self._recompiler.run(fault.extra_ns)

    def _here(self, *causes: FaultCause) -> Iterator[Fault]:
        """Yield the faults of these causes that are active on this rank in this step."""
        if self._step is None:
            return
        for fault in self._config.faults:
            if (
                fault.cause in causes
                and fault.is_active(self._step)
                and self._rank in fault.culprits(self._config.layout)
            ):
                yield fault

    def _end(self, microbatch: int) -> None:
        if microbatch != self._config.num_microbatches // 2:
            return
        for fault in self._here(*ENDING_CAUSES):
            if fault.step != self._step:
                continue
            if fault.cause is FaultCause.HANG:
                hang()
            if fault.cause is FaultCause.MISMATCH:
                dist.barrier()  # which no other rank calls
            if fault.cause is FaultCause.CRASH:
                die(fault.crash_kind, rank=self._rank, step=fault.step or 0)

    def _stall(self) -> None:
        for fault in self._here(FaultCause.HOST_STALL):
            time.sleep(fault.extra_ns / NS_PER_S)

    def _skew_ns(self, fault: Fault) -> float:
        """Return a delay that moves from member to member and grows over the steps of the fault."""
        first, last = fault.steps or (0, self._config.num_steps - 1)
        step = self._step or 0
        grown = fault.extra_ns * (step - first + 1) / (last - first + 1)
        turn = step / SKEW_PERIOD_STEPS + self._coords.dp / self._config.layout.dp
        return grown * (1 + math.sin(2 * math.pi * turn)) / 2

    def _slow_peers(self) -> dict[int, float]:
        """Return the factor of each slow link in this step, by peer."""
        slow: dict[int, float] = {}
        for fault in self._faults_of(FaultCause.SLOW_LINK):
            if self._step is None or not self._is_slow_now(fault, self._step):
                continue
            for peer in range(self._config.layout.world_size):
                if peer != self._rank and is_slow(fault, self._rank, peer):
                    slow[peer] = slow.get(peer, 1.0) * fault.factor
        return slow

    def _is_slow_now(self, fault: Fault, step: int) -> bool:
        """Return whether a link is slow in a step: at random, alike at both ends."""
        if not fault.is_active(step):
            return False
        chance = random.Random(f"{self._config.seed}/{fault}/{step}")  # noqa: S311  # no secret
        is_first = step == fault.first_step
        return not fault.probability or is_first or chance.random() < fault.probability

    def _draw_documents(self, step: int) -> None:
        found = self._faults_of(FaultCause.SEQUENCE_IMBALANCE)
        if not found:
            return
        spread = math.hypot(*(fault.spread for fault in found if fault.is_active(step)))
        self.documents = tuple(
            draw_documents(
                self._config, step=step, dp=self._coords.dp, microbatch=number, spread=spread
            )
            for number in range(self._config.num_microbatches)
        )

    def _take_up(self, microbatch: int) -> None:
        """Set model and pace to the documents of a micro-batch."""
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
    """Set the environment variables of a misconfiguration; call before the job is joined."""
    for fault in faults:
        if fault.cause is FaultCause.MISCONFIGURATION and rank in fault.ranks:
            os.environ[fault.variable] = fault.value


def is_slow(fault: Fault, rank: int, peer: int) -> bool:
    """Return whether a slow-link fault acts on the link between two ranks."""
    if fault.ranks:
        return rank in fault.ranks or peer in fault.ranks
    return {rank, peer} == {fault.src, fault.dst}


EXIT_STATUS = 1


def die(kind: CrashKind, *, rank: int, step: int) -> NoReturn:
    """End this process by the given kind of crash.

    Raises:
        CrashFaultError: The kind is an exception.
        MemoryError: The kind is host-oom: more memory is requested than exists.
    """
    if kind is CrashKind.EXIT:
        os._exit(EXIT_STATUS)
    if kind is CrashKind.KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind is CrashKind.HOST_OOM:
        bytearray(sys.maxsize)
    raise CrashFaultError(rank=rank, step=step)


def hang() -> NoReturn:
    """Never return; a signal still ends the process."""
    while True:
        signal.pause()


FIRST_OBJECTS = 100_000


MAX_OBJECTS = 3_000_000
"""About 220 MB. If collecting them takes less than the pause, several collections follow."""


class GarbageHeap:
    """Live objects that make every full garbage collection take a set time."""

    def __init__(self, pause_ns: int) -> None:
        self._pause_ns = pause_ns
        self._objects: list[list[object]] = []
        self._grow(FIRST_OBJECTS)
        gc.collect()
        begin_ns = time.thread_time_ns()  # CPU time: other ranks share the core
        gc.collect()
        took_ns = time.thread_time_ns() - begin_ns
        wanted = round(FIRST_OBJECTS * pause_ns / max(took_ns, 1))
        self._grow(min(max(wanted, FIRST_OBJECTS), MAX_OBJECTS) - FIRST_OBJECTS)
        gc.collect()

    def collect(self, *, is_traced: bool) -> None:
        """Collect garbage for at least nine tenths of the pause.

        Args:
            is_traced: Whether the callbacks of `gc` run, and so the tracer's; else the pause is a
                gap in the trace.
        """
        hidden = [] if is_traced else gc.callbacks[:]
        if hidden:
            gc.callbacks.clear()
        try:
            until_ns = time.monotonic_ns() + self._pause_ns * 9 // 10
            gc.collect()
            while time.monotonic_ns() < until_ns:
                gc.collect()
        finally:
            gc.callbacks.extend(hidden)

    def _grow(self, num_objects: int) -> None:
        # Creating objects would start many collections, of a heap that is not complete.
        was_enabled = gc.isenabled()
        gc.disable()
        self._objects.extend([] for _ in range(num_objects))
        if was_enabled:
            gc.enable()


class SlowFile:
    """A file whose first write is delayed."""

    def __init__(self, file: IO[bytes], delay_ns: int) -> None:
        self._file = file
        self._delay_ns = delay_ns

    def write(self, data: Any) -> int:  # noqa: ANN401 - bytes, or anything that shows them
        """Write the data, the first time after the delay."""
        time.sleep(self._delay_ns / NS_PER_S)
        self._delay_ns = 0
        return self._file.write(data)

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()


def save_checkpoint(
    path: Path,
    stage: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    delay_ns: int,
    has_span: bool,
) -> None:
    """Write this rank's shards of weights and optimizer to ``path``, durably.

    With a span it writes by `torch.save`, which the tracer records; else plain bytes, and the
    pause is a gap in the trace.
    """
    shards = [local_part(value.detach()) for value in stage.state_dict().values()]
    for state in optimizer.state.values():
        shards += [local_part(value.detach()) for value in state.values()]
    with path.open("wb") as file:
        slow: Any = SlowFile(file, delay_ns)
        if has_span:
            torch.save(shards, slow)
        else:
            for shard in shards:
                slow.write(shard.cpu().numpy().tobytes())
        file.flush()
        os.fsync(file.fileno())
