"""Server process: collect, analyse, alert, and serve the dashboard."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

from rankscope.collector.retention.deletion import Deletions
from rankscope.collector.retention.retention import RetentionPolicy
from rankscope.collector.store.location import (
    SERVER_FILE,
    default_store_url,
    remove_server_file,
    write_server_file,
)
from rankscope.collector.store.store import open_store

from ..errors import BadInputError
from ..sources.store_source import StoreSource
from ..terminal.lines import say
from .alert_config import AlertConfig, open_receiver, read_alert_config, with_webhook
from .listen import ListenOptions, open_endpoint
from .logs import Log, log_lines
from .loops import (
    NO_SIGNS,
    LiveAnalysis,
    analysis_loop,
    heartbeat_loop,
    memory_loop,
    sampler_loop,
    tail_loop,
)
from .run_failures import RunFailures
from .signals import sigterm_as_interrupt
from .topology import PlacedSink, Topology, place_ranks, read_topology
from .upkeep import PartChecks, open_upkeep, part_check_loop

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from rankscope.analysis.trace.tables import RunSummary
    from rankscope.collector.http.access import TrustedProxy
    from rankscope.collector.http.token_file import TokenFile
    from rankscope.collector.ingest.service import IngestService
    from rankscope.collector.notify.receiver import Receiver
    from rankscope.collector.spool.tail import SpoolTail
    from rankscope.collector.store.store import Store
    from rankscope.collector.store.writer import StoreWriter

    from .alerting import Alerting
    from .listen import Endpoint
    from .loops import Loop
    from .reports import AnalyzeElsewhere


MAX_URL_BYTES = 4096
"""Longer than any receiver's URL."""


class Part(StrEnum):
    """A half of the server. It can run alone if the store is a ClickHouse server."""

    COLLECTOR = "collector"
    """Receives and stores. Several collectors may write to one store."""

    DASHBOARD = "dashboard"
    """Analyses, alerts and serves the pages. One for each store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Flags of `rankscope serve`."""

    store_url: str | None = None
    spool: Path | None = None
    spool_owner: str | None = None
    """Owner of the runs in the spool. None: the server."""

    listen: ListenOptions = field(default_factory=ListenOptions)
    alert_webhook: str | None = None
    alert_webhook_file: Path | None = None
    """File with the URL, which only its owner can read."""

    proxy_user_header: str | None = None
    """Header in which a trusted proxy names the user. None: no header names a user."""

    proxy_addresses: tuple[str, ...] = ()
    """Addresses of that proxy."""

    config: Path | None = None
    """File with rules and receivers of alerts. None: the default rules."""

    topology: Path | None = None
    samples: bool = False
    """Whether to read the counters of this host once a second, beside the spool."""

    dcgm_url: str | None = None
    """Page of the DCGM exporter to read the GPUs from. None: the driver."""

    keep: RetentionPolicy = field(default_factory=RetentionPolicy)
    """Retention times."""

    only: Part | None = None
    """The half of the server to run. None: both."""

    log_json: bool = False
    """Whether to log JSON documents, and to print no token."""


def parse_part(text: str | None) -> Part | None:
    """Return the half of the server that ``--only`` names; None if the flag is not given.

    Raises:
        BadInputError: There is no such half.
    """
    if text is None:
        return None
    try:
        return Part(text)
    except ValueError as error:
        raise BadInputError(f"unknown --only {text}: give collector or dashboard") from error


