"""Work that a rank does beside its training: recompilations, and evaluations."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from rankscope import tracer
from rankscope.tracer.span import SpanKind

from ..model import Stage, initialize

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """A whole model that only this rank has, and evaluates.

    Args:
        config: Sizes.
        device: Where it runs.
    """

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
