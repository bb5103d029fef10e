"""Size of a store that is kept for months, by simulated days: a live run, short runs, and upkeep.

    python -m benchmarks.sixty_days STORE [--days 60] [--keep-runs 45d] [--json FILE] > TABLE.md

Each day a run that lives on stores `STEPS_A_DAY` steps, and `SHORT_RUNS` runs of four ranks come
and go, half of them with a finding; the live run has one every `FINDING_DAYS` days. Rows are
written by the collector's writer, a cut for each rank and step, with its clock set to that day. At
the end of the day the server's upkeep does its turns, by the same clock. Then the table has what is
on the disk, and how long the upkeep and the statements of pages took (`benchmarks.store_scale`, one
call each).

Runs are kept for 45 days by default, not for a year, so that their end is among the 60 days. The
days are the last ones before now, because the engine's own TTL has the clock of the machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from benchmarks.store_scale import statements
from rankscope.collector.arrow_columns import to_numpy
from rankscope.collector.read.findings import StoredFinding, write_findings
from rankscope.collector.retention.deletion import Deletions
from rankscope.collector.retention.ledger_merges import LedgerMerges
from rankscope.collector.retention.retention import Retention
from rankscope.collector.retention.span_days import DAY_NS
from rankscope.collector.spool.cut import Cut, CutKey
from rankscope.collector.spool.descriptions import manifest_row
from rankscope.collector.spool.records import CutRows
from rankscope.collector.store.lease import Lease
from rankscope.collector.store.store import open_store
from rankscope.collector.store.writer import StoreWriter
from rankscope.server.rollups import Rollups
from rankscope.server.upkeep import Upkeep, parse_keep
from rankscope.trainer.simulator.scenario import Scenario
from rankscope.trainer.simulator.simulation import simulate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rankscope.collector.identity import Row
    from rankscope.collector.retention.retention import RetentionPolicy
    from rankscope.collector.store.store import Store
    from rankscope.trainer.simulator.simulation import Simulation
    from rankscope.trainer.simulator.tables import StepTables

LIVE = "live"
STEPS_A_DAY = 12
HOUR_NS, MINUTE_NS = DAY_NS // 24, DAY_NS // 1440
FINDING_DAYS = 9
SHORT_RUNS, SHORT_STEPS = 2, 12
SIZES = {"large": {"dp": 32, "pp": 4, "num_microbatches": 16}, "small": {"dp": 2, "pp": 2}}
"""A step of the live run has 14,336 spans of 128 ranks, enough for a picture."""

OF_CUTS = ("spans", "steps", "microbatches")
SHOWN_DAYS = (1, 3, 5, 10, 20, 30, 35, 40, 45, 50, 55, 60)
SHOWN_TABLES = ("spans", "kept_spans", "pictures", "rollups", "ledger", "samples", "clock", "steps")

SELECT_PARTS = """
SELECT table, sum(bytes_on_disk) AS bytes, sum(rows) AS num_rows, count() AS parts
FROM system.parts WHERE active AND database = currentDatabase() GROUP BY table ORDER BY table
"""


class Clock:
    """Unix and monotonic time of a simulated day."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        """Return the time, ns."""
        return self.now_ns


@dataclass
class Job:
    """A run that is stored step by step."""

    simulation: Simulation
    tables: Iterator[StepTables]
    num_rows: Counter[int] = field(default_factory=Counter)
    """Rows of the current day's segment of each rank."""

    segment: int = 0

    @property
    def run_id(self) -> str:
        """Name of the run."""
        return self.simulation.run_id


def start(writer: StoreWriter, run_id: str, *, size: str, num_steps: int, at_ns: int) -> Job:
    """Store the descriptions of a run that begins, and return it."""
    scenario = Scenario(num_steps=num_steps, started_ns=at_ns, **SIZES[size])  # type: ignore[arg-type]
    simulation = simulate(scenario, run_id=run_id)
    manifests = {row["manifest_hash"]: row for row in _manifests(simulation)}
    ranks = [
        {**row, "manifest_hash": manifest["manifest_hash"], "exit_state": "running"}
        for row, manifest in zip(simulation.rank_rows(), _manifests(simulation), strict=True)
    ]
    writer.upsert("groups", list(simulation.group_rows()))
    writer.upsert("manifests", list(manifests.values()))
    writer.upsert("ranks", ranks)
    _store_run(writer, simulation, state="running", at_ns=at_ns)
    return Job(simulation, simulation.tables())


def _manifests(simulation: Simulation) -> Iterator[dict[str, Any]]:
    for row in simulation.rank_rows():
        yield manifest_row(simulation.run_id, simulation.manifest(row["rank"]))


def _store_run(writer: StoreWriter, simulation: Simulation, *, state: str, at_ns: int) -> None:
    row = simulation.run_row(created_ns=simulation.scenario.started_ns)
    ended_ns = None if state == "running" else at_ns
    run = {**row, "source_format": "rankscope", "state": state, "ended_ns": ended_ns}
    writer.upsert("runs", [{**run, "revision": at_ns}])


