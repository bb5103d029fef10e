"""Work beside the training of a rank: recompilations, evaluations, other processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import torch

from rankscope import tracer
from rankscope.tracer.span import SpanKind

from ..model import Stage, initialize

if TYPE_CHECKING:
    from collections.abc import Callable, Set

    from ..config import TrainerConfig

CHAIN_LENGTH = 100
"""Operations of the compiled function: a compilation takes some tens of ms."""


class Recompiler:
    """A compiled function that is called with new shapes."""

    def __init__(self) -> None:
        import torch._dynamo.config as dynamo  # seconds of imports

        dynamo.recompile_limit = dynamo.accumulated_recompile_limit = 1 << 30
        # The compiler's own backends would need a C++ compiler.
        self._function: Callable[[torch.Tensor], torch.Tensor] = torch.compile(
            _chain, backend="eager", dynamic=False
        )
        self._size = 0
        self._call()

    def run(self, duration_ns: int) -> None:
        """Recompile again and again for ``duration_ns``."""
        until_ns = time.monotonic_ns() + duration_ns
        while time.monotonic_ns() < until_ns:
            self._call()

    def _call(self) -> None:
        self._size += 1
        self._function(torch.ones(self._size))


class Evaluator:
    """A whole model that only this rank has, and evaluates."""

    def __init__(self, config: TrainerConfig, device: torch.device) -> None:
        self._model = Stage(config.model, stage=0, num_stages=1)
        initialize(self._model, seed=config.seed)
        self._model.to(device)
        self._tokens = torch.zeros(
            config.microbatch_size, config.model.seq_length, dtype=torch.int64, device=device
        )

    def run(self, duration_ns: int) -> None:
        """Run forwards without gradients for ``duration_ns``."""
        until_ns = time.monotonic_ns() + duration_ns
        with torch.no_grad(), tracer.span("evaluation", kind=SpanKind.FORWARD):
            while time.monotonic_ns() < until_ns:
                self._model(self._tokens)


def _chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(CHAIN_LENGTH):
        x = torch.sin(x) + 1
    return x


CPU_PROGRAM = """
import os
while os.getppid() == {parent}:
    for _ in range(1_000_000):
        pass
"""

MEMORY_PROGRAM = """
import os
source, target = bytearray({size}), bytearray({size})
while os.getppid() == {parent}:
    target[:] = source
"""

COPIED_BYTES = 64 << 20
"""More than the caches of a core, so that each copy goes through the memory."""


class Hogs:
    """Processes that share a core with this rank, on Linux; they end when it does."""

    def __init__(self, program: str) -> None:
        self._program = program.format(parent=os.getpid(), size=COPIED_BYTES)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._cores: Set[int] = os.sched_getaffinity(0)

    def run(self, num: int) -> None:
        """Let ``num`` processes run beside this rank, on one core; 0 ends them."""
        if num == len(self._processes):
            return
        for process in self._processes:
            process.kill()
            process.wait()
        cores = {max(self._cores)} if num else self._cores
        os.sched_setaffinity(0, cores)
        # They inherit the core of the thread that starts them.
        command = [sys.executable, "-S", "-c", self._program]
        self._processes = [
            subprocess.Popen(command)  # noqa: S603  # our own interpreter and program
            for _ in range(num)
        ]