def serve_store(options: ServeOptions) -> None:
    """Open a store and serve it until SIGINT or SIGTERM.

    Raises:
        BadInputError: The address cannot be served (`open_endpoint`), the spool cannot be read,
            the topology file is invalid, or a dashboard alone was given a spool.
        TlsError: The certificate or its key cannot be used.
        WebhookUrlError: The URL of a webhook is invalid.
        ReceiverUrlError: The URL of another receiver is not known.
        StoreError: The store could not be opened.
    """
    from rankscope.collector.http.tokens import owner_name
    from rankscope.collector.store.owners import SERVER
    from rankscope.collector.store.writer import StoreWriter

    from .analysis_process import analyze_elsewhere

    if options.only is Part.DASHBOARD and options.spool is not None:
        raise BadInputError("--only dashboard does not read a spool: leave out --spool or --only")
    with ExitStack() as stack:
        stack.enter_context(sigterm_as_interrupt())
        log = stack.enter_context(log_lines(Log(as_json=options.log_json)))
        topology = Topology() if options.topology is None else read_topology(options.topology)
        config = AlertConfig() if options.config is None else read_alert_config(options.config)
        config = with_webhook(config, _webhook_url(options))
        receivers = _open_receivers(config, stack)
        endpoint = stack.enter_context(open_endpoint(options.listen))
        store = stack.enter_context(open_store(options.store_url or default_store_url()))
        stack.push(_exit_if_stuck)
        _log_damage(store)
        place_ranks(store, topology)
        # Listed before the first poll of the spool: runs that the spool adds raise alerts.
        before = StoreSource(store).runs()
        owner = owner_name(options.spool_owner) if options.spool_owner else SERVER
        deletions, writer = Deletions(store), StoreWriter(store, owner=owner)
        failures = RunFailures(store)
        tail = (
            None
            if options.spool is None
            else _open_spool(options.spool, writer, deletions, topology, stack)
        )
        loops = [
            open_upkeep(store, deletions, options.keep, failures),
            memory_loop(store),
            *_sampler_loops(options, store, deletions, tail, stack),
        ]
        has_ingest = options.only is not Part.DASHBOARD
        serve_opened(
            store,
            endpoint,
            deletions,
            tail=tail,
            receivers=receivers,
            alert_config=config,
            before=before if options.only is not Part.COLLECTOR else None,
            failures=failures,
            num_signs=writer.num_signs,
            analyze_elsewhere=partial(analyze_elsewhere, options.store_url or default_store_url()),
            loops=loops,
            ingest=_open_ingest(store, writer, deletions, topology, stack) if has_ingest else None,
            log=log,
            proxy=_trusted_proxy(options),
        )


def _trusted_proxy(options: ServeOptions) -> TrustedProxy | None:
    """Return the proxy of the flags.

    Raises:
        BadInputError: One of the two flags is missing, or an address is none.
    """
    from ipaddress import ip_address

    from rankscope.collector.http.access import TrustedProxy

    if not options.proxy_user_header and not options.proxy_addresses:
        return None
    if not options.proxy_user_header or not options.proxy_addresses:
        raise BadInputError("give --proxy-user-header and --proxy-address together, or neither")
    try:
        addresses = frozenset(str(ip_address(each)) for each in options.proxy_addresses)
    except ValueError as error:
        raise BadInputError(f"--proxy-address: {error}: give an address like 10.0.0.7") from error
    return TrustedProxy(header=options.proxy_user_header.lower(), addresses=addresses)


