"""Turn a run in the ByteDance format into operations: its groups and dependencies are inferred.

Source: "Understanding Stragglers in Large Model Training Using What-if
Analysis", arXiv 2505.05713, and the layout of the traces published with it.
TP is collapsed there: one traced rank stands for each (dp, stage), a *worker*.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from analysis.model import ReplayModel
from analysis.operations import NO_GROUP, Operations, latest_by_group, positions_in_runs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from analysis.source import RunInfo, SpanTable

FORWARD_COMPUTE = "forward-compute"
BACKWARD_COMPUTE = "backward-compute"
FORWARD_SEND = "forward-send"
FORWARD_RECV = "forward-recv"
BACKWARD_SEND = "backward-send"
BACKWARD_RECV = "backward-recv"
PARAMS_ALL_GATHER = "params-all-gather"
GRADS_REDUCE_SCATTER = "grads-reduce-scatter"
SEPARATE_GRADS = "separate-grads-all-reduce"
LAYERNORM_GRADS = "layernorm-grads-all-reduce"
EMBEDDING_GRADS = "embedding-grads-all-reduce"
GRAD_CLIP = "optimizer-clip-main-grad"
GC = "gc"
OPTIMIZER = "optimizer"

TYPES = (
    FORWARD_COMPUTE,
    BACKWARD_COMPUTE,
    FORWARD_SEND,
    FORWARD_RECV,
    BACKWARD_SEND,
    BACKWARD_RECV,
    PARAMS_ALL_GATHER,
    GRADS_REDUCE_SCATTER,
    SEPARATE_GRADS,
    LAYERNORM_GRADS,
    EMBEDDING_GRADS,
    GRAD_CLIP,
    GC,
    OPTIMIZER,
)
CODE = {name: code for code, name in enumerate(TYPES)}

COMMUNICATION = frozenset(TYPES) - {FORWARD_COMPUTE, BACKWARD_COMPUTE, GC, OPTIMIZER}
PEER_TO_PEER = frozenset({FORWARD_SEND, FORWARD_RECV, BACKWARD_SEND, BACKWARD_RECV})
DP_ONLY = frozenset({PARAMS_ALL_GATHER, GRADS_REDUCE_SCATTER, SEPARATE_GRADS})

FOLDED = {
    FORWARD_SEND: "forward-pp-comm",
    FORWARD_RECV: "forward-pp-comm",
    BACKWARD_SEND: "backward-pp-comm",
    BACKWARD_RECV: "backward-pp-comm",
}
"""The published results count send and recv of one direction as one type."""

CLOCK_ERROR_TRANSFER_NS = -10_000_000
"""A transfer this negative or more is clock error by the format's rule: 0, and reported."""

