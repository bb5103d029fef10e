"""Save a rank's part of the training, as a job does every so many steps."""

from __future__ import annotations

import os
import time
from typing import IO, TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

NS_PER_S = 1e9


class SlowFile:
    """A file on a file system that takes its time over the first write.

    Args:
        file: Where to.
        delay_ns: How long.
    """

    def __init__(self, file: IO[bytes], delay_ns: int) -> None:
        self._file = file
        self._delay_ns = delay_ns

    def write(self, data: Any) -> int:  # noqa: ANN401 - bytes, or anything that shows them
        """Write, later."""
        time.sleep(self._delay_ns / NS_PER_S)
        self._delay_ns = 0
        return self._file.write(data)

    def flush(self) -> None:
        """Hand on what is buffered."""
        self._file.flush()


def save_checkpoint(
    path: Path,
    stage: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    delay_ns: int,
    is_seen: bool,
) -> None:
    """Write this rank's shards of weights and optimizer to ``path``, durably.

    Args:
        path: The file.
        stage: The weights.
        optimizer: Their optimizer.
        delay_ns: What the file system takes besides.
        is_seen: Whether by `torch.save`, of which the tracer makes a span; else as bare bytes, and
            the pause is a gap in the trace.
    """
    shards = [_local(value) for value in stage.state_dict().values()]
    for state in optimizer.state.values():
        shards += [_local(value) for value in state.values()]
    with path.open("wb") as file:
        slow: Any = SlowFile(file, delay_ns)
        if is_seen:
            torch.save(shards, slow)
        else:
            for shard in shards:
                slow.write(shard.cpu().numpy().tobytes())
        file.flush()
        os.fsync(file.fileno())


def _local(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return value.to_local() if isinstance(value, DTensor) else value
