"""A fake device that claims the tensors of a real job on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tests.support.tracer.torch.fake_cuda import FakeCuda

if TYPE_CHECKING:
    from collections.abc import Iterable


class ClaimingCuda(FakeCuda):
    """Accepts every tensor as its own, every operation as a kernel, and gloo as NCCL."""

    comm_backend = "gloo"

    def device_of(self, objects: Iterable[object]) -> int | None:
        return 0 if any(isinstance(one, torch.Tensor) for one in objects) else None
