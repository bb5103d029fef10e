"""`rankscope serve`: one process that collects, analyses, alerts and shows."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from rankscope.collector.retention.deletion import Deletions
from rankscope.collector.retention.retention import Keep
from rankscope.collector.store.location import (
    default_store_url,
    remove_server_file,
    write_server_file,
)
from rankscope.collector.store.store import open_store

from ..errors import BadInputError
from ..sources.store_source import StoreSource
from ..terminal.lines import say
from .listen import ListenOptions, listening
from .logs import Log, logged_to
from .loops import LiveAnalysis, analysis_loop, heartbeat_loop, memory_loop, sampler_loop, tail_loop
from .signals import sigterm_as_interrupt
from .topology import PlacedSink, Topology, place_ranks, read_topology
from .upkeep import open_upkeep

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from rankscope.analysis.trace.tables import RunSummary
    from rankscope.collector.http.token_file import TokenBook
    from rankscope.collector.ingest.service import IngestService
    from rankscope.collector.notify.webhook import Webhook
    from rankscope.collector.spool.tail import SpoolTail
    from rankscope.collector.store.store import Store
    from rankscope.collector.store.writer import StoreWriter

    from .alerting import Alerting
    from .listen import Listening
    from .loops import Loop


class Part(StrEnum):
    """A half of the server that can run without the other, where the store is a server."""

    COLLECTOR = "collector"
    """Takes in; any number of them may write to one store."""

    DASHBOARD = "dashboard"
    """Analyses, alerts and shows; one is enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Flags of `rankscope serve`."""

    store_url: str | None = None
    spool: Path | None = None
    listen: ListenOptions = field(default_factory=ListenOptions)
    alert_webhook: str | None = None
    topology: Path | None = None
    samples: bool = False
    """Whether this host is read once a second, beside the spool."""

    keep: Keep = field(default_factory=Keep)
    """How long what is kept."""

    only: Part | None = None
    """One half of the server; None: both."""

    log_json: bool = False
    """Whether it says what it says as JSON documents, and no token on stdout."""


def parse_part(text: str | None) -> Part | None:
    """Return the half of the server that a flag names.

    Raises:
        BadInputError: There is no such half.
    """
    if text is None:
        return None
    try:
        return Part(text)
    except ValueError as error:
        raise BadInputError(f"--only {text}: give collector or dashboard") from error


def serve_store(options: ServeOptions) -> None:
    """Serve until SIGINT or SIGTERM, then end cleanly.

    Raises:
        BadInputError: Others could reach the host and something is missing for that, the port
            is taken, nothing of the spool can be read, the topology file is not of its form, or a
            dashboard alone was given a spool.
        TlsError: The certificate can't be served.
        WebhookUrlError: The webhook's address cannot be posted to.
        StoreError: The store could not be opened.
    """
    from rankscope.collector.store.writer import StoreWriter

    if options.only is Part.DASHBOARD and options.spool is not None:
        raise BadInputError("a dashboard alone follows no spool: leave out --spool, or --only")
    with ExitStack() as stack:
        stack.enter_context(sigterm_as_interrupt())
        log = stack.enter_context(logged_to(Log(as_json=options.log_json)))
        topology = _read_topology(options.topology)
        webhook = _open_webhook(options.alert_webhook, stack)
        doors = stack.enter_context(listening(options.listen))
        store = stack.enter_context(open_store(options.store_url or default_store_url()))
        stack.push(_leave_what_is_stuck)
        _tell_damage(store)
        place_ranks(store, topology)
        # Noted before the first look at the spool: what it brings is news to alert on.
        before = StoreSource(store).runs()
        deletions, writer = Deletions(store), StoreWriter(store)
        tail = (
            None
            if options.spool is None
            else _open_spool(options.spool, writer, deletions, topology, stack)
        )
        besides = [
            open_upkeep(store, deletions, options.keep),
            memory_loop(store),
            *_sampler_loops(options, store, deletions, stack),
        ]
        takes_in = options.only is not Part.DASHBOARD
        serve_opened(
            store,
            doors,
            deletions,
            tail=tail,
            webhook=webhook,
            before=before if options.only is not Part.COLLECTOR else None,
            besides=besides,
            ingest=_open_ingest(store, writer, deletions, topology, stack) if takes_in else None,
            log=log,
        )


def serve_opened(  # noqa: PLR0913  # what a server is made of
    store: Store,
    doors: Listening,
    deletions: Deletions,
    *,
    tail: SpoolTail | None,
    webhook: Webhook | None,
    before: Iterable[RunSummary] | None,
    besides: Iterable[Loop] = (),
    ingest: IngestService | None = None,
    log: Log | None = None,
) -> None:
    """Serve an open store at open doors until SIGINT or SIGTERM.

    Args:
        store: The store; the caller closes it.
        doors: Where to listen; the caller closes them.
        deletions: The store's tombstones.
        tail: Follows the spool that ranks write to; None: only what the store holds is shown.
        webhook: Receiver of alerts; the caller closes it.
        before: The runs as the store had them at the start: no alert tells of these again;
            None: nothing is analysed here, and there are no pages.
        besides: Further loops.
        ingest: Takes in what agents send; None: nothing is sent here.
        log: Takes what there is to tell; None: stderr, as text.
    """
    from rankscope.collector.http.gate import Access
    from rankscope.collector.http.refusals import Refusals

    from .finding_tracker import Tracking
    from .http_server import Guards, open_application, open_metrics, open_routers, run_server
    from .provider import StoreProvider
    from .reports import Reports

    access = Access(port=doors.port, tokens=_open_tokens())
    log = log or Log()
    log.hide(access.token)
    source = StoreSource(store)
    reports = Reports(source)
    loops = [] if tail is None else [tail_loop(tail)]
    if before is not None:
        alerting = _alerting(store, webhook=webhook, url=doors.url)
        tracking = Tracking(store)
        loops.append(
            analysis_loop(LiveAnalysis(source, reports, alerting, tracking, before=before))
        )
    loops += besides
    with ExitStack() as stack:
        checks = [loop.why_stopped for loop in loops]
        if ingest is not None:
            checks.append(ingest.why_not_ready)
        guards = Guards(refusals=Refusals(log.tell), metrics=open_metrics(store, loops, ingest))
        app = open_application(
            access,
            None if before is None else StoreProvider(source, reports, store=store),
            checks,
            routers=open_routers(store, deletions, ingest, stack),
            names=doors.names,
            guards=guards,
        )
        if store.path is not None:
            write_server_file(store.path, url=doors.local_url, token=access.token)
            stack.callback(remove_server_file, store.path)
        for loop in loops:
            stack.callback(loop.stop)
            loop.start()
        part = Part.COLLECTOR if before is None else Part.DASHBOARD
        try:
            run_server(
                app,
                doors,
                guards,
                on_start=lambda: _announce(log, doors.url, access.token, part=part),
            )
        except KeyboardInterrupt:
            say("stopping")


def _leave_what_is_stuck(error: type[BaseException] | None, *_: object) -> None:
    """End the process at once where a reader's statement can't be ended: all rows are on disk."""
    from rankscope.collector.gateway.workers import left_behind

    if error is None and left_behind():
        say("a statement that can't be ended is left")
        sys.stdout.flush()
        os._exit(0)


def _tell_damage(store: Store) -> None:
    """Say what an embedded store lacks; a server of its own has its own log."""
    if store.path is None:
        return
    from rankscope.collector.store.store import read_damage

    for line in read_damage(store):
        say(line)


def _open_tokens() -> TokenBook:
    from rankscope.collector.http.token_file import TokenBook, default_tokens_path

    book = TokenBook(default_tokens_path())
    if book.problem is not None:
        say(f"{book.problem}; until then no token of it opens anything")
    return book


def _open_webhook(url: str | None, stack: ExitStack) -> Webhook | None:
    if url is None:
        return None
    from rankscope.collector.notify.webhook import Webhook

    webhook = Webhook(url, is_inside=os.environ.get("RANKSCOPE_ALERT_WEBHOOK_INSIDE") == "1")
    stack.callback(webhook.close)
    return webhook


def _read_topology(path: Path | None) -> Topology:
    return Topology() if path is None else read_topology(path)


def _open_spool(
    folder: Path, writer: StoreWriter, deletions: Deletions, topology: Topology, stack: ExitStack
) -> SpoolTail:
    """Return a tail that has looked once, so that a spool that can't be read fails at once.

    Raises:
        BadInputError: Something is there, and none of it can be read.
    """
    from rankscope.collector.retention.deletion import UndeletedSink
    from rankscope.collector.spool.tail import SegmentPolicy, SpoolTail

    # A rank whose share of the spool is full would drop what comes next.
    sink = PlacedSink(UndeletedSink(writer, deletions), topology)
    tail = SpoolTail(folder, sink, segment_policy=SegmentPolicy.DELETE_WHILE_RUNNING)
    stack.callback(tail.close)
    progress = tail.poll()
    if progress.problems and not progress.num_processes:
        raise BadInputError(progress.problems[0])
    for problem in progress.problems:
        say(problem)
    return tail


def _sampler_loops(
    options: ServeOptions, store: Store, deletions: Deletions, stack: ExitStack
) -> list[Loop]:
    if options.spool is None or not options.samples:
        return []
    import socket

    from rankscope.collector.agent.buffer import RowBuffer
    from rankscope.collector.agent.outbox import MAX_HEARTBEATS
    from rankscope.collector.host.heartbeat_rows import beat_sink
    from rankscope.collector.host.sampler import Sampler
    from rankscope.collector.host.sources import host_sources
    from rankscope.collector.host.table import store_sink

    sink = store_sink(store, host=socket.gethostname())
    beats = RowBuffer(MAX_HEARTBEATS)
    sources = host_sources(options.spool, on_heartbeats=beat_sink(beats.add))
    sampler = Sampler(sources, sink, say=say)
    stack.callback(sampler.close)
    return [sampler_loop(sampler), heartbeat_loop(store, beats, deletions)]


def _alerting(store: Store, *, webhook: Webhook | None, url: str) -> Alerting:
    from rankscope.dashboard.address import View, write_address

    from .alerting import Alerting

    def page_url(run_id: str) -> str:
        return write_address(View(run=run_id), base_path=f"{url}/")

    return Alerting(store, webhook=webhook, page_url=page_url)


def _open_ingest(
    store: Store,
    writer: StoreWriter,
    deletions: Deletions,
    topology: Topology,
    stack: ExitStack,
) -> IngestService:
    from rankscope.collector.ingest.service import IngestService

    service = IngestService(
        store,
        writer=writer,
        is_deleted=deletions.is_deleted,
        placed=topology.placed,
        say=say,
    )
    stack.callback(service.close)
    service.start()
    return service


def _announce(log: Log, url: str, token: str, *, part: Part) -> None:
    if log.as_json:  # then stdout goes to a journal, where a token has no place
        log.tell("serving", {"url": url})
        return
    sys.stdout.write(f"{part}: {url}/?token={token}\n(Ctrl-C ends it)\n")
    sys.stdout.flush()
