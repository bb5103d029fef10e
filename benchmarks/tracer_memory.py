"""Memory, threads and file descriptors of a traced rank.

    python benchmarks/tracer_memory.py [--spans 100000000] [--json FILE]

Two processes do the same: import torch, then loop. One of them is traced, and sealed segments are
removed as by an agent. Resident memory is read from
``/proc/self/smaps_rollup`` and split into the process's own and the mapped segments, which are
shared pages of the spool's file system; both count. Growth is the median reading of the last
quarter of the loop minus that of its second quarter, because single readings vary by a segment.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
NUM_READINGS = 40
NUM_NAMES = 100
MIB = 1 << 20


def resources() -> dict[str, int]:
    """Return memory, threads and file descriptors of this process, from the kernel."""
    fields = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        fields[name] = int(rest.split()[0]) * 1024
    private = fields["Private_Clean"] + fields["Private_Dirty"]
    return {
        "rss_bytes": fields["Rss"],
        "private_bytes": private,
        "num_threads": len(list(Path("/proc/self/task").iterdir())),
        "num_fds": len(list(Path("/proc/self/fd").iterdir())),
    }


def consume(folder: Path, stop: threading.Event) -> None:
    """Remove all but the newest few segments, as an agent does after sending them."""
    while not stop.wait(0.02):
        segments = sorted(folder.rglob("seg-*.rsp"))
        for path in segments[:-3]:
            path.unlink(missing_ok=True)


def agent(folder: Path) -> None:
    """Run `consume` until the standard input closes."""
    stop = threading.Event()
    thread = threading.Thread(target=consume, args=(folder, stop))
    thread.start()
    sys.stdin.read()
    stop.set()
    thread.join()


def job(num_spans: int) -> None:
    """Loop, traced if ``RANKSCOPE_TRACE`` is set, and print readings as JSON."""
    import torch  # As in every rank.

    from rankscope import tracer

    torch.ones(1).add_(1)
    installed = tracer.install()
    names = [f"name {number}" for number in range(NUM_NAMES)]
    span, step = tracer.span, tracer.step
    tracer.begin_steps()
    readings = []
    begun_s = time.monotonic()
    num_done = 0
    for reading in range(NUM_READINGS):
        until = num_spans * (reading + 1) // NUM_READINGS
        while num_done < until:
            for name in names:
                with span(name), span("inner"):
                    pass
            num_done += 2 * NUM_NAMES
            if num_done % (50 * NUM_NAMES) == 0:
                step()
        gc.collect()
        readings.append({"num_spans": num_done, **resources()})
    taken_s = time.monotonic() - begun_s
    account = None
    if installed.enabled:
        from rankscope.tracer.spool import PROCESS_FILE, read_counts

        threading.Event().wait(1.2)  # Two cycles of the background thread.
        (path,) = Path(os.environ["RANKSCOPE_TRACE"]).rglob(PROCESS_FILE)
        found = read_counts(path.read_bytes())
        account = {
            "num_produced": found.num_produced,
            "num_stored": found.num_written,
            "own_cpu_s": round(found.own_cpu_ns / 1e9, 3),
        }
    json.dump({"readings": readings, "taken_s": round(taken_s, 1), "account": account}, sys.stdout)


def run_job(num_spans: int, spool: Path | None) -> dict[str, object]:
    """Run `job` in a new process."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "RANKSCOPE_RUN": "memory"}
    if spool is not None:
        environ["RANKSCOPE_TRACE"] = str(spool)
    done = subprocess.run(
        [sys.executable, __file__, "--job", str(num_spans)],
        env=environ,
        stdout=subprocess.PIPE,
        check=True,
    )
    document: dict[str, object] = json.loads(done.stdout)
    return document


def growth(readings: list[dict[str, int]], field: str) -> float:
    """Return the median of the last quarter minus that of the second."""
    quarter = len(readings) // 4
    second = [reading[field] for reading in readings[quarter : 2 * quarter]]
    last = [reading[field] for reading in readings[-quarter:]]
    return statistics.median(last) - statistics.median(second)


def summary(plain: dict[str, object], traced: dict[str, object]) -> dict[str, object]:
    """Return the difference of traced and untraced."""
    before, after = plain["readings"], traced["readings"]
    assert isinstance(before, list)
    assert isinstance(after, list)
    extra = {
        f"extra_{field}": max(reading[field] for reading in after) - before[-1][field]
        for field in ("rss_bytes", "private_bytes", "num_threads", "num_fds")
    }
    return {
        **extra,
        "growth_rss_bytes": round(growth(after, "rss_bytes")),
        "growth_private_bytes": round(growth(after, "private_bytes")),
        "untraced": before[-1],
        "account": traced["account"],
        "taken_s": traced["taken_s"],
        "readings": after,
    }


def cpu_name() -> str:
    """Return the name of the processor, from the kernel."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def main() -> None:
    """Measure, and print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--spans", type=int, default=100_000_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--agent", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        job(options.job)
        return
    if options.agent is not None:
        agent(options.agent)
        return
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=base) as folder:
        spool = Path(folder)
        plain = run_job(min(options.spans, 1_000_000), None)
        reader = subprocess.Popen(
            [sys.executable, __file__, "--agent", str(spool)], stdin=subprocess.PIPE
        )
        try:
            traced = run_job(options.spans, spool)
        finally:
            reader.communicate()
    import torch

    document = {
        "machine": f"{platform.machine()}, {cpu_name()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "num_spans": options.spans,
        **summary(plain, traced),
    }
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    for name, value in document.items():
        if name not in ("readings", "untraced"):
            shown = f"{value / MIB:.1f} MiB" if name.endswith("_bytes") else value
            print(f"{name:34} {shown}")


if __name__ == "__main__":
    main()
