"""The process beside a job that stores its records, follows its diagnosis and writes the verdict.

It has the lowest priority but for the samples of the host, and imports no torch: the job must not
notice it. It reads its settings and the end of the job from stdin, and writes messages to stdout.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import find_exit_code, format_error
from ..memory import keep_freed_memory
from ..terminal.lines import printable, wrap_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rankscope.analysis.report.report import RunReport
    from rankscope.collector.client.served_writer import RunWriter
    from rankscope.collector.spool.tail import SpoolTail, TailProgress
    from rankscope.collector.store.store import Store

    from ..server.host_sampling import HostSampling

POLL_S = 1.0
SPOOL_PAUSE_S = 0.2
LOWEST_PRIORITY = 19
HELD_S = 10.0
"""Time after the end of the job for which a store that another process holds is tried."""

MAX_LAST_POLLS = 40
SERVER_LOG = "serve.log"
SPOOL = "spool"
PROFILE_GLOB = "profile-*.json"
SERVE = (sys.executable, "-P", "-m", "rankscope", "serve")


NOT_TRACED = (
    "no process was traced: the job ended before one had imported torch, or Python's -E, -I or -S,"
    " or a PYTHONPATH that the command sets, kept the tracer out"
)
LABEL_WIDTH = 11


class Message(StrEnum):
    """Kind of a line that the observer writes, as JSON: [kind, text]."""

    STATUS = "status"
    """The state of the job, replacing the one before."""

    LINE = "line"
    """A line for the user."""

    VERDICT = "verdict"
    """The diagnosis at the end of the job, or why there is none. The last message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Task of an observer."""

    folder: str
    """Folder of the job, with its spool."""

    store_url: str
    serve: bool
    """Whether to serve the pages, until stdin ends."""

    port: int | None
    width: int
    """Columns of the verdict."""


def main() -> None:
    """Observe the job that stdin names."""
    keep_freed_memory()  # before numpy starts threads, each of which would get its own arena
    as_job = ThreadPoolExecutor(1)
    as_job.submit(int).result()  # starts its thread, whose priority is that of the job
    os.nice(LOWEST_PRIORITY)  # of this thread, and of those that it starts from now on
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the job
    settings = Settings(**json.loads(sys.stdin.readline()))
    job = Job()
    threading.Thread(target=job.follow, name="job", daemon=True).start()
    try:
        with ExitStack() as stack:
            if settings.serve:
                stack.enter_context(Server(settings))
            observe(settings, job, as_job)
            if settings.serve:
                job.abandoned.wait()
    except Exception as error:
        if find_exit_code(error) is None:
            raise
        spool = Path(settings.folder) / SPOOL
        _send(
            Message.VERDICT,
            f"rankscope: no diagnosis: {format_error(error)}. The records are in {spool}:"
            f" `rankscope import {spool} --format rankscope` stores them",
        )


class Job:
    """The state of the job, as its process writes it to stdin."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.abandoned = threading.Event()
        """Set when stdin ends: the messages are not read any more."""

    def follow(self) -> None:
        """Read stdin to its end."""
        if sys.stdin.readline():
            self.ended.set()
            sys.stdin.read()
        self.ended.set()
        self.abandoned.set()


def observe(settings: Settings, job: Job, as_job: ThreadPoolExecutor) -> None:
    """Store the records of a job until it ends, then send its verdict.

    Args:
        settings: What to do.
        job: The job.
        as_job: Runs what needs the priority of the job: at the lowest one, nothing of a host is
            read in time while all of its processors are busy.

    Raises:
        StoreError: The store could not be opened or written.
    """
    spool = Path(settings.folder) / SPOOL
    _send(Message.STATUS, "no process of the job has imported torch yet")
    while not spool.exists():
        if job.ended.wait(SPOOL_PAUSE_S):
            break
    if spool.exists():
        with closing(as_job.submit(_start_sampling, spool).result()) as sampling:
            is_stored = _follow(settings, job, sampling, as_job)
    else:
        _send(Message.VERDICT, f"rankscope: {NOT_TRACED}")
        is_stored = True
    if is_stored and not has_profiles(spool):
        shutil.rmtree(settings.folder, ignore_errors=True)


def has_profiles(spool: Path) -> bool:
    """Return whether the ranks of a spool have written profiles, which no store has."""
    return next(spool.glob(f"*/*/{PROFILE_GLOB}"), None) is not None


def _start_sampling(spool: Path) -> HostSampling:
    """Read this host from now on, in threads with the priority of this one."""
    from rankscope.collector.read.host_checks import FINDING, HEARTBEAT, RESTART

    from ..server.host_sampling import HostSampling

    sampling = HostSampling(spool, occasions=(RESTART, HEARTBEAT, FINDING))
    for loop in sampling.loops:
        loop.start()
    return sampling


