"""HTTP server: routes, pages and metrics behind the listeners."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rankscope.collector.errors import StoreError
from rankscope.collector.http.application import create_server, deletion_router
from rankscope.collector.http.gate import STRICT_POLICY
from rankscope.collector.http.metrics import Metrics, Reading
from rankscope.collector.http.server import HttpServer, ServerLimits, fit_connections
from rankscope.tracer.span import NS_PER_S

from .run_metrics import read_live_runs
from .shared_results import SharedResults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import ExitStack

    from fastapi import APIRouter

    from rankscope.collector.http.access import Access
    from rankscope.collector.http.refusals import Refusals
    from rankscope.collector.http.requests import AsgiApp
    from rankscope.collector.ingest.service import IngestService
    from rankscope.collector.retention.deletion import Deletions
    from rankscope.collector.store.store import Store

    from .alert_watch import AlertWatch
    from .listen import Endpoint
    from .loops import Loop
    from .provider import StoreProvider
    from .reports import Reports
    from .upkeep import PartChecks

    Reader = Callable[[], Iterable[Reading]]

STORE_PAUSE_NS = 15 * NS_PER_S
"""Between two reads of the store's size, however often the metrics are scraped."""

SIZES = """
SELECT table, sum(rows) AS num_rows, sum(bytes_on_disk) AS num_bytes, count() AS num_parts
FROM system.parts WHERE active AND database = currentDatabase() GROUP BY table ORDER BY table
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Monitoring:
    """Counters of a server: refused requests, and the metrics of `/metrics`."""

    refusals: Refusals
    metrics: Metrics


def open_routers(
    store: Store, deletions: Deletions, ingest: IngestService | None, stack: ExitStack
) -> list[APIRouter]:
    """Return the routes besides the pages.

    Args:
        store: The store. If it is embedded, the gateway for its queries is one of the routes.
        deletions: Tombstones of the store.
        ingest: Service for agents. None: agents are not served.
        stack: Closes what the routes opened.
    """
    routers = [deletion_router(store, deletions)]
    if store.path is not None:
        from rankscope.collector.gateway import QueryEngine, query_router

        engine = QueryEngine(store.path)
        stack.callback(engine.close)
        routers.append(query_router(engine))
    if ingest is not None:
        from rankscope.collector.ingest.router import ingest_router

        from .control import control_router

        routers += [ingest_router(ingest), control_router(store)]
    return routers


def open_metrics(  # the parts of a server
    store: Store,
    loops: Sequence[Loop],
    ingest: IngestService | None,
    reports: Reports,
    part_checks: PartChecks | None,
    watch: AlertWatch | None = None,
) -> Metrics:
    """Return the metrics of the loops, the store, the runs and the ingest.

    `run_server` adds the rest.
    """
    readers: list[Reader] = [
        partial(read_loops, loops),
        read_store(store),
        partial(read_account, reports),
    ]
    if watch is not None:
        readers.append(read_live_runs(reports, watch, store))
    if part_checks is not None:
        readers.append(partial(read_part_checks, part_checks))
    if ingest is not None:
        readers.append(partial(read_ingest, ingest))
    return Metrics(readers)


def open_application(
    access: Access,
    provider: StoreProvider | None,
    checks: Sequence[Callable[[], str | None]],
    *,
    routers: Sequence[APIRouter],
    names: frozenset[str],
    monitoring: Monitoring,
) -> AsgiApp:
    """Return the application.

    Args:
        provider: Data of the pages. None: there are no pages.
        checks: Each returns why the server is not ready, or None if it is.
        names: Host names that requests may name.
    """

    def not_ready() -> str | None:
        return next((why for check in checks if (why := check()) is not None), None)

    pages: Callable[..., Iterable[bytes]] = _no_pages
    policy = STRICT_POLICY
    if provider is not None:
        from rankscope.dashboard.app import content_security_policy, create_app

        dashboard = create_app(provider)
        pages, policy = dashboard.server, content_security_policy(dashboard)
    return create_server(
        access,
        pages=pages,
        not_ready=not_ready,
        policy=policy,
        routers=routers,
        names=names,
        refusals=monitoring.refusals,
        metrics=monitoring.metrics,
    )


def run_server(
    app: AsgiApp, endpoint: Endpoint, monitoring: Monitoring, *, on_start: Callable[[], None]
) -> None:
    """Serve until SIGINT or SIGTERM; call ``on_start`` when the server accepts connections."""
    limits = ServerLimits(max_connections=fit_connections())
    server = HttpServer(app, endpoint.listeners, limits=limits)
    monitoring.metrics.add(partial(read_edge, server, endpoint, monitoring.refusals))
    server.serve_until_stopped(on_start=on_start)


def _no_pages(environ: dict[str, object], start_response: Callable[..., object]) -> list[bytes]:
    """Answer a page request to a collector without a dashboard."""
    start_response("404 Not Found", [("Content-Type", "text/plain")])
    return [b"404: this collector serves no pages. Open a dashboard on the same store.\n"]


def read_loops(loops: Sequence[Loop]) -> Iterable[Reading]:
    """Yield the metrics of the server's loops: tail, analysis, upkeep and others."""
    for name, text, value in (
        (
            "loop_up",
            "1 if a background loop works, 0 if it fails or has ended.",
            lambda loop: float(loop.why_stopped() is None),
        ),
        ("loop_turns_total", "Turns of a background loop.", lambda loop: loop.num_turns),
        (
            "loop_failures_total",
            "Turns of a background loop that failed and are retried.",
            lambda loop: loop.num_failures,
        ),
        (
            "loop_busy_seconds_total",
            "Time that a background loop has spent in its turns.",
            lambda loop: loop.busy_ns / NS_PER_S,
        ),
    ):
        values = {loop.name: value(loop) for loop in loops}
        yield Reading(name=name, text=text, label="loop", values=values)
    counted = [loop.counts for loop in loops if loop.counts]
    if counted:
        yield Reading(
            name="spool_rows_total",
            text="Rows that the tail read from the spool, by kind. refused_files counts files"
            " that could not be read and were left in place.",
            label="kind",
            values={name: count for counts in counted for name, count in counts.items()},
        )