def serve_opened(  # noqa: PLR0913, PLR0915  # the parts of a server
    store: Store,
    endpoint: Endpoint,
    deletions: Deletions,
    *,
    tail: SpoolTail | None,
    receivers: Sequence[Receiver] = (),
    alert_config: AlertConfig | None = None,
    before: Iterable[RunSummary] | None,
    failures: RunFailures | None = None,
    num_signs: Mapping[str, int] = NO_SIGNS,
    analyze_elsewhere: AnalyzeElsewhere | None = None,
    loops: Iterable[Loop] = (),
    ingest: IngestService | None = None,
    log: Log | None = None,
    proxy: TrustedProxy | None = None,
) -> None:
    """Serve an open store until SIGINT or SIGTERM. The caller closes what it passes.

    Args:
        store: The store.
        endpoint: The listeners.
        deletions: Tombstones of the store.
        tail: Reader of the spool of this host's ranks. None: no spool is read.
        receivers: Receivers of alerts. Without any, alerts are only stored.
        alert_config: Rules of alerts. None: the default rules.
        before: The runs at the start, which raise no alerts if they ended long ago. None: no run
            is analysed here, and there are no pages.
        failures: Failures of single runs. None: those of these loops.
        num_signs: Events of processes that stalled or ended, by run; grows.
        analyze_elsewhere: Analyses large runs outside this process. None: they are analysed here.
        loops: Further loops.
        ingest: Service for agents. None: agents are not served.
        log: The log. None: text on stderr.
        proxy: Proxy that signs users in. None: no header names a user.
    """
    from rankscope.collector.http.access import Access
    from rankscope.collector.http.refusals import Refusals

    from ..sources.stored_reports import StoredReports
    from .alert_changes import change_router
    from .alert_watch import AlertWatch, alert_loop
    from .finding_tracker import LiveFindings
    from .http_server import Monitoring, open_application, open_metrics, open_routers, run_server
    from .provider import StoreProvider
    from .reports import Reports
    from .served_report import report_router

    access = Access(port=endpoint.port, tokens=_open_tokens(), proxy=proxy)
    failures = failures or RunFailures(store)
    log = log or Log()
    log.hide(access.token)
    source = StoreSource(store)
    reports = Reports(source, stored=StoredReports(store), analyze_elsewhere=analyze_elsewhere)
    all_loops = [] if tail is None else [tail_loop(tail)]
    watch = None
    if before is not None:
        alerting = _alerting(store, source, receivers, alert_config, url=endpoint.url)
        unsettled = alerting.unsettled_runs()
        before = [run for run in before if run.run_id not in unsettled]
        findings = LiveFindings(store)
        live = LiveAnalysis(
            source,
            reports,
            alerting,
            findings,
            before=before,
            failures=failures,
            num_signs=num_signs,
        )
        analysis = analysis_loop(live)
        watch = AlertWatch(
            store, source, reports, alerting, failures=failures, checks=[analysis.why_stopped]
        )
        all_loops += [analysis, alert_loop(watch)]
    all_loops += loops
    part_checks = None if store.path is None else PartChecks(store)
    if part_checks is not None:
        all_loops.append(part_check_loop(part_checks))
    with ExitStack() as stack:
        checks = [loop.why_stopped for loop in all_loops]
        if ingest is not None:
            checks.append(ingest.why_not_ready)
        monitoring = Monitoring(
            refusals=Refusals(log.write_event),
            metrics=open_metrics(store, all_loops, ingest, reports, part_checks, watch),
        )
        app = open_application(
            access,
            None
            if before is None
            else StoreProvider(
                source,
                reports,
                store=store,
                failures=failures,
                alerting=None if watch is None else watch.alerting,
                metrics=monitoring.metrics,
            ),
            checks,
            routers=[
                *open_routers(store, deletions, ingest, stack),
                *([] if before is None else [report_router(reports, source)]),
                *([] if watch is None else [change_router(watch.alerting)]),
            ],
            names=endpoint.names,
            monitoring=monitoring,
        )
        if store.path is not None:
            stack.callback(remove_server_file, store.path)
            _describe_server(store.path, url=endpoint.local_url, token=access.token)
        for loop in all_loops:
            stack.callback(loop.stop)
            loop.start()
        try:
            run_server(
                app,
                endpoint,
                monitoring,
                on_start=lambda: _announce(
                    log,
                    endpoint.url,
                    access.token,
                    part=Part.COLLECTOR if before is None else Part.DASHBOARD,
                ),
            )
        except KeyboardInterrupt:
            say("stopping")


def _exit_if_stuck(error: type[BaseException] | None, *_: object) -> None:
    """Exit at once if a client's statement cannot be cancelled. All rows are on disk."""
    from rankscope.collector.gateway.engine import stuck_threads

    if error is None and stuck_threads():
        say("exiting although a statement still runs: it could not be cancelled")
        sys.stdout.flush()
        os._exit(0)


def _log_damage(store: Store) -> None:
    """Log the damaged parts of an embedded store. A ClickHouse server has its own log."""
    if store.path is None:
        return
    from rankscope.collector.store.store import read_damage

    for line in read_damage(store):
        say(line)


def _describe_server(folder: Path, *, url: str, token: str) -> None:
    """Write the server's file. On a full disk the server serves reads without it."""
    try:
        write_server_file(folder, url=url, token=token)
    except OSError as error:
        say(
            f"cannot write {folder / SERVER_FILE} ({error.strerror}): commands on this host cannot"
            " find this server, and it may store nothing; free some space and restart it"
        )


def _open_tokens() -> TokenFile:
    from rankscope.collector.http.token_file import TokenFile, default_tokens_path

    book = TokenFile(default_tokens_path())
    if book.problem is not None:
        say(f"{book.problem}; until then no token of this file is accepted")
    return book


