"""Simulated jobs that one hang has stopped, as a collector has stored them.

Every rank runs the program of its stage: input, one forward and one backward per micro-batch (1F1B)
with transfers between the stages, gradients, optimizer, checkpoint. A communication ends once all
of its members have entered it, so what follows from a hang is computed, and shares no code or rule
with the analysis. Of what the ranks did, only that is kept which had reached the collector: spans
that ended, and open ones in the events of ranks whose host reports.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rankscope.analysis.trace.context import RankExit, RunContext
from rankscope.analysis.trace.errors import UnknownRunError
from rankscope.analysis.trace.rows import make_span_table
from rankscope.analysis.trace.tables import EpochInfo, GroupInfo, RankInfo, RunInfo, StepTable
from rankscope.sources.store_source import to_event
from rankscope.tracer.span import KIND_CODES, NONE, SpanKind
from rankscope.tracer.topology import Coords, Layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from rankscope.analysis.trace.tables import RunSummary, SpanTable

    Times = NDArray[np.float64]
    """Shape (dp, tp): ns from the begin of the step; infinite if it never happens."""

RUN = "hung"
STARTED_NS = 1_800_000_000_000_000_000
NEVER = np.inf
MS = 1e6
SECOND = 1e9
SIGKILL = -9
STALLED_NS = 60 * SECOND
TIMEOUT_NS = 600 * SECOND
"""Default of torch for NCCL."""

LOCAL_SHARE = {SpanKind.CHECKPOINT: 50.0}
"""Length of spans without communication, in those of a forward; 0.2 of others."""

LIBRARY = "/opt/venv/lib/python3.11/site-packages"
LOOP = ("/job/train.py:210 train_step", "/job/train.py:318 main", "/job/train.py:340 <module>")


class Do(StrEnum):
    """Kinds of operations of a program."""

    BEGIN = "begin of a span"
    END = "end of the span that began last"
    LOCAL = "span without communication"
    TP = "collective of the tensor-parallel group"
    DP = "collective of the data-parallel group"
    WORLD = "collective of all ranks"
    SEND = "send to a stage"
    RECV = "receive from a stage"


COLLECTIVES = frozenset({Do.TP, Do.DP, Do.WORLD})


class Op(NamedTuple):
    """One operation of the program of a stage."""

    do: Do
    kind: SpanKind
    name: str
    microbatch: int = NONE
    peer: int = NONE
    """Stage at the other side."""


class Stop(StrEnum):
    """Manner in which a rank stops at an operation."""

    BEFORE = "it never begins it"
    INSIDE = "it begins it and never ends it"
    ELSEWHERE = "it begins another communication instead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Layout and program of a job."""

    pp: int
    dp: int
    tp: int
    is_pp_inner: bool
    """Whether neighbouring ranks are of neighbouring stages instead of replicas."""

    num_microbatches: int
    num_buckets: int
    traces_tp: bool
    waits_in_sends: bool
    """Whether a send ends with its receive, while its rank goes on."""

    reduces_norm: bool
    """Whether all ranks reduce the norm of the gradients."""

    saves: bool
    step: int
    ranks_per_host: int = 8
    compute_ms: float = 40.0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp

    @property
    def rank(self) -> NDArray[np.int64]:
        """Return the rank of each position, shape (pp, dp, tp)."""
        shape = (self.dp, self.pp, self.tp) if self.is_pp_inner else (self.pp, self.dp, self.tp)
        ranks = np.arange(self.world_size).reshape(shape)
        return ranks.transpose(1, 0, 2) if self.is_pp_inner else ranks

    def position(self, rank: int) -> tuple[int, int, int]:
        """Return stage, replica and tensor-parallel position of a rank."""
        stage, replica, part = np.argwhere(self.rank == rank)[0].tolist()
        return stage, replica, part

    def program(self, stage: int) -> list[Op]:
        """Return what each rank of a stage does in a step."""
        last = self.pp - 1
        ops = [Op(Do.LOCAL, SpanKind.DATA, "next batch")] if stage in {0, last} else []
        warmup = min(self.num_microbatches, last - stage)
        order = [(True, number) for number in range(warmup)]
        for number in range(warmup, self.num_microbatches):
            order += [(True, number), (False, number - warmup)]
        order += [
            (False, number)
            for number in range(self.num_microbatches - warmup, self.num_microbatches)
        ]
        for is_forward, number in order:
            ops += self._compute(stage, number, is_forward=is_forward)
        ops += [
            Op(Do.DP, SpanKind.DP_COMM, "all_reduce", number) for number in range(self.num_buckets)
        ]
        if self.reduces_norm:
            ops.append(Op(Do.WORLD, SpanKind.OTHER, "all_reduce"))
        ops.append(Op(Do.LOCAL, SpanKind.OPTIMIZER, "optimizer"))
        ops.append(Op(Do.DP, SpanKind.DP_COMM, "all_gather"))
        if self.saves:
            ops.append(Op(Do.LOCAL, SpanKind.CHECKPOINT, "save"))
        ops.append(Op(Do.WORLD, SpanKind.OTHER, "barrier"))
        return ops

    def earlier_calls(self) -> dict[object, int]:
        """Return the number of earlier calls by group, or by ordered pair of stages."""
        calls: Counter[object] = Counter()
        for stage in range(self.pp):
            for op in self.program(stage):
                if op.do in {Do.TP, Do.DP}:
                    calls[op.do, stage] += self.step
                elif op.do is Do.SEND:
                    calls[stage, op.peer] += self.step
                elif op.do is Do.WORLD and not stage:
                    calls[Do.WORLD] += self.step
        return dict(calls)

    def _compute(self, stage: int, number: int, *, is_forward: bool) -> Iterator[Op]:
        before, after = (stage - 1, stage + 1) if is_forward else (stage + 1, stage - 1)
        kind = SpanKind.FORWARD if is_forward else SpanKind.BACKWARD
        if 0 <= before < self.pp:
            yield Op(Do.RECV, SpanKind.PP_RECV, "recv", number, before)
        yield Op(Do.BEGIN, kind, kind.value, number)
        if self.tp > 1:
            yield Op(Do.TP, SpanKind.TP_COMM, "all_reduce", number)
        yield Op(Do.END, kind, kind.value, number)
        if 0 <= after < self.pp:
            yield Op(Do.SEND, SpanKind.PP_SEND, "send", number, after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """Operation at which one rank stops."""

    rank: int
    op: int
    """Position in the program of its stage."""

    stop: Stop
    other: tuple[Do, str] = (Do.WORLD, "broadcast")
    """Group and name of the collective that it enters instead, at its next number there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """The cause of a hang, and the records that have arrived."""

    halts: tuple[Halt, ...] = ()
    dead_ranks: frozenset[int] = frozenset()
    """Ranks whose processes end at `at_ns`."""

    parted_hosts: frozenset[int] = frozenset()
    """Two hosts between which nothing arrives from `at_ns` on."""

    at_ns: float = NEVER
    is_killed: bool = False
    """Whether the agent lives and reports the end of `dead_ranks`; else it died with them."""

    unshipped_hosts: frozenset[int] = frozenset()
    """Hosts of which nothing has arrived since `lag_ns` before the hang."""

    lag_ns: float = 0.0
    stack_share: float = 1.0
    """Share of the ranks whose stacks were recorded."""

    frames: tuple[str, ...] = ()
    """Stack of the ranks that halt, the innermost first."""

    call: str = ""
    """System call in which they are, as the tracer records it."""

    offset_ns: Mapping[int, float] = field(default_factory=dict)
    """Error of the clocks of hosts; 0 of the others."""

    has_timed_out: bool = False
    """Whether the blocked ranks have ended in the timeout of their collective."""

    absent: frozenset[int] = frozenset()
    """Ranks whose processes never described themselves."""


@dataclass(slots=True)
class _Lane:
    """One operation of a stage on all of its ranks; every column has shape (dp, tp)."""

    op: Op
    stage: int
    start: Times
    end: Times
    depth: int
    seq: int = NONE


class Recording:
    """The record of a hung job, as a `SpanSource` of that run."""

    def __init__(self, job: Job, hang: Hang, *, seed: int) -> None:
        self._job, self._hang = job, hang
        self._rng = np.random.default_rng(seed)
        self._rank = job.rank
        self._host = self._rank // job.ranks_per_host
        self._dead_ns = np.where(np.isin(self._rank, list(hang.dead_ranks)), hang.at_ns, NEVER)
        self._programs = [job.program(stage) for stage in range(job.pp)]
        self._halts = {job.position(halt.rank): halt for halt in hang.halts}
        self._now = [np.zeros((job.dp, job.tp)) for _ in range(job.pp)]
        self._lanes: list[_Lane] = []
        self._sent: dict[tuple[int, int, bool, int], _Lane] = {}
        self._numbers = Counter(job.earlier_calls())
        self._elsewhere: list[tuple[int, float, SpanKind, str, int, int]] = []
        self._untraced: set[int] = set()
        """Ranks that are blocked in communication that is not traced."""

        self._info = describe(job, hang)
        self._ids = group_ids(job)
        self._run()
        self.hung_ns = self._hung_ns()
        """When the first rank stopped, from the begin of the step."""

        self._arrived_ns = self._arrivals()
        self._spans, self._open = self._records()
        self._steps = self._finished_steps()
        self._rows = [*self._event_rows()]

    def run_info(self, run_id: str) -> RunInfo:
        """Return the description of the run.

        Raises:
            UnknownRunError: The run has another name.
        """
        if run_id != RUN:
            raise UnknownRunError(run_id, (RUN,))
        return self._info

    def runs(self) -> tuple[RunSummary, ...]:
        """Return nothing: it lists no runs."""
        return ()

    def steps(self, run_id: str, *, first: int | None = None, last: int | None = None) -> StepTable:
        """Return the rows of the step before the one that hangs."""
        return self._steps

    def spans(self, run_id: str, *, first: int | None = None, last: int | None = None) -> SpanTable:
        """Return the spans of the step that hangs."""
        return self._spans

    def context(
        self, run_id: str, *, first: int | None = None, last: int | None = None
    ) -> RunContext:
        """Return events and ends of processes, read from rows as the store has them."""
        events = sorted(map(to_event, self._rows), key=lambda event: event.at_ns)
        return RunContext(events=tuple(events), exits=self._exits())

    def _run(self) -> None:
        """Run the programs until every rank has ended the step or is blocked."""
        done = [0] * self._job.pp
        opened: list[list[_Lane]] = [[] for _ in done]
        while any(at < len(ops) for at, ops in zip(done, self._programs, strict=True)):
            for stage, ops in enumerate(self._programs):
                while done[stage] < len(ops) and self._is_due(stage, ops[done[stage]]):
                    self._do(stage, done[stage], opened[stage])
                    done[stage] += 1
            heads = [
                ops[at] if at < len(ops) else None
                for at, ops in zip(done, self._programs, strict=True)
            ]
            if all(op is not None and op.do is Do.WORLD for op in heads):
                lanes = [self._begin(stage, at, 0) for stage, at in enumerate(done)]
                starts = np.stack([lane.start for lane in lanes])
                ends = self._collective_end(starts, self._host, self._dead_ns, (0, 1, 2))
                number = self._next(Do.WORLD)
                for stage, lane in enumerate(lanes):
                    lane.seq, lane.end = number, self._ended(stage, done[stage], ends[stage])
                    self._now[stage] = lane.end
                    done[stage] += 1

    def _is_due(self, stage: int, op: Op) -> bool:
        if op.do is Do.RECV:
            return (op.peer, stage, op.peer < stage, op.microbatch) in self._sent
        return op.do is not Do.WORLD

    def _do(self, stage: int, number: int, opened: list[_Lane]) -> None:
        op = self._programs[stage][number]
        if op.do is Do.END:
            opened.pop().end = self._now[stage]
            return
        lane = self._begin(stage, number, len(opened))
        start, forward = lane.start, stage < op.peer
        if op.do is Do.BEGIN:
            opened.append(lane)
            lane.end = start + self._compute_ns(1.0)
        elif op.do is Do.LOCAL:
            lane.end = start + self._compute_ns(LOCAL_SHARE.get(op.kind, 0.2))
        elif op.do is Do.SEND:
            self._sent[stage, op.peer, forward, op.microbatch] = lane
            lane.seq, lane.end = self._next((stage, op.peer)), start + 0.1 * MS
        elif op.do is Do.RECV:
            sent = self._sent[op.peer, stage, not forward, op.microbatch]
            pair = np.stack([sent.start, start])
            hosts = self._host[[op.peer, stage]]
            lane.seq = sent.seq
            lane.end = self._collective_end(pair, hosts, self._dead_ns[[op.peer, stage]], (0,))[0]
            if self._job.waits_in_sends:
                sent.end = lane.end
        else:
            axes = (1,) if op.do is Do.TP else (0,)
            lane.seq = self._next((op.do, stage))
            lane.end = self._collective_end(start, self._host[stage], self._dead_ns[stage], axes)
        end = self._ended(stage, number, lane.end)
        self._now[stage] = end
        if op.do is not Do.BEGIN:
            lane.end = np.where(np.isfinite(start), lane.end if op.do is Do.SEND else end, NEVER)

    def _begin(self, stage: int, number: int, depth: int) -> _Lane:
        """Let the ranks of a stage begin an operation, those that get to it."""
        now = self._now[stage]
        start = np.where(now > self._dead_ns[stage], NEVER, now)
        op = self._programs[stage][number]
        for (of_stage, replica, part), halt in self._halts.items():
            if (of_stage, halt.op) == (stage, number) and halt.stop is not Stop.INSIDE:
                if halt.stop is Stop.ELSEWHERE:
                    self._enter_other(halt, stage, float(start[replica, part]), op)
                start[replica, part] = NEVER
        lane = _Lane(op=op, stage=stage, start=start, end=start, depth=depth)
        self._lanes.append(lane)
        return lane

    def _enter_other(self, halt: Halt, stage: int, at_ns: float, op: Op) -> None:
        """Let a rank enter another collective than its operation."""
        do, name = halt.other
        seq = self._numbers[Do.WORLD if do is Do.WORLD else (do, stage)]
        kind = {Do.TP: SpanKind.TP_COMM, Do.DP: SpanKind.DP_COMM}.get(do, SpanKind.OTHER)
        group = int(self._ids[do][self._rank == halt.rank][0])
        self._elsewhere.append((halt.rank, at_ns, kind, name, group, seq))

    def _ended(self, stage: int, number: int, end: Times) -> Times:
        """Return when ranks end an operation: never, if they halt in it or die before."""
        end = np.where(end > self._dead_ns[stage], NEVER, end)
        for (of_stage, replica, part), halt in self._halts.items():
            if (of_stage, halt.op, halt.stop) == (stage, number, Stop.INSIDE):
                end[replica, part] = NEVER
        return end

    def _collective_end(
        self, starts: Times, hosts: NDArray[np.int64], dead_ns: Times, axes: tuple[int, ...]
    ) -> Times:
        """Return when a communication ends: never if a member is missing, or dies in it."""
        end = starts.max(axis=axes, keepdims=True) + MS
        end = np.where(dead_ns.min(axis=axes, keepdims=True) < end, NEVER, end)
        if self._hang.parted_hosts:
            parted = [
                (hosts == host).any(axis=axes, keepdims=True) for host in self._hang.parted_hosts
            ]
            end = np.where(np.logical_and(*parted) & (end > self._hang.at_ns), NEVER, end)
        return np.broadcast_to(end, starts.shape).copy()

    def _compute_ns(self, share: float) -> Times:
        noise = 1.0 + 0.02 * self._rng.standard_normal((self._job.dp, self._job.tp))
        return self._job.compute_ms * MS * share * noise

    def _next(self, key: object) -> int:
        self._numbers[key] += 1
        return self._numbers[key] - 1

    def _hung_ns(self) -> float:
        if np.isfinite(self._hang.at_ns):
            return self._hang.at_ns
        starts = []
        for halt in self._hang.halts:
            stage, replica, part = self._job.position(halt.rank)
            mine = [lane.start[replica, part] for lane in self._lanes if lane.stage == stage]
            starts.append(max((at for at in mine if np.isfinite(at)), default=0.0))
        return float(min(starts, default=0.0))

    def _arrivals(self) -> NDArray[np.float64]:
        """Return until when records of each rank have arrived, shape (ranks,)."""
        arrived_ns = np.full(self._job.world_size, NEVER)
        host_of = np.arange(self._job.world_size) // self._job.ranks_per_host
        is_late = np.isin(host_of, list(self._hang.unshipped_hosts))
        arrived_ns[is_late] = self.hung_ns - self._hang.lag_ns
        if self._hang.dead_ranks and not self._hang.is_killed:
            arrived_ns[list(self._hang.dead_ranks)] = self._hang.at_ns - self._hang.lag_ns
        arrived_ns[list(self._hang.absent)] = -NEVER
        return arrived_ns

    def _records(self) -> tuple[SpanTable, dict[int, list[dict[str, object]]]]:
        """Return the spans that ended, and the open ones of each rank, that have arrived."""
        columns: dict[str, list[NDArray[np.int64]]] = defaultdict(list)
        opened: dict[int, list[dict[str, object]]] = defaultdict(list)
        names = sorted({lane.op.name for lane in self._lanes})
        for lane in self._lanes:
            rank = self._rank[lane.stage]
            if lane.op.do is Do.TP and not self._job.traces_tp:
                blocked = np.isfinite(lane.start) & ~np.isfinite(lane.end)
                self._untraced.update(rank[blocked].tolist())
                continue
            has_begun = np.isfinite(lane.start)
            has_ended = has_begun & np.isfinite(lane.end) & (lane.end <= self._arrived_ns[rank])
            is_open = has_begun & ~np.isfinite(lane.end) & np.isinf(self._arrived_ns[rank])
            is_open &= self._arrived_ns[rank] > 0
            group, src, dst = self._instance(lane)
            rows = {
                "rank": rank,
                "start_ns": self._unix_ns(lane.start, rank),
                "duration_ns": np.where(has_ended, lane.end, 0)
                - np.where(has_ended, lane.start, 0),
                "kind": np.full(rank.shape, KIND_CODES[lane.op.kind]),
                "name": np.full(rank.shape, names.index(lane.op.name)),
                "group_id": group,
                "seq": np.full(rank.shape, lane.seq),
                "src_rank": src,
                "dst_rank": dst,
                "microbatch": np.full(rank.shape, lane.op.microbatch),
                "depth": np.full(rank.shape, lane.depth),
            }
            for name, column in rows.items():
                columns[name].append(column[has_ended])
            for where in np.argwhere(is_open):
                replica, part = where.tolist()
                at = replica, part
                entry = open_entry(lane.op.kind, lane.op.name, step=self._job.step)
                entry["start_ns"] = int(self._unix_ns(lane.start[at], rank[at]))
                entry |= {"group_id": f"{int(group[at]):016x}", "seq": lane.seq}
                if lane.op.do in {Do.SEND, Do.RECV}:
                    entry["sides"] = [int(src[at]), int(dst[at])]
                opened[int(rank[at])].append(entry)
        for number, at_ns, kind, name, group_id, seq in self._elsewhere:
            if np.isinf(self._arrived_ns[number]):
                entry = open_entry(kind, name, step=self._job.step)
                entry["start_ns"] = int(self._unix_ns(at_ns, np.int64(number)))
                opened[number].append(entry | {"group_id": f"{group_id:016x}", "seq": seq})
        return self._table(columns, tuple(names)), opened

    def _instance(
        self, lane: _Lane
    ) -> tuple[NDArray[np.uint64], NDArray[np.int64], NDArray[np.int64]]:
        """Return group, source and destination of an operation, shape (dp, tp) each."""
        rank, none = self._rank[lane.stage], np.full(self._rank[lane.stage].shape, NONE)
        if lane.op.do in COLLECTIVES:
            return self._ids[lane.op.do][lane.stage], none, none
        if lane.op.do not in {Do.SEND, Do.RECV}:
            return np.zeros(rank.shape, dtype=np.uint64), none, none
        peer = self._rank[lane.op.peer]
        sides = (rank, peer) if lane.op.do is Do.SEND else (peer, rank)
        return self._ids[Do.SEND][lane.stage], *sides

    def _unix_ns(
        self, times: Times | float, rank: NDArray[np.int64] | np.int64
    ) -> NDArray[np.int64]:
        """Return times as the clocks of the ranks' hosts read them."""
        offset_ns = np.zeros(self._job.world_size // self._job.ranks_per_host)
        for host, error_ns in self._hang.offset_ns.items():
            offset_ns[host] = error_ns
        own = offset_ns[rank // self._job.ranks_per_host]
        return (
            STARTED_NS
            + np.where(np.isfinite(times), times, 0.0).astype(np.int64)
            + own.astype(np.int64)
        )

    def _table(
        self, columns: dict[str, list[NDArray[np.int64]]], names: tuple[str, ...]
    ) -> SpanTable:
        dtypes = dict.fromkeys(("start_ns", "duration_ns", "seq"), "int64")
        dtypes |= {"group_id": "uint64", "kind": "int8", "depth": "int16"}
        whole = {
            name: np.concatenate(parts).astype(dtypes.get(name, "int32"))
            for name, parts in columns.items()
        }
        order = np.lexsort((whole["start_ns"], whole["rank"]))
        whole = {name: column[order] for name, column in whole.items()}
        num = len(order)
        return make_span_table(
            names=names,
            tracks=("main",),
            epoch=np.zeros(num, dtype=np.int32),
            step=np.full(num, self._job.step, dtype=np.int32),
            track=np.zeros(num, dtype=np.int32),
            launch_ns=whole["start_ns"],
            flags=np.zeros(num, dtype=np.uint16),
            **whole,
        )

    def _finished_steps(self) -> StepTable:
        rank = np.flatnonzero((self._arrived_ns > 0) & (self._job.step > 0))
        num, zero = len(rank), np.zeros(len(rank))
        end_ns = self._unix_ns(zero, rank)
        return StepTable(
            epoch=np.zeros(num, dtype=np.int32),
            step=np.full(num, self._job.step - 1, dtype=np.int32),
            rank=rank.astype(np.int32),
            start_ns=end_ns - int(2 * SECOND),
            end_ns=end_ns,
            num_tokens=np.full(num, 8192, dtype=np.int64),
            loss=np.full(num, np.nan),
            left_out=np.zeros(num, dtype=np.uint32),
        )

    def _event_rows(self) -> Iterator[dict[str, object]]:
        """Yield the rows of table ``events`` that have arrived."""
        job, hang = self._job, self._hang
        halted = {halt.rank for halt in hang.halts}
        has_stack = self._rng.random(job.world_size) < hang.stack_share
        self.has_stacks = all(has_stack[rank] for rank in halted)
        now_ns = self.hung_ns + STALLED_NS
        for rank in np.flatnonzero(np.isinf(self._arrived_ns) & (self._arrived_ns > 0)).tolist():
            spans = self._open.get(rank, [])
            if rank in hang.dead_ranks:
                at_ns = int(self._unix_ns(hang.at_ns, np.int64(rank)))
                data = {"step": job.step, "open": spans, "exit_code": SIGKILL, "at_error_ns": 0}
                yield event_row(rank, "lost", at_ns, {**data, "recorded_ns": at_ns})
                continue
            if spans:
                at_ns = max(int(str(span["start_ns"])) for span in spans)
                yield event_row(rank, "stalled", at_ns, {"step": job.step, "open": spans})
            if has_stack[rank]:
                frames = _frames_of(spans, is_waiting=rank in self._untraced)
                frames = hang.frames if rank in halted else frames
                main = {"name": "MainThread", "frames": [*frames, *LOOP]}
                if rank in halted and hang.call:
                    main["call"] = hang.call
                data = {
                    "step": job.step,
                    "elapsed_ns": int(STALLED_NS),
                    "threads": [main, *OTHER_THREADS],
                }
                at_ns = int(self._unix_ns(now_ns, np.int64(rank)))
                yield event_row(rank, "stack", at_ns, data)

    def _exits(self) -> tuple[RankExit, ...]:
        """Return the ends of processes, the earliest first."""
        hang, exits = self._hang, []
        for rank in sorted(hang.dead_ranks) if hang.is_killed else ():
            at_ns = int(self._unix_ns(hang.at_ns, np.int64(rank)))
            exits.append(
                RankExit(
                    epoch=0,
                    rank=rank,
                    state="lost",
                    at_ns=at_ns,
                    step=self._job.step,
                    recorded_ns=at_ns,
                    exit_code=SIGKILL,
                )
            )
        if hang.has_timed_out:
            late = self.hung_ns + TIMEOUT_NS + self._rng.uniform(0, SECOND, self._job.world_size)
            for rank in sorted(
                set(self._open) - hang.dead_ranks - {halt.rank for halt in hang.halts}
            ):
                at_ns = int(self._unix_ns(late[rank], np.int64(rank)))
                exits.append(
                    RankExit(
                        epoch=0,
                        rank=rank,
                        state="failed",
                        at_ns=at_ns,
                        step=self._job.step,
                        exception="torch.distributed.DistBackendError",
                        message=WATCHDOG,
                    )
                )
        return tuple(sorted(exits, key=lambda ended: ended.at_ns or 0))


def describe(job: Job, hang: Hang) -> RunInfo:
    """Return the description of the run."""
    rank = job.rank
    infos = {
        int(rank[stage, replica, part]): Coords(pp=stage, dp=replica, tp=part)
        for stage, replica, part in np.ndindex(rank.shape)
    }
    ranks = tuple(
        RankInfo(
            rank=number,
            coords=infos[number],
            host=f"node-{number // job.ranks_per_host:04d}",
            local_rank=number % job.ranks_per_host,
            clock=f"node-{number // job.ranks_per_host:04d} boot",
            clock_error_ns=1_000_000,
            device_name="NVIDIA H100 80GB HBM3",
            exit_state="lost" if hang.is_killed and number in hang.dead_ranks else "running",
        )
        for number in range(job.world_size)
        if number not in hang.absent
    )
    ids = group_ids(job)
    groups = [
        GroupInfo(
            group_id=int(ids[Do.WORLD][0, 0, 0]),
            kind="other",
            name="world",
            members=tuple(range(job.world_size)),
        )
    ]
    for stage, part in np.ndindex(job.pp, job.tp):
        members = tuple(sorted(rank[stage, :, part].tolist()))
        groups.append(
            GroupInfo(
                group_id=int(ids[Do.DP][stage, 0, part]),
                kind="dp-comm",
                name=f"dp:{stage}-{part}",
                members=members,
            )
        )
    for stage, replica in np.ndindex(job.pp, job.dp):
        members = tuple(sorted(rank[stage, replica].tolist()))
        groups.append(
            GroupInfo(
                group_id=int(ids[Do.TP][stage, replica, 0]),
                kind="tp-comm",
                name=f"tp:{stage}-{replica}",
                members=members,
            )
        )
    for replica, part in np.ndindex(job.dp, job.tp):
        members = tuple(sorted(rank[:, replica, part].tolist()))
        groups.append(
            GroupInfo(
                group_id=int(ids[Do.SEND][0, replica, part]),
                kind="pp-send",
                name=f"pp:{replica}-{part}",
                members=members,
            )
        )
    return RunInfo(
        run_id=RUN,
        source_format="rankscope",
        layout=Layout(dp=job.dp, tp=job.tp, pp=job.pp),
        world_size=job.world_size,
        epochs=(EpochInfo(epoch=0, ranks=ranks, groups=tuple(groups)),),
        clock_error_ns=2_000_000,
    )


def group_ids(job: Job) -> dict[Do, NDArray[np.uint64]]:
    """Return the groups of each position by what uses them, shape (pp, dp, tp) each."""
    ids = {}
    for do, axes in ((Do.WORLD, (0, 1, 2)), (Do.DP, (1,)), (Do.TP, (2,)), (Do.SEND, (0,))):
        first = job.rank.min(axis=axes, keepdims=True)
        number = np.broadcast_to(first, job.rank.shape).astype(np.uint64)
        ids[do] = number + np.uint64((list(Do).index(do) + 1) << 40)
    return ids


def open_entry(kind: SpanKind, name: str, *, step: int) -> dict[str, object]:
    """Return an open span without a group, as the events have it."""
    return {"name": name, "kind": kind.value, "step": step, "group_id": "0" * 16, "seq": NONE}


def event_row(rank: int, kind: str, at_ns: int, data: dict[str, object]) -> dict[str, object]:
    """Return a row of table ``events``."""
    text = json.dumps(data)
    return {"epoch": 0, "rank": rank, "at_ns": at_ns, "kind": kind, "text": kind, "data": text}


def _frames_of(spans: list[dict[str, object]], *, is_waiting: bool) -> tuple[str, ...]:
    """Return the stack of a rank that waits for others, or is in none of its spans."""
    if not is_waiting and all(span["seq"] == NONE for span in spans):
        return ()
    return (
        f"{LIBRARY}/torch/distributed/distributed_c10d.py:2806 all_reduce",
        f"{LIBRARY}/torch/distributed/c10d_logger.py:81 exception_logging.<locals>.wrapper",
    )


WATCHDOG = (
    "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE,"
    " Timeout(ms)=600000) ran for 600010 milliseconds before timing out."
)
OTHER_THREADS = [
    {
        "name": "Thread-4 (_pin_memory_loop)",
        "frames": [
            "/usr/lib/python3.11/selectors.py:415 PollSelector.select",
            "/usr/lib/python3.11/multiprocessing/connection.py:930 wait",
            f"{LIBRARY}/torch/utils/data/_utils/pin_memory.py:35 do_one_step",
        ],
    }
]
"""Threads beside the main one."""
