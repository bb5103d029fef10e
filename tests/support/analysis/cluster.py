"""Small cluster whose ranks follow scripts and record the spans that the tracer would.

It is independent of the analysis: a rank computes for as long as its script says, a collective
ends on all members a transfer after the last one entered, a receive ends a transfer after both
sides have arrived.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from rankscope.analysis.trace.account import RecordAccount
from rankscope.analysis.trace.context import RunContext
from rankscope.analysis.trace.rows import make_span_table
from rankscope.analysis.trace.tables import (
    GroupInfo,
    RankInfo,
    RunInfo,
    RunSummary,
    SpanTable,
    StepTable,
)
from rankscope.tracer.span import KIND_CODES, NONE, SpanKind
from rankscope.tracer.topology import Coords, Layout
from tests.support.analysis.tables import one_epoch, table_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T", SpanTable, StepTable)
MS = 1_000_000
TRANSFER = MS // 2
PIPELINE = 1 << 40
WORLD = 1


@dataclass(frozen=True)
class Compute:
    ns: int


@dataclass(frozen=True)
class Collective:
    group: int
    kind: SpanKind
    transfer_ns: int = TRANSFER


@dataclass(frozen=True)
class Send:
    dst: int


@dataclass(frozen=True)
class Recv:
    src: int


@dataclass(frozen=True)
class Begin:
    kind: SpanKind
    microbatch: int = NONE


@dataclass(frozen=True)
class End:
    pass


Action = Compute | Collective | Send | Recv | Begin | End


@dataclass
class _Rank:
    rank: int
    now: int
    actions: list[Action]
    at: int = 0
    open: list[tuple[Begin, int]] = field(default_factory=list)

    @property
    def next(self) -> Action | None:
        return self.actions[self.at] if self.at < len(self.actions) else None


class Cluster:
    """Runs scripts step by step and keeps the spans that the tracer would record."""

    def __init__(self, layout: Layout, groups: dict[int, tuple[SpanKind, tuple[int, ...]]]) -> None:
        self.layout = layout
        self.groups = groups
        self.rows: list[tuple[int, ...]] = []
        self.steps: list[tuple[int, int, int, int]] = []
        self._seq: dict[tuple[int, ...], int] = defaultdict(int)

    def coords(self, rank: int) -> Coords:
        tp = rank % self.layout.tp
        dp = rank // self.layout.tp % self.layout.dp
        return Coords(dp=dp, tp=tp, pp=rank // (self.layout.tp * self.layout.dp))

    def run(self, num_steps: int, script: Callable[[int, int], Iterator[Action]]) -> None:
        clocks = dict.fromkeys(range(self.layout.world_size), MS)
        for step in range(num_steps):
            ranks = [_Rank(rank, now, list(script(rank, step))) for rank, now in clocks.items()]
            starts = dict(clocks)
            while any(rank.next is not None for rank in ranks):
                if not sum(self._advance(step, rank, ranks) for rank in ranks):
                    raise RuntimeError(f"deadlock: {[r.next for r in ranks]}")
            for rank in ranks:
                clocks[rank.rank] = rank.now
                self.steps.append((step, rank.rank, starts[rank.rank], rank.now))

    def _advance(self, step: int, rank: _Rank, ranks: list[_Rank]) -> bool:
        """Run the rank's next action; return False if it has to wait."""
        match rank.next:
            case Collective() as action:
                return self._collective(step, action, ranks)
            case Send(dst):
                return self._send(step, rank, ranks[dst])
            case None | Recv():
                return False
            case Compute(ns):
                rank.now += ns
            case Begin() as begin:
                rank.open.append((begin, rank.now))
            case End():
                begin, start = rank.open.pop()
                self._row(step, rank.rank, begin.kind, start, rank.now, mb=begin.microbatch)
        rank.at += 1
        return True

    def _collective(self, step: int, action: Collective, ranks: list[_Rank]) -> bool:
        members = [ranks[rank] for rank in self.groups[action.group][1]]
        if any(member.next != action for member in members):
            return False
        end = max(member.now for member in members) + action.transfer_ns
        for member in members:
            seq = self._count(action.group, member.rank)
            self._comm(step, member, action.kind, end, group=action.group, seq=seq)
            member.at += 1
        return True

    def _send(self, step: int, sender: _Rank, receiver: _Rank) -> bool:
        if receiver.next != Recv(sender.rank):
            return False
        end = max(sender.now, receiver.now) + TRANSFER
        pair = {"src": sender.rank, "dst": receiver.rank, "group": PIPELINE}
        seq = self._count(PIPELINE, sender.rank, receiver.rank)
        self._comm(step, sender, SpanKind.PP_SEND, end, seq=seq, **pair)
        self._comm(step, receiver, SpanKind.PP_RECV, end, seq=seq, **pair)
        sender.at += 1
        receiver.at += 1
        return True

    def _count(self, *key: int) -> int:
        self._seq[key] += 1
        return self._seq[key] - 1

    def _comm(self, step: int, rank: _Rank, kind: SpanKind, end: int, **names: int) -> None:
        self._row(step, rank.rank, kind, rank.now, end, num_bytes=1024, **names)
        self._row(step, rank.rank, SpanKind.WAIT, rank.now, end, **names)
        rank.now = end

    def _row(  # each keyword is a column
        self,
        step: int,
        rank: int,
        kind: SpanKind,
        start: int,
        end: int,
        *,
        mb: int = NONE,
        group: int = 0,
        seq: int = NONE,
        src: int = NONE,
        dst: int = NONE,
        num_bytes: int = NONE,
    ) -> None:
        self.rows.append(
            (step, rank, KIND_CODES[kind], start, end - start, group, seq, src, dst, mb, num_bytes)
        )

    def run_info(self) -> RunInfo:
        ranks = [RankInfo(rank=r, coords=self.coords(r)) for r in range(self.layout.world_size)]
        groups = [
            GroupInfo(group_id=group, kind=kind, name=f"g{group}", members=members)
            for group, (kind, members) in self.groups.items()
        ]
        return one_epoch("tiny", self.layout, ranks, groups, clock_error_ns=0)

    def span_table(self) -> SpanTable:
        rows = np.array(sorted(self.rows, key=lambda row: (row[0], row[1], row[3])), np.int64)
        step, rank, kind, start, duration, group, seq, src, dst, mb, num_bytes = rows.T
        num = len(rows)
        return make_span_table(
            epoch=np.zeros(num, np.int32),
            step=step.astype(np.int32),
            rank=rank.astype(np.int32),
            kind=kind.astype(np.int8),
            name=kind.astype(np.int32),
            track=np.zeros(num, np.int32),
            start_ns=start,
            duration_ns=duration,
            group_id=group.astype(np.uint64),
            seq=seq,
            src_rank=src.astype(np.int32),
            dst_rank=dst.astype(np.int32),
            microbatch=mb.astype(np.int32),
            chunk=np.where(mb >= 0, 0, NONE).astype(np.int32),
            num_bytes=num_bytes,
            names=tuple(kind.value for kind in SpanKind),
            tracks=("main",),
        )

    def step_table(self) -> StepTable:
        step, rank, start, end = np.array(sorted(self.steps), np.int64).T
        return table_of(
            StepTable, step=step, rank=rank, start_ns=start, end_ns=end, num_tokens=1024
        )