class HostSide:
    """Samples and examinations of this host, and requests to its ranks, beside their records.

    Args:
        sampling: Samples, heartbeats, logs and examinations of this host.
        as_job: Runs what needs the priority of the job.
        store: The store.
        writer: Writer into it.
        tail: The cursor over the spool, which knows where its runs are stored.
    """

    def __init__(
        self,
        sampling: HostSampling,
        as_job: ThreadPoolExecutor,
        *,
        store: Store,
        writer: RunWriter,
        tail: SpoolTail,
    ) -> None:
        from rankscope.collector.host.host_events import HostEventRows
        from rankscope.collector.read.control import ControlRequests
        from rankscope.collector.read.host_checks import ExaminationRequests
        from rankscope.collector.spool.control import ControlWriter

        self._sampling = sampling
        self._as_job = as_job
        self._store = store
        self._writer = writer
        self._tail = tail
        self._host = socket.gethostname()
        self._events = HostEventRows(self._host, unix_ns=time.time_ns)
        self._requests = ExaminationRequests(store)
        self._control_requests = ControlRequests(store)
        self._control = ControlWriter(say=lambda _: None)

    def store(self) -> None:
        """Store what was read so far, with the runs that it belongs to."""
        self._events.note_running(self._tail.running)
        self._events.send(self._sampling.events.take(), self._writer.upsert)
        self._sampling.store(self._writer.upsert, placed=self._tail.placed_heartbeats)

    def pass_requests(self) -> None:
        """Give the ranks what the pages, or a command elsewhere, have requested of them."""
        running = self._tail.running
        for run_id in {files.run_id for files in running}:
            self._control.write(running, self._control_requests.of_run(run_id))

    def examine_if_named(self) -> None:
        """Have the host examined soon, if an open finding names it."""
        if self._requests.wanted([self._host]):
            self._sampling.watch.request_for_finding()

    def read_last(self) -> None:
        """Read and store once more what happened as the ranks ended; nothing after that."""
        for loop in self._sampling.loops:
            loop.stop()
        self._as_job.submit(self._sampling.sampler.turn).result()
        self.store()

    def examine_for(self, report: RunReport) -> None:
        """Examine the host now if the top finding names it, and it was not examined since."""
        from ..doctor.confirmation import find_unexamined

        if self._host in find_unexamined(self._store, report.run, report.top_finding):
            _send(Message.STATUS, "examining this host")
            self._as_job.submit(self._sampling.watch.examine_for_finding).result()
            self.store()


def _follow(
    settings: Settings, job: Job, sampling: HostSampling, as_job: ThreadPoolExecutor
) -> bool:
    """Store and diagnose what is in the spool; return whether all of it is stored."""
    from rankscope.analysis.trace.errors import AnalysisError
    from rankscope.collector.client.served_writer import run_writer
    from rankscope.collector.errors import StoreError
    from rankscope.collector.spool.tail import SegmentPolicy, SpoolTail

    spool = Path(settings.folder) / SPOOL
    with (
        closing(_open_store(settings, job)) as store,
        closing(run_writer(store)) as writer,
        closing(SpoolTail(spool, writer, segment_policy=SegmentPolicy.DELETE)) as tail,
    ):
        diagnosis = Diagnosis(store)
        host = HostSide(sampling, as_job, store=store, writer=writer, tail=tail)
        problems: list[str] = []
        pause_s = POLL_S
        while not job.ended.wait(pause_s):
            begun_s = time.monotonic()
            try:
                problems += tail.poll().problems
                host.store()
                host.pass_requests()
                _send(Message.STATUS, diagnosis.status(tail.runs))
                host.examine_if_named()
            except (StoreError, AnalysisError) as error:  # tried again, and at the end
                _send(Message.STATUS, format_error(error))
            pause_s = max(POLL_S, time.monotonic() - begun_s)
        _send(Message.STATUS, "storing the last records")
        last, more = _drain(tail)
        problems += more
        host.read_last()
        if not job.abandoned.is_set():
            _send(Message.STATUS, "the job has ended; analysing all of it")
            report = diagnosis.report(tail.runs)
            if report is not None:
                host.examine_for(report)
            _send(Message.VERDICT, "\n".join(diagnosis.verdict(report, settings, problems)))
        return not last.num_unreadable and not tail.unfinished and not tail.running


