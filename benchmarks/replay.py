"""Time of `rankscope import` and `rankscope analyze` of a trace, and of its what-if in process.

    python -m benchmarks.replay TRACE.parquet META.yaml [--widen N ...] [--in-process]

Reads a trace in the ByteDance format, repeats its data-parallel ranks, writes that to a file, and
times the two commands that a user types as whole processes, each round with a new store: wall
clock, CPU time and peak memory. With ``--in-process`` it times all what-if scenarios (S, S_t, S_dp,
S_stage, S_w, M_W, M_S) in process, from columns in memory to results; the yardstick is one
``np.maximum.reduceat`` over the same rows, in the order A B B A. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from rankscope.analysis.readers.bytedance.format import TraceColumns
from rankscope.analysis.readers.bytedance.what_if import what_if_trace
from rankscope.analysis.trace.tables import EpochInfo, RankInfo
from rankscope.sources.bytedance_file import read_trace_file
from rankscope.tracer.topology import Coords

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankscope.analysis.trace.tables import RunInfo

ROUNDS = 5
COMMANDS = {
    "import": "import {trace} --meta {meta} --format bytedance --run wide --store {store}",
    "analyze": "analyze wide --json --store {store}",
}
"""The commands, in their order."""


def widened(run: RunInfo, columns: TraceColumns, times: int) -> tuple[RunInfo, TraceColumns]:
    """Repeat every data-parallel position ``times`` times, each copy with new ranks."""
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
    held = {
        name: np.tile(getattr(columns, name), times)
        for name in columns.__dataclass_fields__
        if name != "names"
    }
    copies = np.repeat(np.arange(times, dtype=np.int32), len(columns.rank))
    held["rank"] = held["rank"].astype(np.int32) + copies * span
    wide = replace(layout, dp=layout.dp * times)
    epoch = EpochInfo(epoch=0, ranks=infos)
    run = replace(run, layout=wide, world_size=wide.world_size, epochs=(epoch,))
    return run, TraceColumns(**held, names=columns.names)


def write_widened(trace: Path, meta: Path, times: int, folder: Path) -> tuple[Path, Path]:
    """Write the trace with all data-parallel positions repeated, and its meta file."""
    table, sizes = pq.read_table(trace), yaml.safe_load(meta.read_text())
    span = int(table["rank"].to_numpy().max()) + 1
    copies = []
    for copy in range(times):
        wide = table
        for name, shift in (("dp_rank", sizes["dp_size"] * copy), ("rank", span * copy)):
            shifted = pa.array(table[name].to_numpy().astype(np.int32) + np.int32(shift))
            wide = wide.set_column(wide.schema.get_field_index(name), name, shifted)
        copies.append(wide)
    sizes |= {"dp_size": sizes["dp_size"] * times, "world_size": sizes["world_size"] * times}
    pq.write_table(pa.concat_tables(copies), folder / "wide.parquet")
    (folder / "wide.yaml").write_text(yaml.safe_dump(sizes))
    return folder / "wide.parquet", folder / "wide.yaml"


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the children that it waited for."""
    usages = [resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return the seconds of ``work`` and its CPU time, which differ on a busy machine."""
    begin, cpu_begin = time.perf_counter(), cpu_seconds()
    work()
    return time.perf_counter() - begin, cpu_seconds() - cpu_begin


def spread(taken: list[tuple[float, float]], operations: int) -> dict[str, float]:
    """Return median and range, and the median per million operations."""
    seconds = [wall for wall, _ in taken]
    return {
        "seconds_median": statistics.median(seconds),
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "cpu_seconds_median": statistics.median(cpu for _, cpu in taken),
        "ms_per_million_operations": statistics.median(seconds) * 1e9 / operations,
    }


def measure(run: RunInfo, columns: TraceColumns) -> dict[str, Any]:
    """Time the what-if analysis and the yardstick in turn."""
    values = columns.duration_ns.astype(np.float64)
    begins = np.arange(0, len(values), 4)

    def whole() -> None:
        what_if_trace(run, columns)

    def yardstick() -> None:
        np.maximum.reduceat(values, begins)

    timed(whole), timed(yardstick)
    ours, plain = [], []
    for _ in range(ROUNDS):
        ours.append(timed(whole))
        plain += [timed(yardstick), timed(yardstick)]
        ours.append(timed(whole))
    yardstick_seconds = statistics.median(wall for wall, _ in plain)
    ratios = [wall / yardstick_seconds for wall, _ in ours]
    return {
        "operations": len(values),
        **spread(ours, len(values)),
        "multiple_of_reduceat_median": statistics.median(ratios),
        "multiple_of_reduceat_range": [min(ratios), max(ratios)],
    }


def run_command(line: str) -> tuple[float, float, float, str]:
    """Run a command of rankscope; return its seconds, CPU seconds, peak in bytes, and output."""
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "rankscope", *line.split()],
            stdout=output,
            stderr=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - begin
        output.seek(0)
        found = output.read()
    if child.returncode:
        raise RuntimeError(f"rankscope {line} ended with {child.returncode}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024.0, found


def measure_commands(trace: Path, meta: Path, times: int, rounds: int) -> dict[str, Any]:
    """Time the commands, in new processes and with a new store in each round."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    peaks, output = dict.fromkeys(COMMANDS, 0.0), ""
    with tempfile.TemporaryDirectory() as folder:
        wide, sizes = write_widened(trace, meta, times, Path(folder))
        for number in range(rounds):
            store = f"chdb://{folder}/store-{number}"
            for name, line in COMMANDS.items():
                wall, cpu, peak, output = run_command(
                    line.format(trace=wide, meta=sizes, store=store)
                )
                taken[name].append((wall, cpu))
                peaks[name] = max(peaks[name], peak)
        report = json.loads(output)
    operations = report["num_spans"]
    taken["both"] = [
        (one[0] + other[0], one[1] + other[1])
        for one, other in zip(taken["import"], taken["analyze"], strict=True)
    ]
    return {
        "operations": operations,
        "slowdown": report["slowdown"],
        **{name: spread(seconds, operations) for name, seconds in taken.items()},
        "peak_bytes": peaks,
    }


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("meta", type=Path)
    parser.add_argument("--widen", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--in-process", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    run, columns = read_trace_file(args.trace, args.meta)
    results = []
    for times in args.widen:
        found: dict[str, Any] = {"gpus": run.world_size * times}
        if args.in_process:
            found["in_process"] = measure(*widened(run, columns, times))
        else:
            found["commands"] = measure_commands(args.trace, args.meta, times, args.rounds)
        results.append(found)
    machine = {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    print(json.dumps({"machine": machine, "trace": args.trace.name, "results": results}, indent=2))


if __name__ == "__main__":
    main()