NO_OP_SLACK_NS = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The operations of a ByteDance trace, with what the replay's groups of them need."""

    operations: Operations
    row: NDArray[np.int64]
    """Shape (ops,): the operation's row in the span table."""

    type: NDArray[np.int8]
    """Shape (ops,): code into `TYPES`."""

    rank: NDArray[np.int32]
    dp: NDArray[np.int32]
    stage: NDArray[np.int32]
    num_clock_errors: int
    """Transfers that were negative by 10 ms or more, and count as 0."""

    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Columns sorted by (step, dp, stage, type, seq), and the blocks of equal (worker, type)."""

    row: NDArray[np.int64]
    step: NDArray[np.int32]
    dp: NDArray[np.int32]
    stage: NDArray[np.int32]
    type: NDArray[np.int8]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    chunk: NDArray[np.int32]
    worker: NDArray[np.int64]
    """Index of the (step, dp, stage)."""

    worker_dp: NDArray[np.int64]
    """Shape (workers,): index of the (step, dp)."""

    worker_stage: NDArray[np.int32]
    nth: NDArray[np.int64]
    """Position in the block."""

    first: NDArray[np.int64]
    """Shape (workers, types): where the block begins."""

    count: NDArray[np.int64]
    """Shape (workers, types): how many operations it has."""

    def of(self, name: str) -> NDArray[np.int64]:
        """Return the rows of one type, in order."""
        return np.flatnonzero(self.type == CODE[name])


class _Edges:
    """Dependencies as they are found."""

    def __init__(self) -> None:
        self._src: list[NDArray[np.int64]] = []
        self._dst: list[NDArray[np.int64]] = []

    def add(self, src: NDArray[np.int64], dst: NDArray[np.int64]) -> None:
        self._src.append(src)
        self._dst.append(dst)

    def chain(self, rows: NDArray[np.int64], key: NDArray[np.int64]) -> None:
        """Let each row wait for the one before it with the same key; rows come sorted by key."""
        same = key[1:] == key[:-1]
        self.add(rows[:-1][same], rows[1:][same])

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return np.concatenate(self._src), np.concatenate(self._dst)


def read_trace(run: RunInfo, spans: SpanTable) -> Trace:
    """Infer groups and dependencies of a ByteDance trace.

    Args:
        run: Its layout and the (dp, stage) of each rank.
        spans: Its operations; ``name`` is the operation's type, ``seq`` numbers
            the operations of one type on one worker in one step.

    Returns:
        The operations, sorted by (step, dp, stage, type, seq).
    """
    steps, rows, warnings = _sorted_rows(run, spans)
    edges, group = _Edges(), np.full(len(rows.row), NO_GROUP, dtype=np.int64)
    num_chunks = run.layout.vpp
    for direction in _DIRECTIONS:
        warnings += _pipeline(rows, edges, group, direction, run.layout.pp, num_chunks)
    _streams(rows, edges)
    _first_backward_transfers(rows, edges)
    _parameters(rows, edges)
    _step_end(rows, edges)
    _collectives(rows, group, run.layout.pp)

    is_comm = np.isin(rows.type, [CODE[name] for name in COMMUNICATION])
    transfer = rows.end - latest_by_group(group, rows.start)
    duration = np.where(is_comm, transfer, rows.end - rows.start)
    clock_error = is_comm & (transfer <= CLOCK_ERROR_TRANSFER_NS)
    duration[clock_error] = 0
    src, dst = edges.arrays()
    operations = Operations(
        steps=steps,
        step=rows.step,
        replica=rows.dp,
        label=rows.type.astype(np.int64) * run.layout.pp + rows.stage,
        group=group,
        duration_ns=duration.astype(np.float64),
        gap_ns=_gaps(rows, src, dst),
        closes_step=rows.type == CODE[OPTIMIZER],
        src=src,
        dst=dst,
    )
    return Trace(
        operations=operations,
        row=rows.row,
        type=rows.type,
        rank=spans.rank[rows.row],
        dp=rows.dp,
        stage=rows.stage,
        num_clock_errors=int(clock_error.sum()),
        warnings=tuple(warnings),
    )


def model_of(trace: Trace) -> ReplayModel:
    """Give each operation its ideal: by type over all dp positions, stages and steps.

    The mean duration for compute, the median transfer for communication, the
    median launch gap.
    """
    operations = trace.operations
    kinds = tuple(dict.fromkeys(FOLDED.get(name, name) for name in TYPES))
    kind_of_type = np.array([kinds.index(FOLDED.get(name, name)) for name in TYPES])
    ideal, ideal_gap = np.empty(len(operations)), np.empty(len(operations))
    for code, name in enumerate(TYPES):
        rows = trace.type == code
        if rows.any():
            typical = np.median if name in COMMUNICATION else np.mean
            ideal[rows] = typical(operations.duration_ns[rows])
            ideal_gap[rows] = np.median(operations.gap_ns[rows])
    return ReplayModel(
        operations=operations,
        ideal_ns=ideal,
        ideal_gap_ns=ideal_gap,
        kind=kind_of_type[trace.type].astype(np.int16),
        kinds=kinds,
        rank=trace.rank,
        dp=trace.dp,
        stage=trace.stage,
        on_device=np.ones(len(operations), dtype=np.bool_),
    )


def _sorted_rows(run: RunInfo, spans: SpanTable) -> tuple[tuple[int, ...], _Rows, list[str]]:
    warnings: list[str] = []
    of_rank = {info.rank: info.coords for epoch in run.epochs for info in epoch.ranks}
    ranks, rank_index = np.unique(spans.rank, return_inverse=True)
    dp = np.array([of_rank[int(rank)].dp for rank in ranks], dtype=np.int32)[rank_index]
    stage = np.array([of_rank[int(rank)].pp for rank in ranks], dtype=np.int32)[rank_index]
    code_of_name = np.array([CODE.get(name, -1) for name in spans.names], dtype=np.int8)
    types = code_of_name[spans.name]
    taken = types >= 0
    if not taken.all():
        strange = sorted({spans.names[code] for code in np.unique(spans.name[~taken])})
        warnings.append(
            f"{int((~taken).sum())} operations of unknown type are left out of the replay:"
            f" {', '.join(strange)}"
        )
    if run.layout.dp * run.layout.dsp == 1:
        taken &= ~np.isin(types, [CODE[name] for name in DP_ONLY])
    order = np.flatnonzero(taken)
    order = order[
        np.lexsort(
            (spans.start_ns[order], spans.seq[order], types[order], stage[order], dp[order],
             spans.step[order])
        )
    ]  # fmt: skip
    numbers, step = np.unique(spans.step[order], return_inverse=True)
    dp, stage, types = dp[order], stage[order], types[order]
    by_dp = step.astype(np.int64) * (int(dp.max(initial=0)) + 1) + dp
    workers, worker = np.unique(by_dp * run.layout.pp + stage, return_inverse=True)
    block = worker * len(TYPES) + types
    size = len(workers) * len(TYPES)
    return (
        tuple(numbers.tolist()),
        _Rows(
            row=order,
            step=step.astype(np.int32),
            dp=dp,
            stage=stage,
            type=types,
            start=spans.start_ns[order],
            end=spans.start_ns[order] + spans.duration_ns[order],
            chunk=spans.chunk[order],
            worker=worker.astype(np.int64),
            worker_dp=workers // run.layout.pp,
            worker_stage=(workers % run.layout.pp).astype(np.int32),
            nth=positions_in_runs(block),
            first=np.searchsorted(block, np.arange(size)).reshape(-1, len(TYPES)),
            count=np.bincount(block, minlength=size).reshape(-1, len(TYPES)),
        ),
        warnings,
    )


@dataclass(frozen=True, slots=True)
class _Direction:
    compute: str
    send: str
    recv: str
    towards: int
    """Stage difference from sender to receiver."""


_DIRECTIONS = (
    _Direction(FORWARD_COMPUTE, FORWARD_SEND, FORWARD_RECV, 1),
    _Direction(BACKWARD_COMPUTE, BACKWARD_SEND, BACKWARD_RECV, -1),
)


def _pipeline(
    rows: _Rows,
    edges: _Edges,
    group: NDArray[np.int64],
    direction: _Direction,
    num_stages: int,
    num_chunks: int,
) -> list[str]:
    """Link one direction's receives, computes and sends, and pair sends with receives."""
    compute = CODE[direction.compute]
    forwards = direction.towards > 0
    recvs, sends = rows.of(direction.recv), rows.of(direction.send)
    num_computes = rows.count[:, compute]
    first = rows.first[:, compute]
    busy = num_computes > 0
    last_start = np.full(len(first), np.iinfo(np.int64).min)
    first_end = np.full(len(first), np.iinfo(np.int64).max)
    last_start[busy] = rows.start[first[busy] + num_computes[busy] - 1]
    first_end[busy] = rows.end[first[busy]]

    recvs = recvs[rows.start[recvs] <= last_start[rows.worker[recvs]] + NO_OP_SLACK_NS]
    sends = sends[rows.end[sends] >= first_end[rows.worker[sends]] - NO_OP_SLACK_NS]
    recv_chunk, send_chunk = (0, num_chunks - 1) if forwards else (num_chunks - 1, 0)
    edge_stage = (0, num_stages - 1) if forwards else (num_stages - 1, 0)

    recv_compute = _compute_of(rows, recvs, compute, edge_stage[0], recv_chunk, late=True)
    send_compute = _compute_of(rows, sends, compute, edge_stage[1], send_chunk, late=False)
    recvs, recv_compute = recvs[recv_compute >= 0], recv_compute[recv_compute >= 0]
    sends, send_compute = sends[send_compute >= 0], send_compute[send_compute >= 0]
    has_peer = ~(
        (rows.stage[recv_compute] == edge_stage[0]) & (rows.chunk[recv_compute] == recv_chunk)
    )
    recvs, recv_compute = recvs[has_peer], recv_compute[has_peer]
    has_peer = ~(
        (rows.stage[send_compute] == edge_stage[1]) & (rows.chunk[send_compute] == send_chunk)
    )
    sends, send_compute = sends[has_peer], send_compute[has_peer]

    edges.add(recvs, recv_compute)
    later = rows.nth[recv_compute] > 0
    edges.add(recv_compute[later] - 1, recvs[later])
    edges.add(send_compute, sends)
    return _pair(rows, group, sends, recvs, direction, num_stages)


