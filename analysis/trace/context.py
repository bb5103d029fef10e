"""The context of a run: machine samples, events, manifests, exits, lengths of micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchTable:
    """Lengths that the data loader declared, one row per (epoch, step, rank, micro-batch).

    Every column has shape (rows,); -1 means unknown.
    """

    epoch: NDArray[np.int32]
    step: NDArray[np.int32]
    rank: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    num_tokens: NDArray[np.int64]
    sum_squared_lengths: NDArray[np.int64]
    """Sum over its sequences of the squared number of tokens: the cost of attention."""

    sum_windowed_lengths: NDArray[np.int64]
    """Sum over its sequences of the number of tokens times that or the attention's window,
    whichever is less."""

    num_elements: NDArray[np.int64]
    """Elements of the tensors that the model got; -1 unless its tokens are unknown."""

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTable:
    """Readings of hosts and devices, ordered by (name, host, device, at_ns), codes ascending.

    Every column has shape (rows,).
    """

    host: NDArray[np.int32]
    """Codes of ``hosts``."""

    device: NDArray[np.int32]
    """Local rank of the device; -1 for the host as a whole."""

    at_ns: NDArray[np.int64]
    """Unix time."""

    name: NDArray[np.int32]
    """Codes of ``names``; a name ends in its unit: ``gpu-clock-hz``, ``gpu-power-w``,
    ``rdma-ecn-marked-packets`` (a counter that only grows)."""

    value: NDArray[np.float64]
    hosts: tuple[str, ...]
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.at_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """One event that is no span: a checkpoint, a restart, a dump of stacks, ..."""

    epoch: int
    rank: int
    at_ns: int
    """Unix time."""

    kind: str
    text: str
    data: Mapping[str, Any] = field(default_factory=dict)
    place: str = ""
    """Line of the job's own code at which its main thread was, "train.py:70 main"; "" if unknown.
    """

    @property
    def open_spans(self) -> list[dict[str, Any]]:
        """Spans that were open then, the outermost first; what is no span is left out."""
        entries = self.data.get("open")
        if not isinstance(entries, list):
            return []
        return [entry for entry in entries if isinstance(entry, dict)]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRecord:
    """Launches of one kernel in one phase of a step: those of a rank, or of all."""

    step: int
    phase: str
    stream: str
    """compute, communication or copy."""

    name: str
    num: int
    num_names: int
    """Names that are summed: more than one of ``other``."""

    total_ns: int
    max_ns: int
    flops: int | None
    """None if that of any launch is unknown, as are the bytes."""

    num_bytes: int | None
    dtype: str
    """Type of the numbers; "" if it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankManifest:
    """Configuration of one rank, as it declared it at its start."""

    epoch: int
    rank: int
    settings: Mapping[str, str]
    """Flat: ``environment.NCCL_DEBUG`` -> value, ``versions.torch``, ``git.commit``, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """End of one rank's process; a `RunContext` has the earliest first."""

    epoch: int
    rank: int
    state: str
    """"ended", "failed", "lost", or "running"."""

    at_ns: int | None
    """Unix time; None if unknown."""

    at_error_ns: int = 0
    """It may be as much later: a process that was lost was last known to run at that time."""

    exception: str = ""
    """Type of the exception that ended it, "" if there was none."""

    message: str = ""
    origin: str = ""
    """The exception in whose handler that one was raised, "ValueError: ..."; "" if there is none.
    """

    step: int | None = None
    """Step in which it ended; None if unknown."""

    recorded_ns: int | None = None
    """Unix time of its last record, if its process was lost; None if unknown."""

    exit_code: int | None = None
    """Of a process that was lost: negative is the signal that ended it; None if unknown."""


def empty_microbatches() -> MicrobatchTable:
    """Return a table without rows."""
    none32, none64 = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64)
    return MicrobatchTable(
        epoch=none32,
        step=none32,
        rank=none32,
        microbatch=none32,
        num_tokens=none64,
        sum_squared_lengths=none64,
        sum_windowed_lengths=none64,
        num_elements=none64,
    )


def empty_samples() -> SampleTable:
    """Return a table without rows."""
    none32 = np.zeros(0, dtype=np.int32)
    return SampleTable(
        host=none32,
        device=none32,
        at_ns=none32.astype(np.int64),
        name=none32,
        value=none32.astype(np.float64),
        hosts=(),
        names=(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Everything known of the analysed steps besides their spans; each part may be empty."""

    microbatches: MicrobatchTable = field(default_factory=empty_microbatches)
    samples: SampleTable = field(default_factory=empty_samples)
    """From the first to the last analysed step."""

    events: tuple[EventRecord, ...] = ()
    """Of the whole run, in order of time."""

    kernels: tuple[KernelRecord, ...] = ()
    """Of an imported profile, by step, over all ranks."""

    manifests: tuple[RankManifest, ...] = ()
    exits: tuple[RankExit, ...] = ()
    previous_manifests: tuple[RankManifest, ...] = ()
    """Manifests of the previous run of the same model and world size, if there is one."""

    previous_mfu: float | None = None
    """Mean MFU of that run, if it is known, on the same devices and by the same convention."""