@dataclass(frozen=True)
class Source:
    """A `SpanSource` of one run."""

    info: RunInfo
    span_table: SpanTable
    step_table: StepTable
    around: RunContext = field(default_factory=RunContext)

    def runs(self) -> tuple[RunSummary, ...]:
        return ()

    def run_info(self, run_id: str) -> RunInfo:
        return self.info

    def steps(self, run_id: str, *, first: int | None = None, last: int | None = None) -> StepTable:
        return _between(self.step_table, first, last)

    def spans(self, run_id: str, *, first: int | None = None, last: int | None = None) -> SpanTable:
        return _between(self.span_table, first, last)

    def context(
        self, run_id: str, *, first: int | None = None, last: int | None = None
    ) -> RunContext:
        return self.around


def _between(table: T, first: int | None, last: int | None) -> T:
    keep = (table.step >= (first or 0)) & (table.step <= (2**31 - 1 if last is None else last))
    return type(table)(
        **{
            name: getattr(table, name)
            if name in ("names", "tracks")
            else getattr(table, name)[keep]
            for name in table.__dataclass_fields__
        }
    )


def tp_group(layout: Layout, at: Coords) -> int:
    return 100 + at.pp * layout.dp + at.dp


def dp_group(layout: Layout, at: Coords) -> int:
    return 10_000 + at.pp * layout.tp + at.tp