def _compute_of(
    rows: _Rows,
    transfers: NDArray[np.int64],
    compute: int,
    edge_stage: int,
    edge_chunk: int,
    *,
    late: bool,
) -> NDArray[np.int64]:
    """Return the compute operation that each p2p operation belongs to, -1 where there is none.

    The i-th belongs to the i-th compute. Where a worker recorded none for the
    computes without a peer, they are passed over; where it recorded one receive
    fewer than computes (``late``), the first compute has none.
    """
    worker = rows.worker[transfers]
    nth = positions_in_runs(worker)
    num_workers = len(rows.first)
    num = np.bincount(worker, minlength=num_workers)
    num_computes = rows.count[:, compute]
    computes = np.flatnonzero(rows.type == compute)
    lonely = (rows.stage[computes] == edge_stage) & (rows.chunk[computes] == edge_chunk)
    num_peered = num_computes - np.bincount(rows.worker[computes[lonely]], minlength=num_workers)
    only_peered = (num == num_peered) & (num < num_computes)
    shift = ((num == num_computes - 1) & late & ~only_peered).astype(np.int64)

    index = nth + shift[worker]
    found = np.where(index < num_computes[worker], rows.first[worker, compute] + index, -1)
    peered = computes[~lonely]
    first_peered = np.searchsorted(rows.worker[peered], np.arange(num_workers))
    special = only_peered[worker]
    found[special] = peered[first_peered[worker[special]] + nth[special]]
    return found


