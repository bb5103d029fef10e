"""Save a rank's part of the training, as a job does every so many steps."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn


def save_checkpoint(path: Path, stage: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write this rank's shards of weights and optimizer to ``path``, durably."""
    shards = {
        "weights": {name: _local(value) for name, value in stage.state_dict().items()},
        "optimizer": [
            {name: _local(value) for name, value in state.items()}
            for state in optimizer.state.values()
        ],
    }
    with path.open("wb") as file:
        torch.save(shards, file)
        file.flush()
        os.fsync(file.fileno())


def _local(value: Any) -> Any:  # noqa: ANN401 - a tensor, or an optimizer's number
    return value.to_local() if isinstance(value, DTensor) else value
