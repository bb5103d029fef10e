"""From a span's end to a query that shows it: how long it takes, and what an outage does.

    python -m benchmarks.data_path [--rate 64000] [--seconds 60] [--outage 20] [--ranks 8]
                                   [--json FILE] [--folder DIR]

Four processes, as on a small cluster: a generator that writes into the spool of ``--ranks`` ranks
at a steady rate, `rankscope agent`, `rankscope serve --only collector` on an embedded store, and
this one, which asks the server's ClickHouse interface every half second for each rank's newest row.

* *latency*: a row counts as visible at the first look that finds a row of its rank as new or newer,
  for the slowest rank; its latency is that look's time less the row's end. Told as percentiles over
  rows. It holds up to half a second of waiting for the next look.
* *outage*: after a third of the time the collector is killed with -9 and started again ``--outage``
  seconds later. *drained* is the time from then until the newest rows are as new as they were
  before.
* *memory*: the largest resident set of agent and collector (with its decoders) before and after the
  outage began, and in each minute; the slope of the minutes' medians with its interval; the
  collector's own memory apart from pages of files and decoders.
* at the end: rows stored, and rows stored twice as a query shows them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from benchmarks.intervals import slope
from rankscope.collector.spool.records import RECORD
from rankscope.collector.store.location import read_server_file
from rankscope.collector.store.store import open_store
from rankscope.tracer.span import KIND_CODES, NONE, SpanKind
from rankscope.tracer.spool import HAS_COMM, HEADER_BYTES, RECORD_BYTES, RecordType
from tests.faults.cycles import RUN, WholePath
from tests.support.collector.spool_builder import SpoolBuilder, this_host

if TYPE_CHECKING:
    from numpy.typing import NDArray

SEGMENT_ROWS = 65_536
TICK_S = 0.05
LOOK_S = 0.5
STEP_SPANS = 2_000
"""Spans of one rank in one step."""

SETTLED_MINUTES = 3
"""Until caches are filled and each code path was taken; the last minute is not whole."""

LATE_S = 5.0
"""The newest rows may be this old while all is well."""

NEWEST = """
SELECT rank, max(start_ns + duration_ns) AS newest, max(step) AS last_step FROM spans
WHERE step >= {step} GROUP BY rank FORMAT JSONEachRow
"""
NUM_ROWS = "SELECT count() FROM spans FORMAT TSV"
NUM_SEEN = """
SELECT sum(num_rows), sum(num_distinct) FROM (
    SELECT count() AS num_rows, groupBitmap(row) AS num_distinct FROM spans GROUP BY rank, segment
) FORMAT TSV
"""
"""A bitmap a segment, 8 KiB each: a set of all rows takes 3 GB at 100 million."""

SIZE = """
SELECT sum(bytes_on_disk) / sum(rows) AS num_bytes FROM system.parts
WHERE active AND table = 'spans'
"""


# -- the generator, in a process of its own ----------------------------------


class _Writer:
    """Writes one rank's records into its spool."""

    def __init__(self, spool: Path, rank: int, num_ranks: int) -> None:
        self._spool = SpoolBuilder(
            spool,
            run_id=RUN,
            rank=rank,
            world_size=num_ranks,
            capacity=SEGMENT_ROWS,
            anchor_unix_ns=time.time_ns(),
            **this_host(),
        )
        self._names = np.array([self._spool.name(f"operation-{n}") for n in range(64)])
        self._num_written = 0

    def write(self, num: int, begin_ns: int, end_ns: int) -> None:
        """Write records that fill the time from ``begin_ns`` to ``end_ns``, monotonic."""
        while num:
            if self._spool.next_row == SEGMENT_ROWS:
                self._spool.seal()
                self._spool.new_segment()
            count = min(num, SEGMENT_ROWS - self._spool.next_row)
            number = self._num_written + np.arange(count)
            edges = np.linspace(begin_ns, end_ns, count + 1).astype(np.int64)
            self._fill(number, edges)
            self._num_written += count
            num -= count

    def end(self) -> int:
        """Say goodbye; return how many records there are."""
        self._spool.end()
        return self._num_written

    def _fill(self, number: NDArray[Any], edges: NDArray[np.int64]) -> None:
        records = np.zeros(len(number), dtype=RECORD)
        records["type"] = RecordType.SPAN
        records["kind"] = KIND_CODES[SpanKind.TP_COMM]
        records["flags"] = HAS_COMM | 16
        records["name"] = self._names[number % len(self._names)]
        records["start_ns"], records["end_ns"] = edges[:-1], edges[1:]
        records["step"] = number // STEP_SPANS
        records["microbatch"] = number % 8
        records["chunk"] = NONE
        records["track"] = self._names[0]
        records["launch_ns"] = edges[:-1] - 500
        records["group_id"] = 0xABCDEF0123 + number % 4
        records["seq"] = number
        records["src_rank"] = records["dst_rank"] = NONE
        records["num_bytes"] = 1 << 20
        records["interval_id"] = NONE
        place = self._spool.next_row + np.arange(len(number))
        records["commit"] = HEADER_BYTES + place * RECORD_BYTES
        descriptor = os.open(self._spool.segment, os.O_WRONLY)
        try:
            os.pwrite(
                descriptor, records.tobytes(), HEADER_BYTES + self._spool.next_row * RECORD_BYTES
            )
        finally:
            os.close(descriptor)
        self._spool.next_row += len(number)


