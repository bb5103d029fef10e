"""How fast the what-if analysis is: ms per million operations, and against a plain numpy pass.

    python benchmarks/replay.py TRACE.parquet META.yaml [--widen N ...]

Reads a trace in the ByteDance format, repeats its dp ranks, and times the
whole what-if in process (S, S_t, S_dp, S_stage, S_w, M_W, M_S), from columns
in memory to results. The yardstick is one ``np.maximum.reduceat`` over the
same rows, timed in turn with it (A B B A). Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from analysis.bytedance import model_of, read_trace
from analysis.source import EpochInfo, RankInfo, SpanTable
from analysis.whatif import Replayer, what_if
from collector.importers.bytedance import import_bytedance
from collector.store import open_store
from rankscope.source import StoreSource
from tracer.topology import Coords

if TYPE_CHECKING:
    from collections.abc import Callable

    from analysis.source import RunInfo

ROUNDS = 5


def widened(run: RunInfo, spans: SpanTable, times: int) -> tuple[RunInfo, SpanTable]:
    """Repeat every dp position ``times`` times, each copy with ranks of its own."""
    layout, ranks = run.layout, run.epochs[0].ranks
    span = max(info.rank for info in ranks) + 1
    infos = tuple(
        RankInfo(
            rank=info.rank + copy * span,
            coords=Coords(dp=info.coords.dp + copy * layout.dp, pp=info.coords.pp),
        )
        for copy in range(times)
        for info in ranks
    )
    columns = {
        name: np.tile(getattr(spans, name), times)
        for name in spans.__dataclass_fields__
        if name not in ("names", "tracks")
    }
    columns["rank"] += np.repeat(np.arange(times, dtype=np.int32) * span, len(spans))
    wide = replace(layout, dp=layout.dp * times)
    epoch = EpochInfo(epoch=0, ranks=infos)
    run = replace(run, layout=wide, world_size=wide.world_size, epochs=(epoch,))
    return run, SpanTable(**columns, names=spans.names, tracks=spans.tracks)


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that ``work`` took."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(run: RunInfo, spans: SpanTable) -> dict[str, float | list[float]]:
    """Time the what-if and the yardstick in turn."""
    values = spans.duration_ns.astype(np.float64)
    begins = np.arange(0, len(values), 4)

    def whole() -> None:
        what_if(Replayer(model_of(read_trace(run, spans))))

    def yardstick() -> None:
        np.maximum.reduceat(values, begins)

    timed(whole), timed(yardstick)
    ours, plain = [], []
    for _ in range(ROUNDS):
        ours.append(timed(whole))
        plain += [timed(yardstick), timed(yardstick)]
        ours.append(timed(whole))
    ratios = [a / statistics.median(plain) for a in ours]
    return {
        "operations": len(spans),
        "seconds_median": statistics.median(ours),
        "seconds_min": min(ours),
        "seconds_max": max(ours),
        "ms_per_million_operations": statistics.median(ours) * 1e9 / len(spans),
        "multiple_of_reduceat_median": statistics.median(ratios),
        "multiple_of_reduceat_range": [min(ratios), max(ratios)],
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("meta", type=Path)
    parser.add_argument("--widen", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--store", default="chdb:///tmp/rankscope-benchmark")
    args = parser.parse_args()
    store = open_store(args.store)
    import_bytedance(store, args.trace, run_id="benchmark", meta=args.meta)
    source = StoreSource(store)
    run, spans = source.run_info("benchmark"), source.spans("benchmark")
    results = []
    for times in args.widen:
        wide = widened(run, spans, times)
        results.append({"gpus": wide[0].world_size, **measure(*wide)})
    machine = {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    print(json.dumps({"machine": machine, "trace": args.trace.name, "results": results}, indent=2))


if __name__ == "__main__":
    main()
