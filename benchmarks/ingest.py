"""Rate from a spool to queryable spans, relative to a bare `insert_arrow` of the same rows.

    python -m benchmarks.ingest [--ranks 8] [--rows 131072] [--rounds 7] [--json FILE]

A round has three variants on one embedded store, in the order A B C C B A:

* the whole path: `SpoolTail` over one spool per rank, decoded, recorded in the ledger and inserted;
* a bare `insert_arrow` of the same rows into an empty copy of the table;
* the whole path without ClickHouse's fsync.

Ratios are of the sums of a round; the result is the median over rounds with a 95 % bootstrap
interval. Files are newly written and so come from the page cache. The result also has the bytes per
span on disk, for these rows and for a simulated cluster, as inserted and after merging.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from benchmarks.ingest_spool import write_spool
from benchmarks.intervals import median_interval
from rankscope.collector.spool.tail import SpoolTail
from rankscope.collector.store.store import open_store
from rankscope.collector.store.writer import StoreWriter
from rankscope.commands.simulate import simulate_run
from rankscope.simulation import SimulateOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankscope.collector.store.store import Store

READ_BACK = """
SELECT * FROM spans WHERE run_id = {run_id:String}
ORDER BY run_id, epoch, step, rank, start_ns, segment, row
"""
COUNT = "SELECT count() AS num_spans FROM spans WHERE run_id = {run_id:String}"
COPY_TABLE = "CREATE TABLE bare AS spans"
SELECT_SIZE = """
SELECT sum(bytes_on_disk) / sum(rows) AS num_bytes FROM system.parts
WHERE active AND table = {table:String}
"""
FSYNC = "ALTER TABLE {table:Identifier} MODIFY SETTING fsync_after_insert = {on:UInt8}"
FSYNC_FOLDER = "ALTER TABLE {table:Identifier} MODIFY SETTING fsync_part_directory = {on:UInt8}"
WRITTEN_TABLES = ("spans", "ledger", "runs", "ranks", "clock", "groups", "manifests", "events")

WAYS = ("whole", "bare", "unsynced", "unsynced", "bare", "whole")
SIMULATED = SimulateOptions(scenario="healthy", run_id="sized", num_ranks=256, num_steps=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds of wall time, and of CPU time of all threads."""

    wall_s: float
    cpu_s: float


class Rig:
    """An embedded store and its spools."""

    def __init__(self, store: Store, folder: Path, *, num_ranks: int, num_rows: int) -> None:
        self._store = store
        self._folder = folder
        self._num_ranks = num_ranks
        self._num_rows = num_rows
        self._num_runs = 0
        run_id = self._store_run()[0]
        # In the order of the key, so that the bare insert does not sort.
        self._table = store.arrow(READ_BACK, {"run_id": run_id}).unify_dictionaries()
        store.command(COPY_TABLE)

    def cost(self, way: str) -> Cost:
        """Return the cost of one variant, with empty tables before it."""
        self._store.command("TRUNCATE TABLE spans")
        self._store.command("TRUNCATE TABLE bare")
        if way == "bare":
            return cost_of(lambda: self._store.insert_arrow("bare", self._table))
        self._set_fsync(on=int(way == "whole"))
        cost = self._store_run()[1]
        self._set_fsync(on=1)
        return cost

    def _store_run(self) -> tuple[str, Cost]:
        run_id = f"bench-{self._num_runs}"
        self._num_runs += 1
        spool = self._folder / run_id
        write_spool(spool, run_id=run_id, num_ranks=self._num_ranks, num_rows=self._num_rows)
        tail = SpoolTail(spool, StoreWriter(self._store))
        cost = cost_of(tail.poll)
        tail.close()
        shutil.rmtree(spool)
        found = self._store.rows(COUNT, {"run_id": run_id})[0]["num_spans"]
        if found != self._num_ranks * self._num_rows:
            raise RuntimeError(f"stored {found} of {self._num_ranks * self._num_rows} spans")
        return run_id, cost

    def _set_fsync(self, *, on: int) -> None:
        for table in WRITTEN_TABLES:
            self._store.command(FSYNC, {"table": table, "on": on})
            self._store.command(FSYNC_FOLDER, {"table": table, "on": on})