def generate(spool: Path, *, num_ranks: int, rate: int, seconds: float) -> None:
    """Write ``rate`` records a second for a while; print how many in the end."""
    writers = [_Writer(spool, rank, num_ranks) for rank in range(num_ranks)]
    begin_ns = last_ns = time.monotonic_ns()
    until_ns = begin_ns + int(seconds * 1e9)
    written = 0
    while last_ns < until_ns:
        time.sleep(TICK_S)
        now_ns = time.monotonic_ns()
        due = int(rate * (now_ns - begin_ns) / 1e9) // num_ranks
        for writer in writers:
            writer.write(due - written, last_ns, now_ns)
        written, last_ns = due, now_ns
    print(sum(writer.end() for writer in writers))


# -- the look at it ----------------------------------------------------------


@dataclass(slots=True)
class Looks:
    """What was seen, look by look."""

    at_ns: list[int] = field(default_factory=list)
    """Unix time."""

    newest_ns: list[int] = field(default_factory=list)
    """Of the rank that is furthest behind."""

    agent_bytes: list[int] = field(default_factory=list)
    collector_bytes: list[int] = field(default_factory=list)
    own_bytes: list[int] = field(default_factory=list)
    """The collector's, without pages of files and without its decoders: the program's code comes
    in page by page as it is first used, up to its size."""

    memory_at_s: list[float] = field(default_factory=list)
    """Since the start, of each of the two above."""


class Bench(WholePath):
    """The path, with a generator in front and someone who looks."""

    def begin(self, rate: int, seconds: float, num_ranks: int) -> None:
        """Start the generator."""
        self.rate, self.num_ranks = rate, num_ranks
        told = {"generate": self.spool, "rate": rate, "seconds": seconds, "ranks": num_ranks}
        flags = [word for name, value in told.items() for word in (f"--{name}", str(value))]
        self.generator = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.data_path", *flags],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.looks = Looks()
        self.seen_step = 0
        self.began_s = time.monotonic()

    def look(self) -> float | None:
        """Look once; return how old the newest rows are, in s, None where nothing answers."""
        time.sleep(LOOK_S)
        answer = self.query(NEWEST.replace("{step}", str(self.seen_step)))
        self._note_memory()
        if not answer:
            return None
        rows = [json.loads(line) for line in answer.splitlines()]
        if len(rows) < self.num_ranks:
            return None
        newest = min(int(row["newest"]) for row in rows)
        # Every rank has come so far: a look reads what is new, however long the run.
        self.seen_step = min(int(row["last_step"]) for row in rows)
        now = time.time_ns()
        self.looks.at_ns.append(now)
        self.looks.newest_ns.append(newest)
        return (now - newest) / 1e9

    def query(self, sql: str) -> str | None:
        """Ask the server; None where it does not answer."""
        server = read_server_file(self.store)
        if server is None or server.token is None:
            return None
        return self.ask("/", sql, **{"X-ClickHouse-Key": server.token})

    def span_bytes(self) -> float:
        """End both processes, and return what a span takes on disk, not merged further."""
        self.end("agent")
        self.end("collector")
        with open_store(f"chdb://{self.store}") as store:
            return float(store.rows(SIZE)[0]["num_bytes"])

    def _note_memory(self) -> None:
        for name, told in (
            ("agent", self.looks.agent_bytes),
            ("collector", self.looks.collector_bytes),
        ):
            told.append(_resident_bytes(self.pid_of(name)))
        self.looks.own_bytes.append(_own_bytes(self.pid_of("collector")))
        self.looks.memory_at_s.append(time.monotonic() - self.began_s)


def _resident_bytes(pid: int) -> int:
    """Return what a process and its children hold; 0 where it is gone."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return sum(one.memory_info().rss for one in family)
    except psutil.Error:
        return 0


def _own_bytes(pid: int) -> int:
    """Return what of a process's memory comes from no file; 0 where it is gone."""
    try:
        told = psutil.Process(pid).memory_info()
        return int(told.rss - told.shared)
    except psutil.Error:
        return 0


