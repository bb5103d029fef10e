"""Server process: collect, analyse, alert, and serve the dashboard."""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING

from rankscope.collector.errors import StoreUnreachableError
from rankscope.collector.http.access import TrustedProxy
from rankscope.collector.read.control import ControlRequests
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
from .alert_config import AlertConfig, open_receiver, read_alert_config, read_secret, with_webhook
from .listen import ListenOptions, open_endpoint
from .logs import Log, log_lines
from .loops import LiveAnalysis, Loop, memory_loop, tail_loop
from .run_failures import RunFailures
from .signals import sigterm_as_interrupt
from .topology import PlacedSink, Topology, place_ranks, read_topology
from .upkeep import PartChecks, open_upkeep

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from rankscope.analysis.trace.tables import RunSummary
    from rankscope.collector.ingest.service import IngestService
    from rankscope.collector.notify.receiver import Receiver
    from rankscope.collector.spool.tail import SpoolTail
    from rankscope.collector.store.store import Store
    from rankscope.collector.store.writer import StoreWriter

    from .alert_watch import AlertWatch
    from .alerting import Alerting
    from .host_sampling import HostSampling
    from .listen import Endpoint
    from .reports import AnalyzeElsewhere, Reports


STORE_WAIT_S, STORE_PAUSE_S = 300, 2
"""Time for a store's server to start, and the pause between two attempts."""