def cost_of(work: Callable[[], object]) -> Cost:
    """Run ``work`` once."""
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    work()
    return Cost(wall_s=time.perf_counter() - begin_s, cpu_s=time.process_time() - begin_cpu_s)


def measure(*, num_ranks: int, num_rows: int, num_rounds: int) -> dict[str, Any]:
    """Return rates, ratios and sizes."""
    num_spans = num_ranks * num_rows
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with open_store(f"chdb://{folder / 'store'}") as store:
            rig = Rig(store, folder, num_ranks=num_ranks, num_rows=num_rows)
            rounds = [[(way, rig.cost(way)) for way in WAYS] for _ in range(num_rounds)]
            sizes = {"synthetic": sizes_of(store, "spans")}
        url = f"chdb://{folder / 'simulated'}"
        simulate_run(SimulateOptions(**_fields(SIMULATED), store_url=url))
        with open_store(url) as store:
            sizes["simulated"] = sizes_of(store, "spans")
    return {
        "num_spans": num_spans,
        "rounds": num_rounds,
        "spans_per_s": {
            way: round(num_spans / statistics.median(seconds_of(rounds, way, "wall_s")))
            for way in dict.fromkeys(WAYS)
        },
        "spans_per_cpu_s": {
            way: round(num_spans / statistics.median(seconds_of(rounds, way, "cpu_s")))
            for way in dict.fromkeys(WAYS)
        },
        "whole_to_bare": ratio(rounds, "bare", "whole", "wall_s"),
        "whole_to_bare_cpu": ratio(rounds, "bare", "whole", "cpu_s"),
        "fsync_price": ratio(rounds, "unsynced", "whole", "wall_s"),
        "disk_bytes_per_span": sizes,
    }


def seconds_of(rounds: list[list[tuple[str, Cost]]], way: str, clock: str) -> list[float]:
    """Return the seconds of one variant in each round, by wall or CPU clock."""
    return [float(getattr(cost, clock)) for costs in rounds for name, cost in costs if name == way]


def ratio(
    rounds: list[list[tuple[str, Cost]]], quick: str, slow: str, clock: str
) -> dict[str, object]:
    """Return the speed of ``slow`` as a share of that of ``quick``."""

    def seconds(costs: list[tuple[str, Cost]], way: str) -> float:
        return float(sum(getattr(cost, clock) for name, cost in costs if name == way))

    values = [seconds(costs, quick) / seconds(costs, slow) for costs in rounds]
    return {
        "median": round(statistics.median(values), 3),
        "interval": [round(value, 3) for value in median_interval(values)],
    }


def sizes_of(store: Store, table: str) -> dict[str, float]:
    """Return the bytes per row on disk, as inserted (partly merged) and merged."""
    inserted = store.rows(SELECT_SIZE, {"table": table})[0]["num_bytes"]
    store.command("OPTIMIZE TABLE spans FINAL")
    merged = store.rows(SELECT_SIZE, {"table": table})[0]["num_bytes"]
    return {"inserted": round(inserted, 2), "merged": round(merged, 2)}


def _fields(options: SimulateOptions) -> dict[str, Any]:
    names = ("scenario", "run_id", "num_ranks", "num_steps")
    return {name: getattr(options, name) for name in names}


def main() -> None:
    """Print the result as JSON, and write it to a file if requested."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rows", type=int, default=131_072, help="records a rank")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    before = os.getloadavg()
    found = measure(num_ranks=options.ranks, num_rows=options.rows, num_rounds=options.rounds)
    document = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": {"before": before, "after": os.getloadavg()},
        "python": platform.python_version(),
        "chdb": version("chdb"),
        "pyarrow": pa.__version__,
        **found,
    }
    text = json.dumps(document, indent=1) + "\n"
    sys.stdout.write(text)
    if options.json is not None:
        options.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
