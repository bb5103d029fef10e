"""Cost of one host span, relative to two clock reads and a list append.

    python benchmarks/tracer_host_span.py [--json FILE]

Cases are interleaved in rounds in the order A B B A, so that a change of the machine's speed
affects all of them. The unit is two clock reads and a list append; a ratio is taken within each
round, and the result is its median with the 95 % interval of the median. An empty loop is
subtracted. Garbage collection stays on. Times are CPU times of the thread, which other programs do
not change.

Three cases are lower bounds: a `with` block over two functions that do nothing (compiled ones, if
the tracer's are), one over two closures that read the clock, and one that appends the two readings
and a name to a list. A disabled span cannot cost less than the first. The cost of a Python span
beyond the third pays for a record that survives `kill -9`, step and nesting, threads, exceptions,
and a full disk: see docs/decisions/0050-span-cost.md.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scipy import stats

from rankscope import tracer
from rankscope.tracer.install import make_spool_identity
from rankscope.tracer.job.identity import read_identity
from rankscope.tracer.record.current import current_tracer, set_current
from rankscope.tracer.record.interface import NOOP_SPAN, NOOP_TRACER
from rankscope.tracer.record.recorder import Recorder
from rankscope.tracer.record.segment_pool import SpoolLimits
from rankscope.tracer.spool import read_anchor

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankscope.tracer.record.interface import Tracer

ROUNDS = 60
CALLS = 2_000
UNIT = "two clock reads + append"

FULL: list[Tracer] = []
"""The tracer with a full quota, created by `main`."""


def empty(calls: int) -> None:
    """Run the empty loop."""
    for _ in range(calls):
        pass


def unit(calls: int) -> None:
    """Read the clock twice and append to a list."""
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
    """Record spans that are also in the open table."""
    span = tracer.span
    for _ in range(calls):
        with span("top"):
            pass


def dropped(calls: int) -> None:
    """Record spans beyond the quota."""
    present = current_tracer()
    set_current(FULL[0])
    span = tracer.span
    for _ in range(calls):
        with span("inner"):
            pass
    set_current(present)


def block_of(enter: Callable[[], None], leave: Callable[..., None]) -> Any:  # noqa: ANN401
    """Return the cheapest context manager with these two functions."""
    return type("Block", (), {"__enter__": staticmethod(enter), "__exit__": staticmethod(leave)})()


def floor_nothing(calls: int) -> None:
    """Enter and leave an existing context manager that does nothing: the cost of ``with``."""
    block = NOOP_SPAN
    for _ in range(calls):
        with block:
            pass


def floor_clock(calls: int) -> None:
    """Enter and leave two closures that read the clock."""
    clock = time.monotonic_ns
    start_ns = 0

    def enter() -> None:
        nonlocal start_ns
        start_ns = clock()

    def leave(exc_type: object, exc: object, traceback: object) -> None:
        clock()

    block = block_of(enter, leave)
    for _ in range(calls):
        with block:
            pass


def floor_append(calls: int) -> None:
    """Enter and leave two closures that read the clock and append to a list."""
    clock = time.monotonic_ns
    start_ns = 0
    kept: list[tuple[str, int, int]] = []

    def enter() -> None:
        nonlocal start_ns
        start_ns = clock()

    def leave(exc_type: object, exc: object, traceback: object) -> None:
        kept.append(("inner", start_ns, clock()))

    block = block_of(enter, leave)
    for _ in range(calls):
        with block:
            pass


def disabled(calls: int) -> None:
    """Use spans in a job that is not traced."""
    present = current_tracer()
    set_current(NOOP_TRACER)
    span = tracer.span
    for _ in range(calls):
        with span("untraced"):
            pass
    set_current(present)


def record_function(calls: int) -> None:
    """Use torch's `record_function` without a profiler."""
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
    "span, dropped": dropped,
    "span, disabled": disabled,
    "floor: with, nothing": floor_nothing,
    "floor: closures, two clock reads": floor_clock,
    "floor: and an append": floor_append,
    "record_function": record_function,
}


OF_ENABLED = ("span, disabled", "span, dropped", "floor: with, nothing")
"""Cases that are also compared with an enabled span."""


def measure() -> dict[str, list[float]]:
    """Return ns per call of each case, one value per round."""
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for turn in range(ROUNDS):
        order = list(CASES) if turn % 2 == 0 else list(reversed(CASES))
        for name in order:
            start_ns = time.thread_time_ns()
            CASES[name](CALLS)
            times[name].append((time.thread_time_ns() - start_ns) / CALLS)
    return times


def net_of(times: dict[str, list[float]], name: str) -> list[float]:
    """Return ns per call of a case without the loop, one value per round."""
    return [value - loop for value, loop in zip(times[name], times["loop"], strict=True)]


def ratio_of(times: dict[str, list[float]], name: str, base: str) -> dict[str, object]:
    """Return the median ratio of two cases within a round, with its 95 % interval."""
    pairs = zip(net_of(times, name), net_of(times, base), strict=True)
    ratios = [value / one for value, one in pairs]
    found: Any = stats.quantile_test(ratios, p=0.5).confidence_interval(0.95)
    return {
        "ratio": round(statistics.median(ratios), 2),
        "ratio_95": [round(float(found.low), 2), round(float(found.high), 2)],
    }


def summary(times: dict[str, list[float]]) -> list[dict[str, object]]:
    """Return median ns and the ratio to `UNIT`."""
    return [
        {
            "case": name,
            "median_ns": round(statistics.median(net_of(times, name)), 1),
            **ratio_of(times, name, UNIT),
        }
        for name in list(CASES)[1:]
    ]


def tracer_without_room(folder: Path) -> Tracer:
    """Return a tracer that drops every span."""
    (folder / "full").mkdir()
    recorder = Recorder(
        folder / "full",
        make_spool_identity(read_identity("full", {}), read_anchor()),
        limits=SpoolLimits(spool_bytes=0),
    )
    with contextlib.redirect_stderr(io.StringIO()):  # It logs this once.
        recorder.start()
    return recorder


def main() -> None:
    """Measure, and print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as spool:
        tracer.install(spool=spool, run="benchmark")
        FULL.append(tracer_without_room(Path(spool)))
        measure()  # Warm-up: names are interned, code is specialised, segments are mapped.
        times = measure()
        FULL.pop().shutdown()
        tracer.shutdown()
    import torch

    rows = summary(times)
    of_enabled = {name: ratio_of(times, name, "span, nested") for name in OF_ENABLED}
    document = {
        "machine": f"{platform.machine()}, {cpu_name()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "rounds": ROUNDS,
        "calls": CALLS,
        "rows": rows,
        "of_an_enabled_span": of_enabled,
    }
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{document['machine']}; Python {document['python']}, torch {document['torch']}")
    for row in rows:
        print(
            f"{row['case']:34} {row['median_ns']:8} ns {row['ratio']:7} x  95 % {row['ratio_95']}"
        )
    for name, part in of_enabled.items():
        print(f"{name + ' / enabled':34} {'':11} {part['ratio']:7} x  95 % {part['ratio_95']}")


def cpu_name() -> str:
    """Return the name of the processor, from the kernel."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


if __name__ == "__main__":
    main()
