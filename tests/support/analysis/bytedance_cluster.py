"""Small job in the ByteDance format without host times or noise: 1F1B, one rank per (dp, stage)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from rankscope.analysis.readers.bytedance.format import TraceColumns
from rankscope.analysis.trace.tables import RankInfo
from rankscope.tracer.topology import Coords, Layout
from tests.support.analysis.bytedance_files import source_of
from tests.support.analysis.bytedance_jobs import Job
from tests.support.analysis.cluster import MS
from tests.support.analysis.tables import one_epoch

if TYPE_CHECKING:
    from tests.support.analysis.bytedance_jobs import ComputeTime
    from tests.support.analysis.cluster import Source

LATENCY = MS // 4
"""Time of each transfer, and of each collective after its last member entered."""


@dataclass
class ByteDanceCluster:
    """A job whose computes take ``compute_ns(dp, stage, step, microbatch, is_forward)``."""

    dp: int
    pp: int
    num_microbatches: int
    compute_ns: ComputeTime
    tp: int = 1
    rows: list[tuple[int, int, int, str, int, int, int, int]] = field(default_factory=list)
    """(dp, stage, step, type, start, duration, seq, microbatch)."""

    def run(self, steps: list[int]) -> ByteDanceCluster:
        job = Job(
            dp=self.dp,
            pp=self.pp,
            tp=self.tp,
            microbatches=(self.num_microbatches,) * len(steps),
            steps=tuple(steps),
            batched=False,
            latency_ns=LATENCY,
            jitter=0.0,
            host_factor=0.0,
            dp_factor=1.0,
            compute_ns=self.compute_ns,
        )
        begin, last, end = 0, None, 0
        for row in job.rows():
            if row["step"] != last:
                begin, last = end + MS if self.rows else 0, row["step"]
            start = begin + row["start"]
            end = max(end, begin + row["end"])
            at = row["dp"], row["stage"], row["step"], row["type"]
            self.rows.append((*at, start, row["end"] - row["start"], row["seq"], row["seq"]))
        return self

    def rank(self, dp: int, stage: int) -> int:
        return (stage * self.dp + dp) * self.tp

    def source(self) -> Source:
        rows = sorted(self.rows, key=lambda row: (row[2], row[0], row[1], row[4]))
        dp, stage, step, name, start, duration, seq, mb = map(list, zip(*rows, strict=True))
        names = tuple(sorted(set(name)))
        layout = Layout(dp=self.dp, pp=self.pp, tp=self.tp)
        columns = TraceColumns(
            step=np.array(step, np.int32),
            rank=np.array([self.rank(d, s) for d, s in zip(dp, stage, strict=True)], np.int32),
            name=np.array([names.index(text) for text in name], np.int32),
            start_ns=np.array(start, np.int64),
            duration_ns=np.array(duration, np.int64),
            seq=np.array(seq, np.int64),
            chunk=np.zeros(len(rows), np.int32),
            names=names,
        )
        workers = [(self.rank(d, s), d, s) for d in range(self.dp) for s in range(self.pp)]
        ranks = [RankInfo(rank=r, coords=Coords(dp=d, pp=s)) for r, d, s in sorted(workers)]
        info = one_epoch("tiny", layout, ranks, source_format="bytedance")
        return source_of(info, columns, microbatch=np.array(mb, np.int32))
