"""Small cluster that writes the ByteDance format: 1F1B, one rank per (dp, stage).

It is independent of the analysis. A compute begins when the one before it and its receive have
ended. A transfer ends on both sides a latency after both have arrived, a data-parallel collective
a latency after its last member entered.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rankscope.analysis.readers.bytedance.format import TraceColumns
from rankscope.analysis.trace.tables import EpochInfo, RankInfo, RunInfo
from rankscope.tracer.topology import Coords, Layout
from tests.support.analysis.bytedance_files import source_of
from tests.support.analysis.cluster import MS

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.analysis.cluster import Source

LATENCY = MS // 4


@dataclass
class _Worker:
    dp: int
    stage: int
    now: int
    todo: deque[tuple[str, int]]
    recv_posted: int = 0
    computed: int = 0


@dataclass
class ByteDanceCluster:
    """A cluster whose computes take ``compute_ns(dp, stage, step, microbatch, is_forward)``."""

    dp: int
    pp: int
    num_microbatches: int
    compute_ns: Callable[[int, int, int, int, bool], float]
    tp: int = 1
    rows: list[tuple[int, int, int, str, int, int, int, int]] = field(default_factory=list)
    """(dp, stage, step, type, start, duration, seq, microbatch)."""

    def run(self, steps: list[int]) -> ByteDanceCluster:
        begin = 0
        for step in steps:
            begin = self._step(step, begin) + MS
        return self

    def rank(self, dp: int, stage: int) -> int:
        return (stage * self.dp + dp) * self.tp

    def _order(self, stage: int) -> deque[tuple[str, int]]:
        warm_up = min(self.pp - stage - 1, self.num_microbatches)
        order = [("forward", mb) for mb in range(warm_up)]
        for mb in range(self.num_microbatches - warm_up):
            order += [("forward", warm_up + mb), ("backward", mb)]
        order += [
            ("backward", mb) for mb in range(self.num_microbatches - warm_up, self.num_microbatches)
        ]
        return deque(order)

    def _step(self, step: int, begin: int) -> int:
        workers = [
            _Worker(dp, stage, begin, self._order(stage))
            for dp in range(self.dp)
            for stage in range(self.pp)
        ]
        if self.dp > 1:
            self._collective(workers, step, "params-all-gather", by="stage")
        for worker in workers:
            worker.recv_posted = worker.now
        sent: dict[tuple[int, int, str, int], int] = {}
        while any(worker.todo for worker in workers):
            if not sum(self._compute(worker, step, sent) for worker in workers):
                raise RuntimeError("deadlock")
        for worker in workers:
            self._serial(worker, step, "gc", 1000)
            self._serial(worker, step, "layernorm-grads-all-reduce", LATENCY)
        if self.pp > 1:
            ends = [worker for worker in workers if worker.stage in (0, self.pp - 1)]
            self._collective(ends, step, "embedding-grads-all-reduce", by="dp")
        if self.dp > 1:
            self._collective(workers, step, "grads-reduce-scatter", by="stage")
        self._collective(workers, step, "optimizer-clip-main-grad", by="")
        for worker in workers:
            self._serial(worker, step, "optimizer", MS)
        return max(worker.now for worker in workers)

    def _compute(
        self, worker: _Worker, step: int, sent: dict[tuple[int, int, str, int], int]
    ) -> bool:
        """Run the worker's next compute if its input was sent; return whether it ran."""
        if not worker.todo:
            return False
        kind, mb = worker.todo[0]
        forward = kind == "forward"
        source = worker.stage - 1 if forward else worker.stage + 1
        if 0 <= source < self.pp:
            key = (worker.dp, source, kind, mb)
            if key not in sent:
                return False
            arrived = max(sent[key], worker.recv_posted) + LATENCY
            self._row(worker, step, f"{kind}-recv", worker.recv_posted, arrived, mb)
            sender = _Worker(worker.dp, source, 0, deque())
            self._row(sender, step, f"{kind}-send", sent[key], arrived, mb)
            worker.now = max(worker.now, arrived)
        start = worker.now
        duration = self.compute_ns(worker.dp, worker.stage, step, mb, forward)
        worker.now += int(duration)
        self._row(worker, step, f"{kind}-compute", start, worker.now, mb)
        worker.recv_posted = worker.now
        if 0 <= worker.stage + (1 if forward else -1) < self.pp:
            sent[worker.dp, worker.stage, kind, mb] = worker.now
        worker.todo.popleft()
        return True

    def _serial(self, worker: _Worker, step: int, name: str, duration: int) -> None:
        self._row(worker, step, name, worker.now, worker.now + duration, 0)
        worker.now += duration

    def _collective(self, workers: list[_Worker], step: int, name: str, *, by: str) -> None:
        groups: dict[int, list[_Worker]] = {}
        for worker in workers:
            groups.setdefault(getattr(worker, by) if by else 0, []).append(worker)
        for members in groups.values():
            end = max(member.now for member in members) + LATENCY
            for member in members:
                self._row(member, step, name, member.now, end, 0)
                member.now = end

    def _row(self, worker: _Worker, step: int, name: str, start: int, end: int, mb: int) -> None:
        self.rows.append((worker.dp, worker.stage, step, name, start, end - start, mb, mb))

    def source(self) -> Source:
        rows = sorted(self.rows, key=lambda row: (row[2], row[0], row[1], row[4]))
        dp, stage, step, name, start, duration, seq, mb = map(list, zip(*rows, strict=True))
        names = tuple(sorted(set(name)))
        rank = np.array([self.rank(d, s) for d, s in zip(dp, stage, strict=True)], np.int32)
        layout = Layout(dp=self.dp, pp=self.pp, tp=self.tp)
        workers = [(self.rank(d, s), d, s) for d in range(self.dp) for s in range(self.pp)]
        columns = TraceColumns(
            step=np.array(step, np.int32),
            rank=rank,
            name=np.array([names.index(text) for text in name], np.int32),
            start_ns=np.array(start, np.int64),
            duration_ns=np.array(duration, np.int64),
            seq=np.array(seq, np.int64),
            chunk=np.zeros(len(rows), np.int32),
            names=names,
        )
        info = RunInfo(
            run_id="tiny",
            source_format="bytedance",
            layout=layout,
            world_size=layout.world_size,
            epochs=(
                EpochInfo(
                    epoch=0,
                    ranks=tuple(
                        RankInfo(rank=r, coords=Coords(dp=d, pp=s)) for r, d, s in sorted(workers)
                    ),
                ),
            ),
        )
        return source_of(info, columns, microbatch=np.array(mb, np.int32))