def _pair(
    rows: _Rows,
    group: NDArray[np.int64],
    sends: NDArray[np.int64],
    recvs: NDArray[np.int64],
    direction: _Direction,
    num_stages: int,
) -> list[str]:
    """Make groups of the n-th send of a stage and the n-th receive of the next."""
    target = (rows.stage[sends] + direction.towards) % num_stages
    send_key = rows.worker_dp[rows.worker[sends]] * num_stages + target
    recv_key = rows.worker_dp[rows.worker[recvs]] * num_stages + rows.stage[recvs]
    order = np.argsort(send_key, kind="stable")
    sends, send_key = sends[order], send_key[order]
    longest = max(int(np.bincount(rows.worker[sends]).max(initial=0)), 1) + 1
    longest = max(longest, int(np.bincount(rows.worker[recvs]).max(initial=0)) + 1)
    send_name = send_key * longest + positions_in_runs(send_key)
    recv_name = recv_key * longest + positions_in_runs(recv_key)
    _, of_send, of_recv = np.intersect1d(
        send_name, recv_name, assume_unique=True, return_indices=True
    )
    base = int(group.max(initial=-1)) + 1
    group[sends[of_send]] = base + np.arange(len(of_send))
    group[recvs[of_recv]] = base + np.arange(len(of_recv))
    unpaired = len(sends) + len(recvs) - 2 * len(of_send)
    if not unpaired:
        return []
    name = direction.send.removesuffix("-send")
    return [f"{unpaired} {name} sends and receives have no partner and wait for nobody"]


def _streams(rows: _Rows, edges: _Edges) -> None:
    """Chain the operations of each of a worker's six streams in order of start."""
    streams = (
        (FORWARD_COMPUTE, BACKWARD_COMPUTE),
        (FORWARD_SEND,),
        (FORWARD_RECV,),
        (BACKWARD_SEND,),
        (BACKWARD_RECV,),
        (PARAMS_ALL_GATHER, GRADS_REDUCE_SCATTER),
    )
    for names in streams:
        members = _in_start_order(rows, names)
        edges.chain(members, rows.worker[members])


def _in_start_order(rows: _Rows, names: tuple[str, ...]) -> NDArray[np.int64]:
    """Return the rows of some types by worker, then by start."""
    members = np.flatnonzero(np.isin(rows.type, [CODE[name] for name in names]))
    if len(names) == 1:
        return members
    return members[np.lexsort((rows.end[members], rows.start[members], rows.worker[members]))]


def _first_backward_transfers(rows: _Rows, edges: _Edges) -> None:
    """Hold a worker's first backward transfers back until its warm-up is nearly done.

    They wait for the compute two before the first backward-compute.
    """
    computes = _in_start_order(rows, (FORWARD_COMPUTE, BACKWARD_COMPUTE))
    worker = rows.worker[computes]
    backward = np.flatnonzero(rows.type[computes] == CODE[BACKWARD_COMPUTE])
    _, at = np.unique(worker[backward], return_index=True)
    first_backward = backward[at]
    enough = positions_in_runs(worker)[first_backward] >= 2  # noqa: PLR2004
    before = computes[first_backward[enough] - 2]
    for name in (BACKWARD_SEND, BACKWARD_RECV):
        has_one = rows.count[rows.worker[before], CODE[name]] > 0
        edges.add(before[has_one], rows.first[rows.worker[before[has_one]], CODE[name]])


