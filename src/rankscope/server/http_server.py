"""What a server answers with: its routes, its pages, its figures, and the doors before them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.collector.errors import StoreError
from rankscope.collector.http.application import create_server
from rankscope.collector.http.deletion_routes import deletion_router
from rankscope.collector.http.gate import STRICT_POLICY
from rankscope.collector.http.limits import EdgeLimits, fit_connections
from rankscope.collector.http.metrics import Metrics, Reading
from rankscope.collector.http.socket_server import EdgeServer
from rankscope.tracer.span import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import ExitStack

    from fastapi import APIRouter

    from rankscope.collector.http.gate import Access, AsgiApp
    from rankscope.collector.http.refusals import Refusals
    from rankscope.collector.ingest.service import IngestService
    from rankscope.collector.retention.deletion import Deletions
    from rankscope.collector.store.store import Store

    from .listen import Listening
    from .loops import Loop
    from .provider import StoreProvider

    Reader = Callable[[], Iterable[Reading]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guards:
    """What watches over all that is asked of the server."""

    refusals: Refusals
    metrics: Metrics


def open_routers(
    store: Store, deletions: Deletions, ingest: IngestService | None, stack: ExitStack
) -> list[APIRouter]:
    """Return the routes besides the pages.

    Args:
        store: An embedded one can be read by statements here; a server has its own address.
        deletions: The store's tombstones.
        ingest: Takes in what agents send; None: nothing is sent here.
        stack: Closes what the routes need.
    """
    routers = [deletion_router(store, deletions)]
    if store.path is not None:
        from rankscope.collector.gateway.engine import QueryEngine
        from rankscope.collector.gateway.routes import query_router

        engine = QueryEngine(store.path)
        stack.callback(engine.close)
        routers.append(query_router(engine))
    if ingest is not None:
        from rankscope.collector.ingest.router import ingest_router

        routers.append(ingest_router(ingest))
    return routers


def open_metrics(store: Store, loops: Sequence[Loop], ingest: IngestService | None) -> Metrics:
    """Return what `/metrics` tells; `run_server` adds the doors."""
    readers = [read_loops(loops), read_store(store)]
    return Metrics(readers if ingest is None else [*readers, read_ingest(ingest)])


def open_application(
    access: Access,
    provider: StoreProvider | None,
    checks: Sequence[Callable[[], str | None]],
    *,
    routers: Sequence[APIRouter],
    names: frozenset[str],
    guards: Guards,
) -> AsgiApp:
    """Return the whole application.

    Args:
        access: Who may come in.
        provider: Results for the pages; None: there are no pages.
        checks: Each says why the server cannot do its work just now; None when it can.
        routers: Routes besides the pages.
        names: Host names by which the server may be asked.
        guards: What watches over it.
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
        refusals=guards.refusals,
        metrics=guards.metrics,
    )


