"""Latency, outage and memory of the data path from the ranks to a query.

    python -m benchmarks.data_path [--rate 64000] [--seconds 60] [--outage 20] [--ranks 8]
                                   [--json FILE] [--folder DIR]

Four processes, as on a small cluster: a generator that writes into the spool of ``--ranks`` ranks
at a constant rate, `rankscope agent`, `rankscope serve --only collector` on an embedded store, and
this one, which queries the newest row of each rank every half second.

* *latency*: a row is visible at the first query that finds a row of its rank that is as new or
  newer, for the slowest rank; its latency is the time of that query minus the end of the row. The
  result is percentiles over rows, and includes up to half a second until the next query.
* *outage*: after a third of the time the collector is killed with -9 and started again ``--outage``
  seconds later. *drained* is the time from then until the newest rows are as recent as before.
* *memory*: the largest resident set of agent and collector (with its decoders) before and after the
  outage began, and in each minute; the slope of the medians per minute with its
  interval; the collector's memory without file pages and decoders.
* at the end: rows stored, and duplicates in the result of a query.
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
"""Minutes until caches are filled and each code path has run; the last minute is incomplete."""

LATE_S = 5.0
"""Largest age of the newest rows in normal operation."""

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
"""One bitmap per segment, 8 KiB each: a set of all rows would take 3 GB at 100 million rows."""

SIZE = """
SELECT sum(bytes_on_disk) / sum(rows) AS num_bytes FROM system.parts
WHERE active AND table = 'spans'
"""


class _Writer:
    """Writer of the records of one rank."""

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
        """Write records for the time from ``begin_ns`` to ``end_ns``, monotonic clock."""
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
        """End the rank and return the number of records."""
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
    """Write ``rate`` records per second for some time, and print their number."""
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


@dataclass(slots=True)
class Looks:
    """Results of the queries, one element per query."""

    at_ns: list[int] = field(default_factory=list)
    """Unix time."""

    newest_ns: list[int] = field(default_factory=list)
    """Newest row of the rank that is furthest behind."""

    agent_bytes: list[int] = field(default_factory=list)
    collector_bytes: list[int] = field(default_factory=list)
    own_bytes: list[int] = field(default_factory=list)
    """Memory of the collector without file pages and decoders: the pages of its code are loaded
    when they are first used."""

    memory_at_s: list[float] = field(default_factory=list)
    """Time since the start, of each of the two above."""


class Bench(WholePath):
    """The processes of the data path, and queries on their result."""

    def begin(self, rate: int, seconds: float, num_ranks: int) -> None:
        """Start the generator."""
        self.rate, self.num_ranks = rate, num_ranks
        values = {"generate": self.spool, "rate": rate, "seconds": seconds, "ranks": num_ranks}
        flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]
        self.generator = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.data_path", *flags],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.looks = Looks()
        self.seen_step = 0
        self.began_s = time.monotonic()

    def look(self) -> float | None:
        """Query once and return the age of the newest rows in s, None without an answer."""
        time.sleep(LOOK_S)
        answer = self.query(NEWEST.replace("{step}", str(self.seen_step)))
        self._note_memory()
        if not answer:
            return None
        rows = [json.loads(line) for line in answer.splitlines()]
        if len(rows) < self.num_ranks:
            return None
        newest = min(int(row["newest"]) for row in rows)
        # All ranks have rows up to here: the next query reads only newer ones.
        self.seen_step = min(int(row["last_step"]) for row in rows)
        now = time.time_ns()
        self.looks.at_ns.append(now)
        self.looks.newest_ns.append(newest)
        return (now - newest) / 1e9

    def query(self, sql: str) -> str | None:
        """Query the server; None if it does not answer."""
        server = read_server_file(self.store)
        if server is None or server.token is None:
            return None
        return self.ask("/", sql, **{"X-ClickHouse-Key": server.token})

    def span_bytes(self) -> float:
        """End both processes and return the bytes per span on disk, without further merges."""
        self.end("agent")
        self.end("collector")
        with open_store(f"chdb://{self.store}") as store:
            return float(store.rows(SIZE)[0]["num_bytes"])

    def _note_memory(self) -> None:
        for name, readings in (
            ("agent", self.looks.agent_bytes),
            ("collector", self.looks.collector_bytes),
        ):
            readings.append(_resident_bytes(self.pid_of(name)))
        self.looks.own_bytes.append(_own_bytes(self.pid_of("collector")))
        self.looks.memory_at_s.append(time.monotonic() - self.began_s)


def _resident_bytes(pid: int) -> int:
    """Return the resident set of a process and its children; 0 if it has ended."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        return sum(one.memory_info().rss for one in family)
    except psutil.Error:
        return 0


def _own_bytes(pid: int) -> int:
    """Return the memory of a process without file pages; 0 if it has ended."""
    try:
        memory = psutil.Process(pid).memory_info()
        return int(memory.rss - memory.shared)
    except psutil.Error:
        return 0


def latencies_s(looks: Looks) -> dict[str, float]:
    """Return percentiles of the latency; every moment has the same weight."""
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

    A merge of large parts takes memory while it runs; a leak also shows between merges.
    """
    minutes = (np.array(looks.memory_at_s) // 60).astype(int)
    return {
        name: [int(np.quantile(np.array(readings)[minutes == k], share)) >> 20
               for k in np.unique(minutes)]
        for name, readings in (
            ("agent", looks.agent_bytes),
            ("collector", looks.collector_bytes),
            ("collector_own", looks.own_bytes),
        )
    }  # fmt: skip


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark and return its result."""
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
        name: slope(readings[SETTLED_MINUTES:-1])
        for name, readings in result["median_mib_by_minute"].items()
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
    """Kill the collector for some time; return the time until the backlog is stored."""
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
    """Run with the flags of the command line and print the result as JSON."""
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
