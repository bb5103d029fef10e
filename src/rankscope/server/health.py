"""State of the server itself, from its metrics, its store and the heartbeats."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING

from rankscope.analysis.report.liveness import SILENT_NS
from rankscope.analysis.report.text import (
    UNKNOWN,
    format_bytes,
    format_duration,
    format_percent,
)
from rankscope.collector.errors import StoreError
from rankscope.dashboard.records.page_results import Health, HealthSection
from rankscope.tracer.span import NS_PER_S

from .host_check_sections import format_ago, host_check_parts
from .shared_results import SharedResults

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rankscope.analysis.trace.account import RecordAccount
    from rankscope.collector.http.metrics import Metrics
    from rankscope.collector.identity import Row
    from rankscope.collector.store.store import Store

    from .host_check_sections import Part

MAX_HOSTS = 200
"""Hosts that are listed, the longest silence first."""

HOUR_NS = 3600 * NS_PER_S
MIN_FREE_RATIO = 0.05
"""Share of the disk below which the engine soon refuses inserts and merges."""

AGE_NS = 5 * NS_PER_S
"""All clients share a reading for so long."""

MANY_PARTS = 300
"""Parts of one table from which on reads are slow. Source: ClickHouse delays inserts at 1,000
active parts of a partition (parts_to_delay_insert)."""

SELECT_HOSTS = """
SELECT host, newest_ns, num_ranks, clock_error_ns, count() OVER () AS num_hosts FROM (
    SELECT host, max(at_ns) AS newest_ns, uniq(rank) AS num_ranks FROM heartbeats
    WHERE at_ns >= {since_ns:Int64} AND run_id IN (
        SELECT run_id FROM runs FINAL WHERE state = 'running'
    )
    GROUP BY host
) AS beats LEFT JOIN (
    SELECT host, toNullable(argMax(clock_error_ns, at_ns)) AS clock_error_ns FROM clock
    GROUP BY host
) AS clocks USING host
ORDER BY newest_ns, host LIMIT {most:UInt32} SETTINGS join_use_nulls = 1
"""

SELECT_STORED = """
SELECT sum(num_cuts) AS num_cuts, sum(num_repeated) AS num_repeated, max(wrote_ns) AS newest_ns
FROM run_totals
"""

SELECT_BAD = """
SELECT reason, count() AS num_rows FROM bad_rows GROUP BY reason ORDER BY num_rows DESC LIMIT 20
"""

Values = dict[str, dict[str, float]]
"""Values of the metrics, by name and label."""


class HealthReader:
    """Reads the state of a server, at most every `AGE_NS`.

    Args:
        read_account: Returns the account of the records of all running jobs.
        read_queue: Returns the number of waiting and running analyses and drawings.
    """

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        *,
        read_account: Callable[[], RecordAccount],
        read_queue: Callable[[], int],
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._read_account = read_account
        self._read_queue = read_queue
        self._kept: SharedResults[None, Health] = SharedResults(max_results=1)
        self._spans: tuple[int, float] | None = None

    def read(self) -> Health:
        """Return the state of the server."""
        return self._kept.get(None, self._read, max_age_ns=AGE_NS)

    def _read(self) -> Health:
        now_ns = time.time_ns()
        values = {
            reading.name: {"".join(labels): number for labels, number in reading.samples.items()}
            for reading in self._metrics.readings()
        }
        try:
            found = (
                self._store.rows(SELECT_HOSTS, {"since_ns": now_ns - HOUR_NS, "most": MAX_HOSTS}),
                self._store.rows(SELECT_STORED),
                self._store.rows(SELECT_BAD),
                host_check_parts(self._store, now_ns),
            )
        except StoreError as error:
            problem = f"The store does not answer: {error}. See the server's log."
            return Health(problems=(problem,), sections=(_loops(values)[0],))
        hosts, (stored,), bad_rows, host_checks = found
        parts = [
            _loops(values),
            self._intake(values, stored, now_ns),
            self._disk(),
            _hosts(hosts, now_ns),
            *host_checks,
            _records(self._read_account()),
            _bad_rows(bad_rows),
            _tables(values),
        ]
        return Health(
            problems=tuple(problem for _, problems in parts for problem in problems),
            sections=tuple(section for section, _ in parts if section.rows),
        )

    def _intake(self, values: Values, stored: Row, now_ns: int) -> Part:
        spans = sum(values.get("ingest_spans_total", {}).values())
        spans += values.get("spool_rows_total", {}).get("spans", 0.0)
        rate = UNKNOWN
        if self._spans is not None and now_ns > self._spans[0]:
            seconds = (now_ns - self._spans[0]) / NS_PER_S
            rate = f"{(spans - self._spans[1]) / seconds:,.0f} spans/s"
        self._spans = (now_ns, spans)
        newest = stored["newest_ns"] or None
        cuts = f"{stored['num_cuts']:,} stored, {stored['num_repeated']:,} of them perhaps twice"
        requests = sum(values.get("ingest_requests_total", {}).values())
        refused = sum(values.get("refused_requests_total", {}).values())
        rows = (
            ("received since the last look", rate),
            ("last rows stored", UNKNOWN if newest is None else format_ago(now_ns, newest)),
            ("spans received since the start", f"{spans:,.0f}"),
            ("requests of agents", f"{requests:,.0f}"),
            ("refused requests and connections", f"{refused:,.0f}"),
            ("cuts in the ledger", cuts),
            ("analyses and drawings under way", f"{self._read_queue():,}"),
        )
        about = "Data on their way to the store. A cut is a piece of a spool that is stored once."
        return HealthSection(
            title="Intake and queue", about=about, columns=("quantity", "value"), rows=rows
        ), ()

    def _disk(self) -> Part:
        rows, bad, problems = [], [], []
        if self._store.path is not None:
            usage = shutil.disk_usage(self._store.path)
            free, folder = format_percent(usage.free / usage.total), self._store.path.name
            rows.append((folder, f"{format_bytes(usage.free)} ({free})", format_bytes(usage.total)))
            if usage.free / usage.total < MIN_FREE_RATIO:
                bad.append(folder)
                problems.append(f"Only {free} of the store's disk is free: free some space.")
        return HealthSection(
            title="Disk",
            about="Where the store is.",
            columns=("folder", "free", "size"),
            rows=tuple(rows),
            bad=frozenset(bad),
        ), tuple(problems)


def _loops(values: Values) -> Part:
    up = values.get("loop_up", {})
    down = [name for name, value in up.items() if not value]
    rows = tuple(
        (
            name,
            "works" if value else "fails",
            f"{values['loop_turns_total'][name]:,.0f}",
            f"{values['loop_failures_total'][name]:,.0f}",
            format_duration(values["loop_busy_seconds_total"][name] * NS_PER_S),
        )
        for name, value in up.items()
    )
    problems = tuple(f"The loop {name} fails or has ended: see the server's log." for name in down)
    return HealthSection(
        title="Loops",
        about="Background threads of the server. Busy: time spent in turns since the start.",
        columns=("loop", "state", "turns", "failed turns", "busy"),
        rows=rows,
        bad=frozenset(down),
    ), problems


def _tables(values: Values) -> Part:
    num_rows = values.get("store_rows", {})
    num_parts = values.get("store_parts", {})
    damaged = {
        table: number for table, number in values.get("store_damaged_parts", {}).items() if number
    }
    many = [table for table, number in num_parts.items() if number >= MANY_PARTS]
    rows = tuple(
        (
            table,
            f"{number:,.0f}",
            format_bytes(int(values["store_bytes"][table])),
            f"{num_parts[table]:,.0f}",
        )
        for table, number in sorted(
            num_rows.items(), key=lambda item: -values["store_bytes"][item[0]]
        )
    )
    problems = [
        f"Table {table} has {number:,.0f} damaged parts: restore a backup."
        for table, number in damaged.items()
    ]
    problems += [f"Table {table} has many parts: reads of it are slow." for table in many]
    return HealthSection(
        title="Store",
        about="Rows, duplicates included, and bytes on disk by table, the largest first.",
        columns=("table", "rows", "size", "parts"),
        rows=rows,
        bad=frozenset([*damaged, *many]),
    ), tuple(problems)


def _hosts(hosts: list[Row], now_ns: int) -> Part:
    silent = [row["host"] for row in hosts if now_ns - row["newest_ns"] > SILENT_NS]
    total = hosts[0]["num_hosts"] if hosts else 0
    more = f" {len(hosts)} of {total:,} are listed." if total > len(hosts) else ""
    rows = tuple(
        (
            row["host"],
            format_ago(now_ns, row["newest_ns"]),
            f"{row['num_ranks']:,}",
            UNKNOWN
            if row["clock_error_ns"] is None
            else f"± {format_duration(row['clock_error_ns'])}",
        )
        for row in hosts
    )
    problems = (
        (f"{len(silent)} hosts of running jobs sent no heartbeat for 15 s, {silent[0]} first.",)
        if silent
        else ()
    )
    return HealthSection(
        title="Hosts and agents",
        about=f"Hosts of running jobs with a heartbeat in the last hour, the oldest first.{more}",
        columns=("host", "last heartbeat", "ranks", "clock error"),
        rows=rows,
        bad=frozenset(silent),
    ), problems


def _records(account: RecordAccount) -> Part:
    states: Mapping[str, int | None] = {
        "produced": account.produced,
        "stored": account.stored,
        "still buffered": account.buffered,
        **{f"dropped: {reason}": number for reason, number in account.dropped.items()},
    }
    rows = tuple(
        (name, UNKNOWN if number is None else f"{number:,}") for name, number in states.items()
    )
    dropped = [name for name in states if name.startswith("dropped: ")]
    problem = f"The tracers of running jobs dropped {account.num_dropped:,} records."
    return HealthSection(
        title="Records of running jobs",
        about="Produced by the tracers = stored + buffered + dropped, as last analysed.",
        columns=("records", "number"),
        rows=rows,
        bad=frozenset(dropped),
    ), ((problem,) if account.num_dropped else ())


def _bad_rows(found: list[Row]) -> Part:
    rows = tuple((row["reason"], f"{row['num_rows']:,}") for row in found)
    return HealthSection(
        title="Invalid rows",
        about="Rows that were not stored as data, by reason; table bad_rows has them.",
        columns=("reason", "rows"),
        rows=rows,
    ), ()
