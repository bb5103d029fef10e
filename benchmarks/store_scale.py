"""Time of the statements of pages and loops on a store with many runs and a long ledger.

    python -m benchmarks.store_scale STORE [--runs 10000] [--lines 1000000000] [--json FILE]

Makes runs with ranks, steps, rollups, findings and lines of the ledger in STORE, an empty folder,
unless they are there. Then it runs what the pages and loops of a server run each time, and prints
wall time and CPU time of this process, which the embedded engine is part of: the median of five
calls. Lines of the ledger are written without their hashes, which nothing can compress and
which no statement on a list reads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.collector.read.findings import read_findings
from rankscope.collector.read.goodput import read_run_times
from rankscope.collector.read.heartbeats import SILENCE_NS
from rankscope.collector.read.rollups import read_open_steps, read_rolled_up_runs
from rankscope.collector.read.runs import (
    list_runs,
    read_configurations,
    read_previous_run,
    read_recent_runs,
    read_run,
    read_run_names,
)
from rankscope.collector.read.spans import read_outline
from rankscope.collector.read.steps import read_step_marks
from rankscope.collector.retention.deletion import Deletions
from rankscope.collector.retention.ledger_merges import SELECT_DAYS as SELECT_LEDGER_DAYS
from rankscope.collector.retention.retention import SELECT_ENDS
from rankscope.collector.retention.span_days import DAY_NS
from rankscope.collector.retention.span_days import SELECT_DAYS as SELECT_SPAN_DAYS
from rankscope.collector.store.deduplicated_reads import read_stored_spans
from rankscope.collector.store.resume import read_resume, resume_page
from rankscope.collector.store.store import open_store
from rankscope.server.health import SELECT_STORED

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankscope.collector.store.store import Store

SLICE_LINES = 5_000_000
NUM_CALLS = 5
NUM_RANKS, NUM_STEPS = 8, 50
TARGET_S = 0.3

RUN = "concat('run-', leftPad(toString(intDiv(number, {per_run:UInt64})), 6, '0'))"

FILL = {
    "runs": f"SELECT {RUN} AS run_id, 0 AS epoch, {{now:Int64}} - number AS created_ns,"
    " created_ns AS started_ns, 'ended' AS state, 'rankscope' AS source_format, 8 AS world_size,"
    " 'model' AS model, created_ns AS ended_ns",
    "ranks": f"SELECT {RUN} AS run_id, number % {NUM_RANKS} AS rank,"
    " concat('host-', toString(intDiv(number, 8) % 500)) AS host, toString(number) AS process",
    "steps": f"SELECT {RUN} AS run_id, intDiv(number, {NUM_RANKS}) % {NUM_STEPS} AS step,"
    f" number % {NUM_RANKS} AS rank, {{now:Int64}} + step * 1000000000 AS start_ns,"
    " start_ns + 900000000 AS end_ns, 1 AS segment, step AS row",
    "spans": f"SELECT {RUN} AS run_id, intDiv(number, {NUM_RANKS}) % {NUM_STEPS} AS step,"
    f" number % {NUM_RANKS} AS rank, {{now:Int64}} + step * 1000000000 AS start_ns,"
    " 900000000 AS duration_ns, 'forward' AS kind, 1 AS segment, step AS row",
    "rollups": f"SELECT {RUN} AS run_id, intDiv(number, {NUM_RANKS}) % {NUM_STEPS} AS step,"
    f" number % {NUM_RANKS} AS rank, 'forward' AS kind, 1 AS num_spans, number % 1000 AS busy_ns",
    "closed_steps": f"SELECT {RUN} AS run_id, number % {NUM_STEPS} AS step,"
    f" {NUM_RANKS} AS num_spans, {NUM_RANKS} AS num_ranks, {NUM_RANKS} AS num_described",
    "findings": f"SELECT {RUN} AS run_id, 1 AS position, 'slow-compute' AS cause, [3] AS ranks,"
    " 5 AS first_step, 9 AS last_step, {now:Int64} - number AS analysed_ns",
    "heartbeats": f"SELECT {RUN} AS run_id, number % {NUM_RANKS} AS rank, 'host' AS host,"
    " {now:Int64} AS at_ns",
}
"""Rows of each table; ``per_run`` of its rows are of one run."""

PER_RUN = {
    "runs": 1, "ranks": NUM_RANKS, "steps": NUM_RANKS * NUM_STEPS, "findings": 1,
    "spans": NUM_RANKS * NUM_STEPS, "rollups": NUM_RANKS * NUM_STEPS, "closed_steps": NUM_STEPS,
    "heartbeats": NUM_RANKS,
}  # fmt: skip

FILL_LEDGER = f"""
INSERT INTO ledger (run_id, rank, process, segment, first_row, end_row, num_spans, state, at_ns,
    revision)