def latencies_s(looks: Looks) -> dict[str, float]:
    """Return percentiles of how long rows took to show, each stretch of time weighing alike."""
    waits: list[NDArray[np.float64]] = []
    pairs = zip(looks.newest_ns[:-1], looks.newest_ns[1:], looks.at_ns[1:], strict=True)
    for before, after, seen in pairs:
        if after > before:
            ends = np.arange(before, after, 1_000_000)
            waits.append((seen - ends) / 1e9)
    every = np.concatenate(waits) if waits else np.array([np.nan])
    return {name: round(float(np.quantile(every, share)), 3) for name, share in
            (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))}  # fmt: skip


def mib_by_minute(looks: Looks, share: float) -> dict[str, list[int]]:
    """Return a quantile of the resident sets of each minute.

    Merging larger parts takes more memory while it goes on; what leaks is there between merges too.
    """
    minutes = (np.array(looks.memory_at_s) // 60).astype(int)
    return {
        name: [int(np.quantile(np.array(told)[minutes == k], share)) >> 20
               for k in np.unique(minutes)]
        for name, told in (
            ("agent", looks.agent_bytes),
            ("collector", looks.collector_bytes),
            ("collector_own", looks.own_bytes),
        )
    }  # fmt: skip


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark and return its document."""
    parent = options.folder or tempfile.mkdtemp(prefix="rankscope-path-")
    outage_at_s = options.seconds / 3 if options.outage else float("inf")
    result: dict[str, Any] = {}
    with Bench(folder=Path(parent) / "path", chooser=random.Random(0)) as bench:
        bench.begin(options.rate, options.seconds, options.ranks)
        while bench.generator.poll() is None:
            bench.look()
            if time.monotonic() - bench.began_s >= outage_at_s:
                outage_at_s = float("inf")
                result["outage"] = _outage(bench, options.outage)
        num_produced = int((bench.generator.stdout or sys.stdin).read())
        looks = bench.looks
        ended_s = time.monotonic()
        bench.wait_for(lambda: int(bench.query(NUM_ROWS) or "0") >= num_produced)
        result["after_the_end_s"] = round(time.monotonic() - ended_s, 2)
        stored, distinct = map(int, (bench.query(NUM_SEEN) or "0\t0").split())
        result |= {"produced": num_produced, "stored": distinct, "rows_in_the_table": stored}
        result["bytes_a_span"] = round(bench.span_bytes(), 1)
    if not options.outage:
        result["latency_s"] = latencies_s(looks)
        result["peak_mib"] = {
            "agent": max(looks.agent_bytes) >> 20,
            "collector": max(looks.collector_bytes) >> 20,
        }
    result["mib_by_minute"] = mib_by_minute(looks, 1.0)
    result["median_mib_by_minute"] = mib_by_minute(looks, 0.5)
    result["mib_a_minute"] = {
        name: slope(told[SETTLED_MINUTES:-1])
        for name, told in result["median_mib_by_minute"].items()
    }
    result["least_mib_by_minute"] = mib_by_minute(looks, 0.0)
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg(),
        "rate": options.rate,
        "seconds": options.seconds,
        "ranks": options.ranks,
        **result,
    }


def _outage(bench: Bench, seconds: float) -> dict[str, Any]:
    """Kill the collector for a while; say how long it takes until nothing is late any more."""
    looks = bench.looks
    steady = {"latency_s": latencies_s(looks)}
    before = max(looks.agent_bytes), max(looks.collector_bytes)
    num_before = len(looks.agent_bytes)
    bench.kill_only("collector")
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        bench.look()
    began_s = time.monotonic()
    bench.start("collector")
    usual_s = max(steady["latency_s"]["p99"], LOOK_S)
    while (late := bench.look()) is None or late > max(usual_s, 1.0):
        assert bench.generator.poll() is None, "drained too late to see it: give more --seconds"
    return {
        "seconds": seconds,
        "before": steady,
        "drained_s": round(time.monotonic() - began_s, 2),
        "drained_over_outage": round((time.monotonic() - began_s) / seconds, 3),
        "agent_mib": [before[0] >> 20, max(looks.agent_bytes[num_before:]) >> 20],
        "collector_mib": [before[1] >> 20, max(looks.collector_bytes[num_before:]) >> 20],
    }


def main() -> None:
    """Parse the flags, run, and print one JSON document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rate", type=int, default=64_000, help="spans a second, all ranks")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--outage", type=float, default=0.0, help="seconds; 0: none")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--folder", type=Path, help="where spool and store go")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--generate", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.generate is not None:
        generate(
            options.generate, num_ranks=options.ranks, rate=options.rate, seconds=options.seconds
        )
        return
    text = json.dumps(run(options), indent=1)
    if options.json is not None:
        options.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
