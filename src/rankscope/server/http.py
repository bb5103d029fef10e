"""What a server answers with: its routes, its pages, its figures, and the doors before them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rankscope.collector.http.application import create_server
from rankscope.collector.http.deletion_routes import deletion_router
from rankscope.collector.http.gate import STRICT_POLICY
from rankscope.collector.http.limits import EdgeLimits, fit_connections
from rankscope.collector.http.metrics import Metrics
from rankscope.collector.http.socket_server import EdgeServer
from rankscope.collector.retention.deletion import Deletions

from .metrics import read_edge, read_ingest, read_loops, read_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import ExitStack

    from fastapi import APIRouter

    from rankscope.collector.http.gate import Access, AsgiApp
    from rankscope.collector.http.refusals import Refusals
    from rankscope.collector.ingest.service import IngestService
    from rankscope.collector.store.store import Store

    from .listen import Listening
    from .loops import Loop
    from .provider import StoreProvider


@dataclass(frozen=True, slots=True, kw_only=True)
class Guards:
    """What watches over all that is asked of the server."""

    refusals: Refusals
    metrics: Metrics


def open_routers(store: Store, ingest: IngestService | None, stack: ExitStack) -> list[APIRouter]:
    """Return the routes besides the pages.

    Args:
        store: An embedded one can be read by statements here; a server has its own address.
        ingest: Takes in what agents send; None: nothing is sent here.
        stack: Closes what the routes need.
    """
    routers = [deletion_router(store, Deletions.of(store))]
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