class Diagnosis:
    """The diagnosis of the newest run of a spool: made here, or by the server of the store."""

    def __init__(self, store: Store) -> None:
        from rankscope.collector.client.served_store import ServedStore

        from ..server.finding_tracker import LiveFindings
        from ..server.reports import Reports
        from ..sources.store_source import StoreSource
        from ..sources.stored_reports import StoredReports

        self._store = store
        self._source = StoreSource(store)
        self._server = store.server if isinstance(store, ServedStore) else None
        self._reports = Reports(self._source, stored=StoredReports(store))
        self._findings = LiveFindings(store, say=lambda _: None)
        self._reports.track_with(self._findings.track)

    def status(self, runs: tuple[str, ...]) -> str:
        """Return step, time and verdict of the newest run so far."""
        from rankscope.analysis.report.text import format_seconds
        from rankscope.analysis.verdict import verdict_line

        if not runs:
            return "starting"
        report = self._report(runs[-1])
        if report is None or not report.steps:
            return f"{runs[-1]}: no whole step yet"
        time_s = format_seconds(report.step_time_s.actual)
        return f"step {report.steps[-1]:,} | {time_s} | {verdict_line(report)}"

    def report(self, runs: tuple[str, ...]) -> RunReport | None:
        """Return the diagnosis of the run that has most steps; None if there is none."""
        reports = [report for run in runs if (report := self._report(run)) is not None]
        return max(reports, key=lambda report: len(report.steps), default=None)

    def verdict(
        self, report: RunReport | None, settings: Settings, problems: list[str]
    ) -> Iterator[str]:
        """Yield the lines of a diagnosis, and of what the host says beside its top finding."""
        from rankscope.analysis.report.advice import advise
        from rankscope.analysis.report.report import NOT_MEASURED
        from rankscope.analysis.severity import MATTERS
        from rankscope.analysis.verdict import verdict_sentence

        from ..doctor.confirmation import with_host_checks
        from ..terminal.proof_address import format_proof

        yield from (f"rankscope: {problem}" for problem in problems)
        if report is None:
            yield "rankscope: the job ended before a step that can be analysed: a step ends with"
            yield "           `optimizer.step()`, or `tracer.step()` in the job"
            return
        report = with_host_checks(self._store, report)
        top = report.top_finding
        advice = advise(top.cause, run=report.run, ranks=top.ranks, hosts=top.hosts)
        has_advice = advice is not None and top.severity in MATTERS
        rows = [
            ("rankscope", verdict_sentence(report, others="in the report")),
            *(
                ("host", f"{note.source}: {printable(note.text)}")
                for note in top.host_notes
                if note.source != NOT_MEASURED
            ),
            ("do", advice.do.replace("`", "") if advice is not None and has_advice else ""),
            ("proof", format_proof(report, self._server)),
            ("report", f"rankscope analyze {report.run}"),
            ("profiles", settings.folder if has_profiles(Path(settings.folder) / SPOOL) else ""),
        ]
        for label, text in rows:
            if text:
                yield from wrap_text(text, settings.width, first=f"{label}: ".ljust(LABEL_WIDTH))

    def _report(self, run_id: str) -> RunReport | None:
        from rankscope.collector.spool.descriptions import RUNNING

        from ..server.reports import find_run
        from ..server.served_report import fetch_report

        if self._server is not None:
            return fetch_report(self._server, run_id)
        summary = find_run(self._source, run_id)
        report = self._reports.refresh(summary)
        cost = self._reports.cost(run_id)
        if summary.state == RUNNING or report is None:
            self._findings.record(run_id, cost=cost)
        else:
            self._findings.update(report, is_over=True, cost=cost)
        return report


class Server:
    """`rankscope serve` on the store of a job, in a process of its own."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __enter__(self) -> None:
        from rankscope.collector.client.served_store import find_server

        self._process: subprocess.Popen[str] | None = None
        running = find_server(self._settings.store_url)
        if running is not None:
            _send(Message.LINE, f"dashboard: {running.url}, which serves this store already")
            return
        _send(Message.STATUS, "starting the dashboard")
        log = Path(self._settings.folder) / SERVER_LOG
        port = () if self._settings.port is None else ("--port", str(self._settings.port))
        with log.open("w") as file:
            self._process = subprocess.Popen(  # noqa: S603  # our own module
                [*SERVE, "--store", self._settings.store_url, *port],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        line = "" if self._process.stdout is None else self._process.stdout.readline().strip()
        if not line:
            reason = (log.read_text(errors="replace").strip().splitlines() or ["it ended"])[-1]
            _send(Message.LINE, f"no dashboard: {reason.removeprefix('rankscope: ')}")
            return
        _send(Message.LINE, line)

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()


def _open_store(settings: Settings, job: Job) -> Store:
    """Open the store; wait while another process, such as the one beside another job, holds it."""
    from rankscope.collector.client.served_store import open_for_reading
    from rankscope.collector.errors import StoreHeldError

    ended_s: float | None = None
    while True:
        try:
            return open_for_reading(settings.store_url)
        except StoreHeldError as error:
            if job.ended.is_set():
                ended_s = ended_s or time.monotonic()
                if time.monotonic() - ended_s >= HELD_S:
                    raise
            _send(Message.STATUS, f"waiting for the store: {error}")
            job.ended.wait(POLL_S)
            time.sleep(POLL_S)


def _drain(tail: SpoolTail) -> tuple[TailProgress, list[str]]:
    """Store the remaining rows; return the last progress, and the problems of all polls."""
    progress = tail.poll()
    problems = list(progress.problems)
    for _ in range(MAX_LAST_POLLS):
        if progress.num_cuts == 0 and progress.num_running == 0:
            break
        time.sleep(POLL_S if progress.num_cuts == 0 else 0)
        progress = tail.poll()
        problems += progress.problems
    return progress, problems


def _send(kind: Message, text: str) -> None:
    with suppress(OSError):  # they are not read any more
        sys.stdout.write(json.dumps([kind, text]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