def gpt_cluster(
    layout: Layout,
    *,
    num_steps: int,
    forward_ns: Callable[[int, int, int], int],
    num_microbatches: int = 4,
) -> Cluster:
    """Return a trained pipeline of TP blocks, two per stage, all forwards before all backwards.

    ``forward_ns(rank, step, microbatch)`` is the forward compute of one block; backward takes twice
    as long.
    """
    groups: dict[int, tuple[SpanKind, tuple[int, ...]]] = {}
    cluster = Cluster(layout, groups)
    ranks = range(layout.world_size)
    for rank in ranks:
        at = cluster.coords(rank)
        for group, kind in (
            (tp_group(layout, at), SpanKind.TP_COMM),
            (dp_group(layout, at), SpanKind.DP_COMM),
        ):
            groups[group] = (kind, (*groups.get(group, (kind, ()))[1], rank))
    groups[WORLD] = groups[PIPELINE] = (SpanKind.OTHER, tuple(ranks))
    job = _Job(cluster, forward_ns, num_microbatches)
    cluster.run(num_steps, job.script)
    return cluster


@dataclass(frozen=True)
class _Job:
    """The scripts of `gpt_cluster`."""

    cluster: Cluster
    forward_ns: Callable[[int, int, int], int]
    num_microbatches: int

    def script(self, rank: int, step: int) -> Iterator[Action]:
        layout, at = self.cluster.layout, self.cluster.coords(rank)
        stride = layout.dp * layout.tp
        before, after = at.pp > 0, at.pp < layout.pp - 1
        for mb in range(self.num_microbatches):
            if before:
                yield Recv(rank - stride)
            yield from self._compute(rank, step, mb, SpanKind.FORWARD)
            if after:
                yield Send(rank + stride)
        for mb in range(self.num_microbatches):
            if after:
                yield Recv(rank + stride)
            yield from self._compute(rank, step, mb, SpanKind.BACKWARD)
            if before:
                yield Send(rank - stride)
        if layout.dp > 1:
            yield Collective(dp_group(layout, at), SpanKind.DP_COMM)
        yield Collective(WORLD, SpanKind.OTHER)
        yield Begin(SpanKind.OPTIMIZER)
        yield Compute(MS)
        yield End()

    def _compute(self, rank: int, step: int, mb: int, kind: SpanKind) -> Iterator[Action]:
        layout, at = self.cluster.layout, self.cluster.coords(rank)
        scale = 1 if kind is SpanKind.FORWARD else 2
        yield Begin(kind, mb)
        for _ in range(2):
            yield Compute(scale * self.forward_ns(rank, step, mb))
            if layout.tp > 1:
                yield Collective(tp_group(layout, at), SpanKind.TP_COMM)
        yield End()


def source_of(cluster: Cluster) -> Source:
    return Source(cluster.run_info(), cluster.span_table(), cluster.step_table())


def dropping(num: int) -> dict[tuple[int, int], RecordAccount]:
    """Return the accounts of a run whose rank 0 dropped records for want of space."""
    return {(0, 0): RecordAccount(dropped={"spool-full": num} if num else {})}
