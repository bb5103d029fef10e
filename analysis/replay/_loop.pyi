"""What `loop.c` exports; the tests have `attribute` and `fill` in Python, with their arguments."""

import numpy as np
from numpy.typing import NDArray

from .loop import Graph, Intervals

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
UInt8s = NDArray[np.uint8]
Float64s = NDArray[np.float64]

# Sort rows topologically and fill in the arrays of a graph, whose ``first`` and ``pred`` are zeros
# until all rows are sorted; return how many are. A row and all that it makes ready come before the
# next row that waits for nothing, so the rows of a step stay together (Kahn, 1962).
def sort(graph: Graph, num_groups: int, src: Int32s, dst: Int32s, group: Int32s, /) -> int: ...

# Fill in the end of each row, for the positions from ``low`` to ``high`` (of whole steps). A row
# arrives its gap after the last end of its predecessors, or after 0; it ends its duration after the
# last arrival of its item. Durations and gaps are by row, arrivals and ends by position.
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

# Fill in the time of one step in each of ``width`` scenarios, shape (width, replicas): bit ``w`` of
# a row's ``parts`` is set if it has its recorded time in scenario ``w``, else it has the ideal one.
# With ``replica`` each is replayed once per replica, whose rows alone have recorded times: then the
# replicas must have equal structure, so that one ideal one represents all others.
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

# Fill in the time of one step in each of ``width`` variants, that have other times of some rows:
# of each row from ``low`` on, ``first`` is the index of its first change. ``ends`` are those
# without any change, by position: only items that end at another time are replayed.
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

# Make ``equal`` false for steps whose replicas differ in operations or dependencies, or have an
# edge into another one, or a group over some of them only. Rows are in order of (step, replica).
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

# Fill in the member of each row's group that began last, of several the lowest rank's; the row
# itself without a group.
def last_members(
    num: int, num_groups: int, group: Int32s, start: Int64s, rank: Int32s, last: Int32s, /
) -> None: ...
def attribute(
    num: int,
    before: Int32s,
    last: Int32s,
    rank: Int32s,
    owner: Int32s,
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
    idle: Intervals,
    following: Intervals,
    spent: Int64s,
    of_compute: Int32s,
    num_waits: int,
    waited: Int64s,
    of_wait: Int32s,
    /,
) -> None: ...