SELECT {RUN} AS run_id, intDiv(line, 100) % {NUM_RANKS} AS rank, toString(rank) AS process,
    intDiv(line, 100) AS segment, line % 100 * 50 AS first_row, first_row + 50 AS end_row,
    50 AS num_spans, 'stored' AS state, {{now:Int64}} - (line % 100) * 1000000000 AS at_ns,
    2 AS revision
FROM (
    SELECT number, number % {{per_run:UInt64}} AS line
    FROM numbers({{first:UInt64}}, {{num:UInt64}})
)
"""


def fill(store: Store, *, num_runs: int, num_lines: int) -> None:
    """Make the rows that the store lacks."""
    now_ns = time.time_ns()
    for table, select in FILL.items():
        if not store.rows(f"SELECT count() AS n FROM {table}")[0]["n"]:
            per_run = PER_RUN[table]
            names = ", ".join(part.strip() for part in _names(select))
            store.command(
                f"INSERT INTO {table} ({names}) {select} FROM numbers({num_runs * per_run})",
                {"per_run": per_run, "now": now_ns},
            )
    done = int(store.rows("SELECT sum(num_cuts) AS n FROM run_totals")[0]["n"])
    per_run = num_lines // num_runs
    while done < num_lines:
        begun = time.monotonic()
        num = min(SLICE_LINES, num_lines - done)
        bound = {"per_run": per_run, "now": now_ns, "first": done, "num": num}
        store.command(FILL_LEDGER, bound)
        done += num
        seconds = time.monotonic() - begun
        print(f"{done:,} lines ({num / seconds:,.0f}/s)", file=sys.stderr, flush=True)


def _names(select: str) -> list[str]:
    """Return the aliases of the columns of one of `FILL`."""
    return [part.split(",")[0].strip() for part in select.split(" AS ")[1:]]


def statements(store: Store, run_id: str) -> dict[str, Callable[[], object]]:
    """Return what pages and loops read each time, by name."""
    now_ns = time.time_ns()
    return {
        "list of runs (pages, analysis, rollups: each second)": lambda: list_runs(store),
        "names of runs": lambda: read_run_names(store),
        "recent runs (alerts)": lambda: read_recent_runs(store, since_ns=now_ns - DAY_NS),
        "configurations (page Runs)": lambda: read_configurations(store),
        "a run's description (each page)": lambda: read_run(store, run_id),
        "a run's goodput": lambda: read_run_times(store, run_id),
        "the run before": lambda: read_previous_run(store, run_id),
        "where a run's spans are": lambda: read_stored_spans(store, run_id),
        "outline of a step": lambda: read_outline(store, run_id, epoch=0, step=7),
        "marks of steps": lambda: read_step_marks(store, run_id, most=500),
        "open steps (rollups)": lambda: read_open_steps(store, run_id, state="ended"),
        "runs rolled up": lambda: read_rolled_up_runs(store),
        "findings of all runs": lambda: read_findings(store),
        "page Health: cuts": lambda: store.rows(SELECT_STORED),
        "resume of a spool": lambda: read_resume(store, run_id),
        "resume of an agent": lambda: resume_page(store, run_id, after=0, ranks=()),
        "late rows of deleted runs (each 5 s)": lambda: Deletions(store).sweep(),
        "ends of runs (each hour)": lambda: store.rows(
            SELECT_ENDS, {"live_ns": now_ns - SILENCE_NS}
        ),
        "days of spans (each hour)": lambda: store.rows(
            SELECT_SPAN_DAYS, {"table": "spans", "first_day": 100_000}
        ),
        "days of the ledger (each 10 min)": lambda: store.rows(
            SELECT_LEDGER_DAYS, {"today": 100_000}
        ),
    }


def measure(call: Callable[[], object]) -> dict[str, float]:
    """Return the median wall and CPU time of a call, s."""
    walls, processors = [], []
    for _ in range(NUM_CALLS):
        wall, processor = time.perf_counter(), time.process_time()
        call()
        walls.append(time.perf_counter() - wall)
        processors.append(time.process_time() - processor)
    return {"wall_s": statistics.median(walls), "cpu_s": statistics.median(processors)}


def main() -> None:
    """Fill the store, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=Path)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--lines", type=int, default=1_000_000_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with open_store(f"chdb://{options.store.resolve()}") as store:
        fill(store, num_runs=options.runs, num_lines=options.lines)
        run_id = f"run-{options.runs // 2:06d}"
        found: dict[str, Any] = {
            name: measure(call) for name, call in statements(store, run_id).items()
        }
    result = {
        "runs": options.runs, "lines": options.lines, "load": os.getloadavg(), "statements": found,
    }  # fmt: skip
    for name, times in found.items():
        mark = "" if times["wall_s"] <= TARGET_S else "  above the target"
        print(
            f"{name:55} {times['wall_s'] * 1e3:8.0f} ms, CPU {times['cpu_s'] * 1e3:8.0f} ms{mark}"
        )
    print(f"load {os.getloadavg()[0]:.1f}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