def store_steps(writer: StoreWriter, job: Job, times_ns: Iterable[int]) -> None:
    """Store the next steps of a run as if they began at some times: cuts of each rank."""
    cuts: list[Cut] = []
    samples: list[Row] = []
    for at_ns in times_ns:
        more = next_step(job, at_ns=at_ns)
        cuts += more[0]
        samples += more[1]
    writer.ingest(cuts)
    writer.upsert("samples", samples)


def next_step(job: Job, *, at_ns: int) -> tuple[list[Cut], list[Row]]:
    """Return the cuts of the ranks and the samples of the next step, which begins at a time."""
    tables = next(job.tables)
    later_ns = at_ns - int(to_numpy(tables.steps["start_ns"]).min())
    segment = at_ns // DAY_NS
    if segment != job.segment:
        job.segment, job.num_rows = segment, Counter()
    cuts = []
    by_rank = {name: _moved(getattr(tables, name), later_ns) for name in OF_CUTS}
    for rank in range(job.simulation.scenario.world_size):
        end_row = job.num_rows[rank]
        rows = {}
        for name in OF_CUTS:
            of_rank = _of_rank(by_rank[name], rank)
            place = np.arange(end_row, end_row + of_rank.num_rows)
            numbered = {"segment": np.full(of_rank.num_rows, segment), "row": place}
            rows[name] = _with_columns(of_rank, numbered)
            end_row += of_rank.num_rows
        key = CutKey(
            run_id=job.run_id, epoch=0, rank=rank, process=job.simulation.process,
            segment=segment, first_row=job.num_rows[rank], end_row=end_row,
        )  # fmt: skip
        job.num_rows[rank] = end_row
        digest = hashlib.sha256(f"{key}".encode()).hexdigest()
        cut_rows = CutRows(**rows, bad_rows=rows["steps"].slice(0, 0))
        cuts.append(Cut(key=key, sha256=digest, num_torn=0, rows=cut_rows))
    samples = tables.samples.to_pylist()
    return cuts, [{**row, "at_ns": row["at_ns"] + later_ns} for row in samples]


def _moved(table: pa.Table, later_ns: int) -> pa.Table:
    """Return rows later by some time, sorted by rank."""
    table = table.sort_by([("rank", "ascending"), ("row", "ascending")])
    times = {"start_ns", "end_ns", "launch_ns"}.intersection(table.column_names)
    return _with_columns(table, {name: to_numpy(table[name]) + later_ns for name in times})


def _with_columns(table: pa.Table, columns: dict[str, Any]) -> pa.Table:
    for name, values in columns.items():
        place = table.schema.get_field_index(name)
        kind = table.schema.field(place).type
        table = table.set_column(place, name, pa.array(values).cast(kind))
    return table


def _of_rank(table: pa.Table, rank: int) -> pa.Table:
    first, end = np.searchsorted(to_numpy(table["rank"]), (rank, rank + 1)).tolist()
    return table.slice(first, end - first)


def end(writer: StoreWriter, job: Job, *, at_ns: int) -> None:
    """Store that a run has ended."""
    _store_run(writer, job.simulation, state="ended", at_ns=at_ns)


def store_finding(store: Store, run_id: str, *, number: int, step: int, at_ns: int) -> None:
    """Store a finding of four steps that has closed."""
    finding = StoredFinding(
        run_id=run_id, number=number, epoch=0, cause="slow-compute", ranks=(3,), onset_step=step,
        last_step=step + 3, checked_step=step + 3, slowdown=1.2, recoverable_ratio=0.15,
        confidence=0.9, evidence="rank 3 takes 1.2 times as long", opened_ns=at_ns,
        updated_ns=at_ns, closed_ns=at_ns,
    )  # fmt: skip
    write_findings(store, [finding])


def store_hosts(writer: StoreWriter, job: Job, *, day: int) -> None:
    """Store what agents send of a day: clocks, heartbeats, lines of logs, checks of hosts."""
    hosts = {row["host"]: row for row in job.simulation.rank_rows()}
    rows: dict[str, list[Row]] = {"clock": [], "heartbeats": [], "events": [], "host_checks": []}
    for host, rank in hosts.items():
        place = {"run_id": job.run_id, "epoch": 0, "rank": rank["rank"]}
        for minute in range(24 * 60):
            at_ns = day * DAY_NS + minute * MINUTE_NS
            clock = {"host": host, "boot_id": rank["boot_id"], "clock_error_ns": 900}
            rows["clock"].append({**clock, "at_ns": at_ns, "offset_ns": at_ns % 7})
        for hour in range(24):
            at_ns = day * DAY_NS + hour * HOUR_NS
            beat = {**place, "host": host, "pid": 1, "state": "training"}
            line = {**place, "kind": "log", "text": "cuda-oom", "process": rank["process"]}
            rows["heartbeats"].append({**beat, "at_ns": at_ns})
            rows["events"].append({**line, "at_ns": at_ns, "line": at_ns})
        check = {"host": host, "run_id": job.run_id, "epoch": 0, "occasion": "heartbeat"}
        check |= {"at_ns": day * DAY_NS, "state": "healthy"}
        rows["host_checks"] += [{**check, "name": f"check-{number}"} for number in range(20)]
    for table, of_table in rows.items():
        writer.upsert(table, of_table)


