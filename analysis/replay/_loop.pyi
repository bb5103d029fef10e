"""What `loop.c` exports; `tests/support/analysis/replay_oracle.py` says what each computes."""

import numpy as np
from numpy.typing import NDArray

from .loop import Graph, Intervals

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
UInt8s = NDArray[np.uint8]
Float64s = NDArray[np.float64]

def sort(graph: Graph, num_groups: int, src: Int32s, dst: Int32s, group: Int32s, /) -> int: ...
def replay(
    graph: Graph,
    low: int,
    high: int,
    duration: Float64s,
    gap: Float64s | None,
    arrivals: Float64s | None,
    ends: Float64s,
    /,
) -> None: ...
def replay_parts(
    graph: Graph,
    low: int,
    high: int,
    recorded: Float64s,
    ideal: Float64s,
    parts: NDArray[np.uint32],
    closes: NDArray[np.bool_],
    replica: Int32s | None,
    num_replicas: int,
    width: int,
    latest: Float64s,
    /,
) -> None: ...
def replay_variants(
    graph: Graph,
    low: int,
    high: int,
    duration: Float64s,
    gap: Float64s | None,
    ends: Float64s,
    closes: NDArray[np.bool_],
    first: Int32s,
    num_changes: int,
    variant: Int32s,
    new_duration: Float64s,
    new_gap: Float64s | None,
    width: int,
    latest: Float64s,
    /,
) -> None: ...
def compare_replicas(
    graph: Graph,
    num_steps: int,
    num_replicas: int,
    first: Int32s,
    label: Int32s,
    group: Int32s,
    _num_groups: int,
    closes: NDArray[np.bool_],
    equal: NDArray[np.bool_],
    /,
) -> None: ...
def last_members(
    num: int, num_groups: int, group: Int32s, start: Int64s, rank: Int32s, last: Int32s, /
) -> None: ...
def attribute(
    num: int,
    before: Int32s,
    last: Int32s,
    rank: Int32s,
    start: Int64s,
    end: Int64s,
    duration: Float64s,
    ideal: Float64s,
    gap: Float64s,
    ideal_gap: Float64s,
    num_waits: int,
    wait: int,
    operation: Int32s,
    begin: Int64s,
    until: Int64s,
    min_ratio: float,
    min_ns: float,
    max_hops: int,
    room: int,
    wait_of: Int32s,
    on: Int32s,
    share_ns: Int64s,
    /,
) -> tuple[int, int]: ...
def fill(
    num_steps: int,
    rank: Int32s,
    step: Int32s,
    start: Int64s,
    end: Int64s,
    num: int,
    kind: NDArray[np.int16],
    step_of: Int32s,
    num_kinds: int,
    is_compute: UInt8s,
    is_launched: UInt8s,
    own: Intervals,
    waits: Intervals,
    transfers: Intervals,
    following: Intervals,
    spent: Int64s,
    of_compute: Int32s,
    num_waits: int,
    waited: Int64s,
    of_wait: Int32s,
    /,
) -> None: ...