def read_account(reports: Reports) -> Iterable[Reading]:
    """Yield the account of the records of the running jobs, as the analysis last saw it."""
    account = reports.running_account()
    numbers = {
        "produced": account.produced,
        "stored": account.stored,
        "dropped": account.num_dropped,
        "buffered": account.buffered,
    }
    yield Reading(
        name="running_records",
        text="Records of the running jobs: produced = stored + dropped + buffered. A state"
        " that is unknown is left out.",
        label="state",
        values={state: float(num) for state, num in numbers.items() if num is not None},
    )


def read_ingest(service: IngestService) -> Iterable[Reading]:
    """Yield the metrics of agents' requests."""
    counts = service.counts
    for name, text, value in (
        ("ingest_requests_total", "Requests of agents.", counts.num_requests),
        ("ingest_bytes_total", "Bytes in bodies of agents' requests.", counts.num_bytes),
        ("ingest_spans_total", "Spans in agents' requests.", counts.num_spans),
        (
            "ingest_bad_rows_total",
            "Invalid rows, stored with the reason in table bad_rows.",
            counts.num_bad_rows,
        ),
    ):
        yield Reading(name=name, text=text, values={"": value})
    yield Reading(
        name="ingest_cuts_total",
        text="Cuts, by their state after ingest.",
        label="state",
        values=dict(counts.cuts),
    )
    yield Reading(
        name="ingest_refusals_total",
        text="Refused requests of agents, by HTTP status.",
        label="status",
        values={str(status): count for status, count in counts.refusals.items()},
    )
    yield Reading(
        name="ingest_under_way_bytes",
        text="Bytes of agents' requests in progress, as sent and as inflated.",
        label="form",
        values={
            "wire": service.wire_budget.taken_bytes,
            "inflated": service.inflated_budget.taken_bytes,
        },
    )


def read_store(store: Store) -> Reader:
    """Return the metrics of the store's size, read every `STORE_PAUSE_NS` at most."""
    kept: SharedResults[None, list[Reading]] = SharedResults(max_results=1)
    return lambda: kept.get(None, lambda: _read_sizes(store), max_age_ns=STORE_PAUSE_NS)


def _read_sizes(store: Store) -> list[Reading]:
    try:
        rows = store.rows(SIZES)
    except StoreError:
        rows = None
    text = "1 if the store answers queries."
    readings = [Reading(name="store_up", text=text, values={"": float(rows is not None)})]
    if rows is None:
        return readings
    for column, name, text in (
        ("num_rows", "store_rows", "Rows by table, duplicates included."),
        ("num_bytes", "store_bytes", "Bytes on disk by table."),
        ("num_parts", "store_parts", "Parts by table. Many parts make reads slow."),
    ):
        values = {str(row["table"]): float(row[column]) for row in rows}
        readings.append(Reading(name=name, text=text, label="table", values=values))
    return readings


def read_part_checks(checks: PartChecks) -> Iterable[Reading]:
    """Yield the metric of damaged parts."""
    yield Reading(
        name="store_damaged_parts",
        text="Parts by table whose files do not match their checksums: restore a backup.",
        label="table",
        values={table: float(number) for table, number in checks.num_damaged.items()},
    )


def read_edge(server: HttpServer, endpoint: Endpoint, refusals: Refusals) -> Iterable[Reading]:
    """Yield the metrics of connections, refused requests and the certificate."""
    values: dict[str, float] = {"": server.num_connections}
    yield Reading(name="connections", text="Open connections.", values=values)
    yield Reading(
        name="refused_requests_total",
        text="Refused requests, by reason.",
        label="reason",
        values={str(reason): count for reason, count in refusals.counts.items()},
    )
    if endpoint.renewal is not None:
        yield Reading(
            name="certificate_expiry_timestamp_seconds",
            text="Unix time at which the server's certificate expires.",
            values={"": endpoint.renewal.served.expires_s},
        )