def run_server(
    app: AsgiApp, doors: Listening, guards: Guards, *, on_start: Callable[[], None]
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        app: The whole application.
        doors: Where to listen; the caller closes them.
        guards: What watches over it.
        on_start: Called when visitors can come in.

    Raises:
        OSError: A socket broke.
    """
    limits = EdgeLimits(
        max_connections=fit_connections(),
        max_connections_per_address=doors.connections_per_address,
    )
    server = EdgeServer(app, doors.doors, limits=limits, refusals=guards.refusals)
    guards.metrics.add(read_edge(server, doors, guards.refusals))
    server.serve_until_told(on_start=on_start)


def _no_pages(environ: dict[str, object], start_response: Callable[..., object]) -> list[bytes]:
    """Answer for a collector without a dashboard."""
    start_response("404 Not Found", [("Content-Type", "text/plain")])
    return [b"404: this collector has no pages; a dashboard on the same store shows its runs\n"]


STORE_PAUSE_NS = 15 * NS_PER_S
"""Between two looks at the store, however often it is scraped."""


SIZES = """
SELECT table, sum(rows) AS num_rows, sum(bytes_on_disk) AS num_bytes, count() AS num_parts
FROM system.parts WHERE active AND database = currentDatabase() GROUP BY table ORDER BY table
"""


def read_loops(loops: Sequence[Loop]) -> Reader:
    """Return the reader of the server's threads: the tail, the analysis, the upkeep."""

    def read() -> Iterable[Reading]:
        yield Reading(
            name="loop_up",
            text="1 where a thread of the server does its work, 0 where it fails or has ended.",
            label="loop",
            values={loop.name: float(loop.why_stopped() is None) for loop in loops},
        )
        yield Reading(
            name="loop_turns_total",
            text="Turns of a thread of the server.",
            label="loop",
            values={loop.name: loop.num_turns for loop in loops},
        )
        yield Reading(
            name="loop_failures_total",
            text="Turns that failed and are tried again.",
            label="loop",
            values={loop.name: loop.num_failures for loop in loops},
        )
        yield Reading(
            name="loop_busy_seconds_total",
            text="Time in turns of a thread of the server.",
            label="loop",
            values={loop.name: loop.busy_ns / NS_PER_S for loop in loops},
        )
        brought = [loop.counts for loop in loops if loop.counts]
        if brought:
            yield Reading(
                name="spool_rows_total",
                text="Rows that the tail took from the spool, by what became of them;"
                " refused_files: files that it can't read, and left.",
                label="kind",
                values={name: count for counts in brought for name, count in counts.items()},
            )

    return read


def read_ingest(service: IngestService) -> Reader:
    """Return the reader of what agents send."""

    def read() -> Iterable[Reading]:
        counts = service.counts
        yield Reading(
            name="ingest_requests_total",
            text="Requests of agents.",
            values={"": counts.num_requests},
        )
        yield Reading(
            name="ingest_bytes_total", text="Bytes of their bodies.", values={"": counts.num_bytes}
        )
        yield Reading(
            name="ingest_spans_total", text="Spans in them.", values={"": counts.num_spans}
        )
        yield Reading(
            name="ingest_bad_rows_total",
            text="Rows set aside with their reason.",
            values={"": counts.num_bad_rows},
        )
        yield Reading(
            name="ingest_cuts_total",
            text="Cuts, by what became of them.",
            label="state",
            values=dict(counts.cuts),
        )
        yield Reading(
            name="ingest_refusals_total",
            text="Requests of agents that were refused, by status.",
            label="status",
            values={str(status): count for status, count in counts.refusals.items()},
        )
        yield Reading(
            name="ingest_under_way_bytes",
            text="Bytes of agents' requests under way, as sent and as inflated.",
            label="form",
            values={
                "wire": service.wire_budget.taken_bytes,
                "inflated": service.inflated_budget.taken_bytes,
            },
        )

    return read


def read_store(store: Store, *, monotonic_ns: Callable[[], int] = time.monotonic_ns) -> Reader:
    """Return the reader of the store's size; it looks every `STORE_PAUSE_NS` at most.

    Args:
        store: An open store.
        monotonic_ns: Clock of the pause.
    """
    known: list[Reading] = []
    looked_ns: int | None = None

    def read() -> Iterable[Reading]:
        nonlocal known, looked_ns
        now_ns = monotonic_ns()
        if looked_ns is None or now_ns - looked_ns >= STORE_PAUSE_NS:
            known, looked_ns = _sizes(store), now_ns
        return known

    return read


def _sizes(store: Store) -> list[Reading]:
    try:
        found = store.rows(SIZES)
    except StoreError:
        found = None
    up = Reading(
        name="store_up",
        text="1 where the store answers.",
        values={"": float(found is not None)},
    )
    if found is None:
        return [up]
    texts = {
        "num_rows": ("store_rows", "Rows by table, repeated ones counted."),
        "num_bytes": ("store_bytes", "Bytes on disk by table."),
        "num_parts": ("store_parts", "Parts by table; many of them make reading slow."),
    }
    return [
        up,
        *(
            Reading(
                name=name,
                text=text,
                label="table",
                values={str(row["table"]): float(row[column]) for row in found},
            )
            for column, (name, text) in texts.items()
        ),
    ]


def read_edge(server: EdgeServer, doors: Listening, refusals: Refusals) -> Reader:
    """Return the reader of connections, refusals and the certificate's end."""

    def read() -> Iterable[Reading]:
        yield Reading(
            name="connections",
            text="Connections that are open.",
            values={"": server.num_connections},
        )
        yield Reading(
            name="refused_total",
            text="Who was turned away or cut off, by why.",
            label="reason",
            values={str(reason): count for reason, count in refusals.counts.items()},
        )
        if doors.renewal is not None:
            yield Reading(
                name="certificate_expires_seconds",
                text="Unix time at which the server's certificate ends.",
                values={"": doors.renewal.served.expires_s},
            )

    return read