class Part(StrEnum):
    """A half of the server. It can run alone if the store is a ClickHouse server."""

    COLLECTOR = "collector"
    """Receives and stores. Several collectors may write to one store."""

    DASHBOARD = "dashboard"
    """Analyses, alerts and serves the pages. One for each store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolOptions:
    """Flags about the spool of this host's ranks."""

    folder: Path
    owner: str | None = None
    """Owner of the runs in the spool. None: the server."""

    samples: bool = False
    """Whether to read the counters and the kernel's log of this host, beside the spool."""

    logs: tuple[str, ...] = ()
    """With samples: patterns of the paths of the ranks' logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertOptions:
    """Flags about alerts."""

    config: Path | None = None
    """File with rules and receivers. None: the default rules."""

    webhook: str | None = None
    webhook_file: Path | None = None
    """File with the URL of the webhook, which only its owner can read."""

    def read(self) -> AlertConfig:
        """Return the rules and receivers of all flags.

        Raises:
            BadInputError: A file is invalid or cannot be read, or others can read the URL.
        """
        config = AlertConfig() if self.config is None else read_alert_config(self.config)
        url = self.webhook
        if self.webhook_file is not None:
            url = read_secret("--alert-webhook-file", self.webhook_file)
        return with_webhook(config, url)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Settings of `rankscope serve`, a record for each part of the server."""

    store_url: str | None = None
    listen: ListenOptions = field(default_factory=ListenOptions)
    proxy: TrustedProxy | None = None
    spool: SpoolOptions | None = None
    alerts: AlertOptions = field(default_factory=AlertOptions)
    topology: Path | None = None
    keep: RetentionPolicy = field(default_factory=RetentionPolicy)
    """Retention times."""

    only: Part | None = None
    """The half of the server to run. None: both."""

    log_json: bool = False
    """Whether to log JSON documents, and to print no token."""

    def __post_init__(self) -> None:
        if self.only is Part.DASHBOARD and self.spool is not None:
            raise BadInputError(
                "--only dashboard does not read a spool: leave out --spool or --only"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalysisParts:
    """Settings of the analysis of a server."""

    before: Iterable[RunSummary]
    """The runs at the start, which raise no alerts if they ended long ago."""

    receivers: Sequence[Receiver] = ()
    """Receivers of alerts. Without any, alerts are only stored."""

    alerts: AlertConfig | None = None
    """Rules of alerts. None: the default rules."""

    num_signs: Mapping[str, int] = field(default_factory=dict)
    """Events of processes that stalled or ended, by run; grows."""

    analyze_elsewhere: AnalyzeElsewhere | None = None
    """Analyses large runs outside this process. None: they are analysed here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerParts:
    """The open parts of a server. Their creator closes them."""

    store: Store
    endpoint: Endpoint
    deletions: Deletions
    failures: RunFailures
    log: Log
    analysis: AnalysisParts | None
    """None: no run is analysed here, and there are no pages."""

    loops: Sequence[Loop] = ()
    ingest: IngestService | None = None
    """Service for agents. None: agents are not served."""

    proxy: TrustedProxy | None = None
    """Proxy that names clients and users. None: no header is trusted."""


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


def parse_proxy(user_header: str | None, addresses: Sequence[str]) -> TrustedProxy | None:
    """Return the proxy that ``--proxy-user-header`` and ``--proxy-address`` declare.

    Raises:
        BadInputError: The header has no address, or an address is none.
    """
    if not addresses:
        if user_header:
            raise BadInputError("--proxy-user-header needs --proxy-address")
        return None
    try:
        known = frozenset(str(ip_address(address)) for address in addresses)
    except ValueError as error:
        raise BadInputError(f"--proxy-address: {error}: give an address like 10.0.0.7") from error
    return TrustedProxy(header=(user_header or "").lower(), addresses=known)


def serve_store(options: ServeOptions) -> None:
    """Open a store and serve it until SIGINT or SIGTERM.

    Raises:
        BadInputError: The address cannot be served (`open_endpoint`), the spool cannot be read,
            or a file of the flags is invalid.
        TlsError: The certificate or its key cannot be used.
        WebhookUrlError: The URL of a webhook is invalid.
        ReceiverUrlError: The URL of another receiver is not known.
        StoreError: The store could not be opened.
    """
    from rankscope.collector.http.tokens import owner_name
    from rankscope.collector.store.owners import SERVER
    from rankscope.collector.store.writer import StoreWriter

    from .analysis_process import analyze_elsewhere

    url = options.store_url or default_store_url()
    spool = options.spool
    with ExitStack() as stack:
        stack.enter_context(sigterm_as_interrupt())
        log = stack.enter_context(log_lines(Log(as_json=options.log_json)))
        topology = Topology() if options.topology is None else read_topology(options.topology)
        alerts = options.alerts.read()
        receivers = []
        for receiver_config in alerts.receivers:
            receiver = open_receiver(receiver_config)
            stack.callback(receiver.close)
            receivers.append(receiver)
        endpoint = stack.enter_context(open_endpoint(options.listen))
        store = stack.enter_context(_open_when_up(url))
        stack.push(_exit_if_stuck)
        _log_damage(store)
        place_ranks(store, topology)
        # Listed before the first poll of the spool: runs that the spool adds raise alerts.
        before = StoreSource(store).runs()
        owner = SERVER if spool is None or not spool.owner else owner_name(spool.owner)
        deletions, writer = Deletions(store), StoreWriter(store, owner=owner)
        failures = RunFailures(store)
        loops: list[Loop] = []
        if spool is not None:
            tail, sink = _open_spool(spool.folder, writer, deletions, topology, stack)
            events = None
            if spool.samples:
                sampling = _open_sampling(spool, store, stack)
                events = sampling.events
                store_rows = partial(sampling.store, sink.upsert, placed=tail.placed_heartbeats)
                loops += [*sampling.loops, Loop("host-rows", store_rows)]
            loops.append(tail_loop(tail, ControlRequests(store), host_events=events, sink=sink))
        loops += [*open_upkeep(store, deletions, options.keep, failures), memory_loop(store)]
        has_ingest = options.only is not Part.DASHBOARD
        analysis = AnalysisParts(
            before=before,
            receivers=receivers,
            alerts=alerts,
            num_signs=writer.num_signs,
            analyze_elsewhere=partial(analyze_elsewhere, url),
        )
        serve_opened(
            ServerParts(
                store=store,
                endpoint=endpoint,
                deletions=deletions,
                failures=failures,
                log=log,
                analysis=None if options.only is Part.COLLECTOR else analysis,
                loops=loops,
                ingest=_open_ingest(store, writer, deletions, topology, stack)
                if has_ingest
                else None,
                proxy=options.proxy,
            )
        )


def _open_when_up(url: str) -> Store:
    """Open a store; wait for a server that does not answer yet, since both may start at once.

    Raises:
        StoreError: The store could not be opened, or did not answer for `STORE_WAIT_S`.
    """
    end_s = time.monotonic() + STORE_WAIT_S
    is_logged = False
    while True:
        try:
            return open_store(url, say=say)
        except StoreUnreachableError as error:
            if time.monotonic() >= end_s:
                raise
            if not is_logged:
                say(f"{error}; trying again for {STORE_WAIT_S // 60} minutes")
                is_logged = True
        time.sleep(STORE_PAUSE_S)


def serve_opened(parts: ServerParts) -> None:
    """Serve an open store until SIGINT or SIGTERM."""
    from rankscope.collector.http.access import Access
    from rankscope.collector.http.refusals import Refusals
    from rankscope.collector.http.tokens import TokenFile, default_tokens_path

    from ..sources.stored_reports import StoredReports
    from .alert_changes import alert_router
    from .annotations import annotation_router
    from .host_changes import host_router
    from .http_server import Monitoring, open_application, open_metrics, open_routers, run_server
    from .notes import note_router
    from .provider import StoreProvider
    from .reports import Reports
    from .served_report import report_router

    store, endpoint, log = parts.store, parts.endpoint, parts.log
    tokens = TokenFile(default_tokens_path())
    if tokens.problem is not None:
        say(f"{tokens.problem}; until then no token of this file is accepted")
    access = Access(port=endpoint.port, tokens=tokens, proxy=parts.proxy)
    log.hide(access.token)
    source = StoreSource(store)
    reports = Reports(
        source,
        stored=StoredReports(store),
        version=source.version,
        analyze_elsewhere=None if parts.analysis is None else parts.analysis.analyze_elsewhere,
    )
    loops = list(parts.loops)
    watch = None
    if parts.analysis is not None:
        analysis, watch = _open_analysis(parts, parts.analysis, source, reports)
        loops += [analysis, Loop("alerts", watch.turn)]
    part_checks = None if store.path is None else PartChecks(store)
    if part_checks is not None:
        loops.append(Loop("part-checks", part_checks.turn))
    with ExitStack() as stack:
        checks = [loop.why_stopped for loop in loops]
        if parts.ingest is not None:
            checks.append(parts.ingest.why_not_ready)
        monitoring = Monitoring(
            refusals=Refusals(log.write_event),
            metrics=open_metrics(store, loops, parts.ingest, reports, part_checks, watch),
        )
        routers = open_routers(store, parts.deletions, parts.ingest, stack)
        receivers = () if parts.analysis is None else parts.analysis.receivers
        routers.append(host_router(store, receivers, url=endpoint.url))
        provider = None
        if watch is not None:
            routers += [
                report_router(reports, source),
                alert_router(watch.alerting),
                note_router(store),
                annotation_router(store),
            ]
            provider = StoreProvider(
                source,
                reports,
                store=store,
                failures=parts.failures,
                alerting=watch.alerting,
                metrics=monitoring.metrics,
            )
        app = open_application(
            access,
            provider,
            checks,
            routers=routers,
            names=endpoint.names,
            monitoring=monitoring,
        )
        if store.path is not None:
            stack.callback(remove_server_file, store.path)
            _describe_server(store.path, url=endpoint.local_url, token=access.token)
        for loop in loops:
            stack.callback(loop.stop)
            loop.start()
        part = Part.COLLECTOR if provider is None else Part.DASHBOARD
        try:
            run_server(
                app,
                endpoint,
                monitoring,
                on_start=lambda: _announce(log, endpoint.url, access.token, part=part),
            )
        except KeyboardInterrupt:
            say("stopping")


def _open_analysis(
    parts: ServerParts, settings: AnalysisParts, source: StoreSource, reports: Reports
) -> tuple[Loop, AlertWatch]:
    from .alert_watch import AlertWatch
    from .finding_tracker import LiveFindings

    alerting = _alerting(
        parts.store, source, settings.receivers, settings.alerts, url=parts.endpoint.url
    )
    unsettled = alerting.unsettled_runs()
    live = LiveAnalysis(
        source,
        reports,
        alerting,
        LiveFindings(parts.store),
        before=[run for run in settings.before if run.run_id not in unsettled],
        failures=parts.failures,
        num_signs=settings.num_signs,
    )
    analysis = Loop("analysis", live.turn)
    watch = AlertWatch(
        parts.store,
        source,
        reports,
        alerting,
        failures=parts.failures,
        checks=[analysis.why_stopped],
    )
    return analysis, watch


def _exit_if_stuck(error: type[BaseException] | None, *_: object) -> None:
    """Exit at once if a client's statement cannot be cancelled. All rows are on disk."""
    from rankscope.collector.gateway import stuck_threads

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


def _open_spool(
    folder: Path, writer: StoreWriter, deletions: Deletions, topology: Topology, stack: ExitStack
) -> tuple[SpoolTail, PlacedSink]:
    """Return a tail that has polled the spool once, and its sink; an unreadable spool fails.

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
    return tail, sink


def _open_sampling(spool: SpoolOptions, store: Store, stack: ExitStack) -> HostSampling:
    import socket

    from rankscope.collector.read.host_checks import ExaminationRequests

    from .host_sampling import HostSampling

    requests, host = ExaminationRequests(store), socket.gethostname()
    sampling = HostSampling(
        spool.folder, rank_logs=spool.logs, is_wanted=lambda: bool(requests.wanted([host]))
    )
    stack.callback(sampling.close)
    return sampling


def _alerting(
    store: Store,
    source: StoreSource,
    receivers: Sequence[Receiver],
    config: AlertConfig | None,
    *,
    url: str,
) -> Alerting:
    from urllib.parse import urlencode

    from rankscope.analysis.drawing.rows import RowOrder
    from rankscope.dashboard.address import (
        HEALTH,
        INCIDENT,
        OVERVIEW,
        PROOF_PATH,
        TIMELINE,
        View,
        write_address,
    )

    from .alerting import Alerting

    base = ((config.url if config is not None else "") or url).rstrip("/") + "/"

    def page_url(run_id: str, step: int | None, ranks: Sequence[int]) -> str:
        page = HEALTH if not run_id else OVERVIEW if step is None else TIMELINE
        marked = () if step is None else tuple(ranks)
        # Marked ranks are its first rows: among 64, a rank may be below the screen.
        order = RowOrder.EXCESS if marked else RowOrder.PP
        view = View(page=page, run=run_id or None, step=step, ranks=marked, order=order)
        return write_address(view, base_path=base)

    def incident_url(run_id: str, number: int) -> str:
        return write_address(View(page=INCIDENT, run=run_id, show=str(number)), base_path=base)

    def picture_url(run_id: str, cause: str) -> str:
        return f"{base}{PROOF_PATH}?{urlencode({'run': run_id, 'cause': cause})}"

    def hosts_of(run_id: str) -> dict[int, str]:
        return {rank: info.host for rank, info in source.run_info(run_id).ranks.items()}

    return Alerting(
        store,
        receivers=receivers,
        config=config,
        page_url=page_url,
        incident_url=incident_url,
        picture_url=picture_url,
        hosts_of=hosts_of,
    )


def _open_ingest(
    store: Store,
    writer: StoreWriter,
    deletions: Deletions,
    topology: Topology,
    stack: ExitStack,
) -> IngestService:
    from rankscope.collector.ingest.service import IngestService
    from rankscope.collector.read.host_checks import ExaminationRequests

    service = IngestService(
        store,
        writer=writer,
        is_deleted=deletions.is_deleted,
        placed=topology.placed,
        to_examine=ExaminationRequests(store).wanted,
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
