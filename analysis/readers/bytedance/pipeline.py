"""Pipeline transfers of a ByteDance trace: the compute of each, and the pairs of send and recv.

Source: arXiv 2505.05713, sections 3 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...arrays.grouping import cumcount
from ...arrays.sorting import stable_argsort
from .format import CODE, NO_OP_SLACK_NS, OpType

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .blocks import Rows


class Edges:
    """Dependencies between operations, collected one array after the other."""

    def __init__(self) -> None:
        self._src: list[NDArray[np.int64]] = []
        self._dst: list[NDArray[np.int64]] = []

    def add(self, src: NDArray[np.int64], dst: NDArray[np.int64]) -> None:
        """Make each operation of ``dst`` wait for the one of ``src`` at the same index."""
        self._src.append(src)
        self._dst.append(dst)

    def chain(self, rows: NDArray[np.int64], key: NDArray[np.int32]) -> None:
        """Make each row wait for the one before it of the same key; rows are sorted by key."""
        same = key[1:] == key[:-1]
        self.add(rows[:-1][same], rows[1:][same])

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return (src, dst) of all edges."""
        return np.concatenate(self._src), np.concatenate(self._dst)


@dataclass(frozen=True, slots=True)
class Direction:
    """The operation types of one direction through the pipeline."""

    compute: str
    send: str
    recv: str
    towards: int
    """Stage difference from sender to receiver."""


DIRECTIONS = (
    Direction(OpType.FORWARD_COMPUTE, OpType.FORWARD_SEND, OpType.FORWARD_RECV, 1),
    Direction(OpType.BACKWARD_COMPUTE, OpType.BACKWARD_SEND, OpType.BACKWARD_RECV, -1),
)


def link_pipeline(
    rows: Rows,
    edges: Edges,
    group: NDArray[np.int64],
    direction: Direction,
    num_stages: int,
    num_chunks: int,
) -> NDArray[np.int64]:
    """Link one direction's receives, computes and sends, and pair sends with receives.

    The i-th compute waits for the i-th receive, and that receive waits for the compute before. A
    *no-op* was recorded but transferred nothing: it belongs to no compute and no pair.

    Args:
        edges: The dependencies are added to it.
        group: Shape (ops,): the numbers of the pairs are written to it.

    Returns:
        Sends and receives that are unpaired although the worker at the other end has operations
        in the step.
    """
    compute = CODE[direction.compute]
    recvs, sends = rows.of(direction.recv), rows.of(direction.send)
    num_computes = rows.count[:, compute]
    first = rows.first[:, compute]
    busy = num_computes > 0
    last_start = np.full(len(first), np.iinfo(np.int64).min)
    first_end = np.full(len(first), np.iinfo(np.int64).max)
    last_start[busy] = rows.start[first[busy] + num_computes[busy] - 1]
    first_end[busy] = rows.end[first[busy]]

    # A no-op starts after its direction's last compute started, or ends before the first one ended.
    recvs = recvs[rows.start[recvs] <= last_start[rows.worker[recvs]] + NO_OP_SLACK_NS]
    sends = sends[rows.end[sends] >= first_end[rows.worker[sends]] - NO_OP_SLACK_NS]
    ends = ((0, 0), (num_stages - 1, num_chunks - 1))
    source, sink = ends if direction.towards > 0 else ends[::-1]
    recvs, recv_compute = _match_computes(rows, recvs, compute, source, late=True)
    sends, send_compute = _match_computes(rows, sends, compute, sink, late=False)
    edges.add(recvs, recv_compute)
    later = rows.nth(recv_compute) > 0
    edges.add(recv_compute[later] - 1, recvs[later])
    edges.add(send_compute, sends)
    return _pair_transfers(rows, group, sends, recvs, direction, num_stages)


def _match_computes(
    rows: Rows,
    transfers: NDArray[np.int64],
    compute: int,
    edge: tuple[int, int],
    *,
    late: bool,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the p2p operations that belong to a compute inside the pipeline, and that compute.

    The i-th operation belongs to the i-th compute. If a worker recorded none for the computes at
    the pipeline's edge (stage, chunk), these computes are skipped. If it recorded one receive fewer
    than computes (``late``), the first compute has none.
    """
    worker = rows.worker[transfers]
    nth = cumcount(worker)
    num_workers = len(rows.first)
    num = np.bincount(worker, minlength=num_workers)
    num_computes = rows.count[:, compute]
    computes = np.flatnonzero(rows.type == compute)
    at_edge = (rows.stage[computes] == edge[0]) & (rows.chunk[computes] == edge[1])
    edge_computes = computes[at_edge]
    num_inner = num_computes - np.bincount(rows.worker[edge_computes], minlength=num_workers)
    only_inner = (num == num_inner) & (num < num_computes)
    shift = ((num == num_computes - 1) & late & ~only_inner).astype(np.int64)

    index = nth + shift[worker]
    matched = np.where(index < num_computes[worker], rows.first[worker, compute] + index, -1)
    inner = computes[~at_edge]
    first_inner = np.searchsorted(rows.worker[inner], np.arange(num_workers))
    skips = only_inner[worker]
    matched[skips] = inner[first_inner[worker[skips]] + nth[skips]]
    is_inner = matched >= 0
    is_inner &= (rows.stage[matched] != edge[0]) | (rows.chunk[matched] != edge[1])
    return transfers[is_inner], matched[is_inner]


def _pair_transfers(
    rows: Rows,
    group: NDArray[np.int64],
    sends: NDArray[np.int64],
    recvs: NDArray[np.int64],
    direction: Direction,
    num_stages: int,
) -> NDArray[np.int64]:
    """Pair the n-th send of a stage with the n-th receive of the next; return the unpaired."""
    target = (rows.stage[sends] + direction.towards) % num_stages
    send_key = rows.worker_dp[rows.worker[sends]] * num_stages + target
    recv_key = rows.worker_dp[rows.worker[recvs]] * num_stages + rows.stage[recvs]
    order = stable_argsort(send_key)
    sends, send_key = sends[order], send_key[order]
    longest = max(int(np.bincount(rows.worker[sends]).max(initial=0)), 1) + 1
    longest = max(longest, int(np.bincount(rows.worker[recvs]).max(initial=0)) + 1)
    send_pair = send_key * longest + cumcount(send_key)
    recv_pair = recv_key * longest + cumcount(recv_key)
    _, paired_sends, paired_recvs = np.intersect1d(
        send_pair, recv_pair, assume_unique=True, return_indices=True
    )
    base = int(group.max(initial=-1)) + 1
    group[sends[paired_sends]] = base + np.arange(len(paired_sends))
    group[recvs[paired_recvs]] = base + np.arange(len(paired_recvs))
    active = (rows.worker_dp * num_stages + rows.worker_stage)[rows.count.any(axis=1)]
    source_key = recv_key + (rows.stage[recvs] - direction.towards) % num_stages - rows.stage[recvs]
    unpaired = np.append(np.delete(sends, paired_sends), np.delete(recvs, paired_recvs))
    other_end = np.append(np.delete(send_key, paired_sends), np.delete(source_key, paired_recvs))
    return unpaired[np.isin(other_end, active)]