def _parameters(rows: _Rows, edges: _Edges) -> None:
    """Let each chunk's first forward-compute wait for its last params-all-gather."""
    last_gather = _one_by_chunk(rows, PARAMS_ALL_GATHER, last=True)
    first_forward = _one_by_chunk(rows, FORWARD_COMPUTE, last=False)
    edges.add(*_matching(last_gather, first_forward))


def _one_by_chunk(
    rows: _Rows, name: str, *, last: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first or last row of a type for each (worker, chunk), with that key."""
    members = rows.of(name)
    key = rows.worker[members] * (int(rows.chunk.max(initial=0)) + 2) + rows.chunk[members] + 1
    if last:
        members, key = members[::-1], key[::-1]
    keys, at = np.unique(key, return_index=True)
    return members[at], keys


def _matching(
    src: tuple[NDArray[np.int64], NDArray[np.int64]],
    dst: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    _, of_src, of_dst = np.intersect1d(src[1], dst[1], assume_unique=True, return_indices=True)
    return src[0][of_src], dst[0][of_dst]


def _step_end(rows: _Rows, edges: _Edges) -> None:
    """Chain what follows a worker's last compute, with or without overlapped DP communication."""
    overlapped = bool((rows.type == CODE[SEPARATE_GRADS]).any())
    chain = [GC, LAYERNORM_GRADS, EMBEDDING_GRADS]
    chain += [SEPARATE_GRADS] if overlapped else [GRADS_REDUCE_SCATTER]
    chain += [GRAD_CLIP, OPTIMIZER]
    place = np.full(len(TYPES), -1)
    place[[CODE[name] for name in chain]] = np.arange(1, len(chain) + 1)
    place[[CODE[FORWARD_COMPUTE], CODE[BACKWARD_COMPUTE]]] = 0

    computes = _in_start_order(rows, (FORWARD_COMPUTE, BACKWARD_COMPUTE))
    is_last = np.append(rows.worker[computes][1:] != rows.worker[computes][:-1], True)
    members = np.concatenate((computes[is_last], np.flatnonzero(place[rows.type] > 0)))
    members = members[np.lexsort((members, place[rows.type[members]], rows.worker[members]))]
    edges.chain(members, rows.worker[members])
    if overlapped:
        last_backward, key = _one_by_chunk(rows, BACKWARD_COMPUTE, last=True)
        scatters = rows.of(GRADS_REDUCE_SCATTER)
        base = int(rows.chunk.max(initial=0)) + 2
        wanted = rows.worker[scatters] * base + rows.chunk[scatters] + 1
        at = np.searchsorted(key, wanted)
        known = (at < len(key)) & (key[np.minimum(at, len(key) - 1)] == wanted)
        edges.add(last_backward[at[known]], scatters[known])
        layernorm = rows.of(LAYERNORM_GRADS)
        num = rows.count[rows.worker[layernorm], CODE[GRADS_REDUCE_SCATTER]]
        layernorm, num = layernorm[num > 0], num[num > 0]
        last = rows.first[rows.worker[layernorm], CODE[GRADS_REDUCE_SCATTER]] + num - 1
        edges.add(last, layernorm)


def _collectives(rows: _Rows, group: NDArray[np.int64], num_stages: int) -> None:
    """Number the collectives' groups: over dp, over first and last stage, over the whole job."""
    # TP is collapsed, so layernorm-grads-all-reduce has no group that was traced.
    step_stage = rows.step.astype(np.int64) * num_stages + rows.stage
    by_dp = rows.worker_dp[rows.worker]
    scopes = (
        (PARAMS_ALL_GATHER, step_stage),
        (GRADS_REDUCE_SCATTER, step_stage),
        (SEPARATE_GRADS, step_stage),
        (EMBEDDING_GRADS, by_dp),
        (GRAD_CLIP, rows.step.astype(np.int64)),
    )
    for name, scope in scopes:
        members = rows.of(name)
        if len(members):
            key = scope[members] * (int(rows.nth[members].max()) + 1) + rows.nth[members]
            _, instance = np.unique(key, return_inverse=True)
            group[members] = int(group.max(initial=-1)) + 1 + instance


def _gaps(rows: _Rows, src: NDArray[np.int64], dst: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return how long each operation began after all that it waits for had ended.

    One that began before (the model's dependency did not hold there) has no
    gap; the full replay's error shows what that costs.
    """
    first_of_step = np.full(int(rows.step.max(initial=-1)) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first_of_step, rows.step, rows.start)
    ready = first_of_step[rows.step]
    np.maximum.at(ready, dst, rows.end[src])
    gaps: NDArray[np.int64] = np.maximum(rows.start - ready, 0)
    return gaps.astype(np.float64)