def _webhook_url(options: ServeOptions) -> str | None:
    """Return the URL of the webhook, from its file if one is given.

    Raises:
        BadInputError: The file cannot be read, or others can.
    """
    from rankscope.collector.errors import TokenFileError
    from rankscope.collector.http.token_file import read_private

    path = options.alert_webhook_file
    if path is None:
        return options.alert_webhook
    try:
        return read_private(path, max_bytes=MAX_URL_BYTES).decode().strip()
    except (TokenFileError, OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"--alert-webhook-file {path} can't be used: {error}") from error


def _open_receivers(config: AlertConfig, stack: ExitStack) -> list[Receiver]:
    receivers = []
    for each in config.receivers:
        receiver = open_receiver(each)
        stack.callback(receiver.close)
        receivers.append(receiver)
    return receivers


def _open_spool(
    folder: Path, writer: StoreWriter, deletions: Deletions, topology: Topology, stack: ExitStack
) -> SpoolTail:
    """Return a tail that has polled the spool once, so that an unreadable spool fails the start.

    Raises:
        BadInputError: The spool is not empty, and nothing of it can be read.
    """
    from rankscope.collector.retention.deletion import DeletedRunFilter
    from rankscope.collector.spool.tail import SegmentPolicy, SpoolTail

    sink = PlacedSink(DeletedRunFilter(writer, deletions), topology)
    # A rank that has used up its quota of the spool drops records, and /dev/shm is memory.
    tail = SpoolTail(folder, sink, segment_policy=SegmentPolicy.DELETE)
    stack.callback(tail.close)
    if not folder.is_dir():
        say(f"there is no folder {folder} yet: it is read once the ranks have made it")
    progress = tail.poll()
    if progress.problems and not progress.num_processes:
        raise BadInputError(progress.problems[0])
    for problem in progress.problems:
        say(problem)
    return tail


def _sampler_loops(
    options: ServeOptions,
    store: Store,
    deletions: Deletions,
    tail: SpoolTail | None,
    stack: ExitStack,
) -> list[Loop]:
    if options.spool is None or tail is None or not options.samples:
        return []
    import socket

    from rankscope.collector.agent.buffer import RowBuffer
    from rankscope.collector.agent.outbox import MAX_HEARTBEATS
    from rankscope.collector.host.heartbeat import heartbeat_sink
    from rankscope.collector.host.sampler import Sampler, host_sources, store_sink

    sink = store_sink(store, host=socket.gethostname())
    beats = RowBuffer(MAX_HEARTBEATS)
    sources = host_sources(
        options.spool, dcgm_url=options.dcgm_url, on_heartbeats=heartbeat_sink(beats.add)
    )
    sampler = Sampler(sources, sink, say=say)
    stack.callback(sampler.close)
    heartbeats = heartbeat_loop(store, beats, deletions, placed=tail.placed_heartbeats)
    return [sampler_loop(sampler), heartbeats]


def _alerting(
    store: Store,
    source: StoreSource,
    receivers: Sequence[Receiver],
    config: AlertConfig | None,
    *,
    url: str,
) -> Alerting:
    from rankscope.analysis.drawing.rows import RowOrder
    from rankscope.dashboard.address import OVERVIEW, TIMELINE, View, write_address

    from .alerting import Alerting

    base = ((config.url if config is not None else "") or url).rstrip("/") + "/"

    def page_url(run_id: str, step: int | None, ranks: Sequence[int]) -> str:
        page = OVERVIEW if step is None else TIMELINE
        marked = () if step is None else tuple(ranks)
        # Marked ranks are its first rows: among 64, a rank may be below the screen.
        order = RowOrder.EXCESS if marked else RowOrder.PP
        view = View(page=page, run=run_id or None, step=step, ranks=marked, order=order)
        return write_address(view, base_path=base)

    def hosts_of(run_id: str) -> dict[int, str]:
        return {rank: info.host for rank, info in source.run_info(run_id).ranks.items()}

    return Alerting(store, receivers=receivers, config=config, page_url=page_url, hosts_of=hosts_of)


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
    if log.as_json:  # stdout is likely kept in a journal then, which must not hold a token
        log.write_event("serving", {"url": url})
        return
    sys.stdout.write(f"{part}: {url}/?token={token}\n(stop it with Ctrl-C)\n")
    sys.stdout.flush()
