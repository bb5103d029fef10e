"""Tensors of megatron.core on the CPU, for a machine without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _OnTheCpu(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def pretend_that_the_cpu_is_a_gpu() -> None:
    """Make what is asked of the current CUDA device on the CPU, until the process ends."""
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.random.get_rng_state = lambda **_: torch.get_rng_state()
    _OnTheCpu().__enter__()