def store_day(store: Store, writer: StoreWriter, live: Job, *, number: int, clock: Clock) -> None:
    """Store all rows of the day that has begun, and set the clock to its end."""
    day = clock.now_ns // DAY_NS
    for index in range(SHORT_RUNS):
        at_ns = day * DAY_NS + (4 + 8 * index) * HOUR_NS
        run_id = f"short-{number:03d}-{index}"
        clock.now_ns = at_ns
        job = start(writer, run_id, size="small", num_steps=SHORT_STEPS, at_ns=at_ns)
        store_steps(writer, job, range(at_ns, at_ns + SHORT_STEPS * MINUTE_NS, MINUTE_NS))
        if index % 2:
            store_finding(store, run_id, number=0, step=4, at_ns=at_ns + 6 * MINUTE_NS)
        clock.now_ns = at_ns + SHORT_STEPS * MINUTE_NS
        end(writer, job, at_ns=clock.now_ns)
    clock.now_ns = (day + 1) * DAY_NS - 1
    store_steps(writer, live, range(day * DAY_NS, (day + 1) * DAY_NS, DAY_NS // STEPS_A_DAY))
    if number % FINDING_DAYS == FINDING_DAYS // 2:
        step = number * STEPS_A_DAY + 10
        store_finding(store, LIVE, number=number // FINDING_DAYS, step=step, at_ns=clock.now_ns)
    store_hosts(writer, live, day=day)


def measure(store: Store) -> dict[str, Any]:
    """Return what is on the disk and how long the statements of pages take."""
    tables = {row.pop("table"): row for row in store.rows(SELECT_PARTS)}
    times = {}
    for name, call in statements(store, LIVE).items():
        begun = time.perf_counter()
        call()
        times[name] = time.perf_counter() - begun
    return {
        "tables": tables,
        "bytes": sum(row["bytes"] for row in tables.values()),
        "parts": sum(row["parts"] for row in tables.values()),
        "statements": times,
    }


def simulate_days(
    store: Store, keep: RetentionPolicy, *, num_days: int, last_day: int, size: str = "large"
) -> Iterator[dict[str, Any]]:
    """Store one day after the other, with its upkeep, and yield what each leaves."""
    clock = Clock((last_day - num_days + 1) * DAY_NS)
    writer = StoreWriter(store, unix_ns=clock)
    deletions = Deletions(store, unix_ns=clock, monotonic_ns=clock)
    upkeep = Upkeep(
        deletions,
        Retention(store, deletions, policy=keep, unix_ns=clock, monotonic_ns=clock),
        Rollups(store, unix_ns=clock, monotonic_ns=clock),
        lease=Lease(store),
        say=lambda _: None,
        monotonic_ns=clock,
    )
    ledger = LedgerMerges(store, unix_ns=clock)
    first_day = last_day - num_days + 1
    live = start(
        writer, LIVE, size=size, num_steps=num_days * STEPS_A_DAY, at_ns=first_day * DAY_NS
    )
    for number in range(num_days):
        clock.now_ns = (first_day + number) * DAY_NS
        store_day(store, writer, live, number=number, clock=clock)
        begun = time.perf_counter()
        upkeep.turn()
        ledger.turn()
        seconds = time.perf_counter() - begun
        yield {"day": number + 1, "upkeep_s": seconds, **measure(store)}


def table_of(days: list[dict[str, Any]]) -> str:
    """Return some of the days as a table, in MiB."""
    lines = [
        "| day | all | " + " | ".join(f"`{name}`" for name in SHOWN_TABLES) + " | others | parts"
        " | upkeep | slowest statement |",
        "| ---: " * (len(SHOWN_TABLES) + 6) + "|",
    ]
    for day in days:
        if day["day"] not in SHOWN_DAYS and day is not days[-1]:
            continue
        sizes = {name: row["bytes"] for name, row in day["tables"].items()}
        shown = [sizes.pop(name, 0) for name in SHOWN_TABLES]
        cells = [f"{size / 2**20:.2f}" for size in (day["bytes"], *shown, sum(sizes.values()))]
        slowest = max(day["statements"].values())
        cells += [str(day["parts"]), f"{day['upkeep_s']:.1f} s", f"{slowest:.2f} s"]
        lines.append(f"| {day['day']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Simulate the days and print a table of some of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--days", type=int, default=60)
    parser.add_argument("--keep-runs", default="45d")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    keep = parse_keep(spans="48h", findings="30d", runs=options.keep_runs)
    days = []
    yesterday = time.time_ns() // DAY_NS - 1
    with open_store(f"chdb://{options.store.resolve()}") as store:
        for day in simulate_days(store, keep, num_days=options.days, last_day=yesterday):
            days.append(day)
            print(f"day {day['day']}: {day['bytes']:,} bytes", file=sys.stderr, flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(days, indent=1) + "\n")
    print(table_of(days))


if __name__ == "__main__":
    main()
