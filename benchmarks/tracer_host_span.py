"""What one host span costs, next to what it replaces.

    python benchmarks/tracer_host_span.py [--json]

Cases are interleaved in rounds, forwards and backwards in turn (A B B A), so that a machine
that slows down slows all of them. The unit is two clock reads and a list append; a ratio is
taken within each round, and its median and quartiles are told. A loop without a body is
subtracted. Garbage collection stays on. Times are CPU times of the thread, so that a neighbour
on a shared machine is not measured too.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import tracer
from tracer.current import current_tracer, set_current
from tracer.noop import NOOP_TRACER

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDS = 60
CALLS = 2_000
UNIT = "two clock reads + append"


def empty(calls: int) -> None:
    """Loop only."""
    for _ in range(calls):
        pass


def unit(calls: int) -> None:
    """Do by hand what a span must do at the very least."""
    clock, kept = time.monotonic_ns, []
    for _ in range(calls):
        start_ns = clock()
        kept.append((start_ns, clock()))


def nested(calls: int) -> None:
    """Record spans inside another."""
    span = tracer.span
    with span("outer"):
        for _ in range(calls):
            with span("inner"):
                pass


def top_level(calls: int) -> None:
    """Record spans that also stand in the open table while they last."""
    span = tracer.span
    for _ in range(calls):
        with span("top"):
            pass


def disabled(calls: int) -> None:
    """Ask for spans of a job that is not traced."""
    present = current_tracer()
    set_current(NOOP_TRACER)
    span = tracer.span
    for _ in range(calls):
        with span("nobody"):
            pass
    set_current(present)


def record_function(calls: int) -> None:
    """Do the same by torch, without a profiler."""
    import torch

    make = torch.autograd.profiler.record_function
    for _ in range(calls):
        with make("inner"):
            pass


CASES: dict[str, Callable[[int], None]] = {
    "loop": empty,
    UNIT: unit,
    "span, nested": nested,
    "span, top level": top_level,
    "span, disabled": disabled,
    "record_function": record_function,
}


def measure() -> dict[str, list[float]]:
    """Return ns per call of each case, one value a round."""
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for turn in range(ROUNDS):
        order = list(CASES) if turn % 2 == 0 else list(reversed(CASES))
        for name in order:
            start_ns = time.thread_time_ns()
            CASES[name](CALLS)
            times[name].append((time.thread_time_ns() - start_ns) / CALLS)
    return times


def summary(times: dict[str, list[float]]) -> list[dict[str, object]]:
    """Return median ns and the ratio to `UNIT` with its quartiles, loop taken off."""
    rows: list[dict[str, object]] = []
    for name in list(CASES)[1:]:
        net = [value - loop for value, loop in zip(times[name], times["loop"], strict=True)]
        base = [value - loop for value, loop in zip(times[UNIT], times["loop"], strict=True)]
        ratios = [value / one for value, one in zip(net, base, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "case": name,
                "median_ns": round(statistics.median(net), 1),
                "ratio": round(middle, 2),
                "ratio_quartiles": [round(low, 2), round(high, 2)],
            }
        )
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as spool:
        tracer.install(spool=spool, run="benchmark")
        measure()  # warm: names interned, code specialised, segments touched
        rows = summary(measure())
        tracer.shutdown()
    import torch

    document = {
        "machine": f"{platform.machine()}, {cpu_name()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "rounds": ROUNDS,
        "calls": CALLS,
        "rows": rows,
    }
    if options.json:
        json.dump(document, sys.stdout, indent=1)
        sys.stdout.write("\n")
        return
    print(f"{document['machine']}; Python {document['python']}, torch {document['torch']}")
    for row in rows:
        print(
            f"{row['case']:26} {row['median_ns']:8} ns"
            f" {row['ratio']:7} x  quartiles {row['ratio_quartiles']}"
        )


def cpu_name() -> str:
    """Return the processor's name as the kernel tells it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


if __name__ == "__main__":
    main()
