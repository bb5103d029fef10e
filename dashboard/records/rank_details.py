"""Records of one rank, and of a quantity of all ranks, for the pages that show them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from rankscope.analysis.report.device_time import Kernel
    from rankscope.tracer.span import SpanKind


@dataclass(frozen=True, slots=True, kw_only=True)
class KindSeries:
    """Time of one kind of span on a rank and on its peers, over the steps of `RankDetails`."""

    kind: SpanKind
    own_s: NDArray[np.float64]
    """Seconds; of communication those that no compute hides; NaN if unknown."""

    peers_s: NDArray[np.float64]
    """Median of the peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSeries:
    """Readings of one quantity of the rank's device or host, placed on the axis of steps."""

    name: str
    """As in docs/samples.md, with its unit at the end."""

    is_rate: bool
    """Whether the values are the growth of a counter per second."""

    is_device: bool
    """False: of the host."""

    at_step: NDArray[np.float64]
    """Place on the axis of steps: 3.5 is the middle of step 3."""

    value: NDArray[np.float64]
    """Mean of the readings around that time."""

    peers: NDArray[np.float64]
    """Median of the devices of its peers, or of their hosts, at that time; NaN if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvent:
    """Something that the rank's process recorded besides spans."""

    at_ns: int
    kind: str
    text: str
    detail: str
    """Traceback, stacks or data, over several lines; "" if there is none."""

    num_alike: int = 1
    """Events of its kind in the epoch, which are not all read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenOperation:
    """An operation that had begun and not ended when the rank was last seen."""

    name: str
    kind: str
    step: int
    start_ns: int
    group: str
    """Name of its group; "" if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """A communication group of the rank."""

    name: str
    kind: str
    members: tuple[int, ...]
    """Global ranks, the first ones."""

    num_members: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFinding:
    """A finding of any run that names a rank on the host."""

    run_id: str
    number: int
    """Number of the finding in its run."""

    cause: str
    ranks: tuple[int, ...]
    steps: tuple[int, int] | None
    opened_ns: int
    is_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRequest:
    """Something that a user has requested of the rank, and its newest answer."""

    at_ns: int
    level: str
    """``full``, ``profile`` or ``stacks``."""

    num_steps: int
    by: str
    state: str
    """``accepted``, ``done`` or ``refused``; "" without an answer."""

    text: str
    """Text of the answer; "" without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDetails:
    """All that is stored of one rank in the newest epoch of a run."""

    rank: int
    host: str
    local_rank: int
    switch: str
    rack: str
    rail: str
    device_name: str
    exit_state: str
    """``running``, ``ended``, ``failed``, ``lost``, or "" if unknown."""

    heartbeat: tuple[str, int, int] | None
    """State, step (-1: none) and age in ns of the last heartbeat; None if there is none: they come
    with the samples of a host, and are kept for an hour."""

    reported: tuple[int, int] | None
    """Unix time and age in ns of its last record or heartbeat; None if there is none."""

    steps: tuple[int, ...]
    """The newest closed steps."""

    num_peers: int
    """Ranks of the same pipeline stage that it is compared with."""

    kinds: tuple[KindSeries, ...]
    samples: tuple[SampleSeries, ...]
    processes: tuple[tuple[str, float], ...]
    """Command and mean CPUs of the busiest processes of the host."""

    events: tuple[RankEvent, ...]
    """The newest of each kind, the newest first."""

    requests: tuple[RankRequest, ...]
    """The newest first."""

    open_operations: tuple[OpenOperation, ...]
    groups: tuple[RankGroup, ...]
    host_findings: tuple[HostFinding, ...]
    """The newest first."""

    kernels: tuple[Kernel, ...] = ()
    """Of its mean step, the busiest first; empty if no profile was imported."""


class RankQuantity(StrEnum):
    """A quantity of each rank, in seconds of a step."""

    EVIDENCE = "evidence"
    """What the top finding is seen in, above its baseline: `RunReport.evidence`. Of links, that of
    the rank's slowest one."""

    COMPUTE = "compute"
    """Compute above the step's median rank, without waiting: `RunReport.excess`."""

    WAIT = "wait"
    """Inside communications, for the last member."""

    EXPOSED = "exposed"
    """Communication that no compute hides."""

    HOST = "host"
    """Data loading, garbage collection and checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankValues:
    """A quantity of all ranks, mean over a range of steps."""

    quantity: RankQuantity
    steps: tuple[int, int]
    """First and last step."""

    seconds: Mapping[int, float]
    """By rank."""

    hosts: Mapping[int, tuple[str, str]]
    """Host and switch of each rank; "" if unknown."""
