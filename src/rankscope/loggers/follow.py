"""Follows a stored run while it lives, and logs what is new of it."""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from rankscope.analysis.report.report import Severity
from rankscope.analysis.report.text import format_count
from rankscope.analysis.trace.errors import UnknownRunError
from rankscope.analysis.verdict import verdict_sentence
from rankscope.collector.client.served_store import ServedStore, open_for_reading
from rankscope.collector.errors import StoreError
from rankscope.collector.new_file import new_file
from rankscope.collector.read.steps import read_step_times
from rankscope.collector.spool.descriptions import RUNNING
from rankscope.collector.store.location import default_store_url

from ..errors import FailedError
from ..server.reports import Reports, find_run
from ..server.run_answer import find_or_analyze
from ..server.served_report import fetch_report
from ..sources.store_source import StoreSource
from ..terminal.proof_address import format_report_address
from .records import Diagnosis, LoggedStep, Target
from .sinks import SINKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from rankscope.analysis.report.report import Finding, RunReport
    from rankscope.analysis.trace.tables import RunSummary
    from rankscope.collector.store.store import Store

    from .records import Sink

LOOK_S = 10.0
"""Pause between two looks at a run."""

HANG_S = 30.0
"""Time without a new step after which the run is diagnosed again: a hang brings none."""

MAX_STEPS = 1_000_000
"""Newest steps that are logged."""

TRACKERS = frozenset({"httpx", "huggingface_hub", "mlflow", "requests", "trackio", "wandb"})
"""Packages whose errors say that a tracker failed; they have no common base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRequest:
    """Arguments of `rankscope log`."""

    run: str
    to: str
    """One of `SINKS`."""

    into: str | None = None
    address: str | None = None
    """Where people open the pages; None: the server of the store."""

    waits: bool = False
    """Wait until the store has the run."""

    store_url: str | None = None


@dataclass(slots=True, kw_only=True)
class Logged:
    """Rows that were logged of a run into one place, as a file keeps them."""

    into: str | None = None
    """Where, as the sink says it."""

    step: int = -1
    """Newest step."""

    verdict: list[str] = field(default_factory=list)
    """Texts of the last diagnosis."""

    findings: list[list[str]] = field(default_factory=list)
    """Cause, severity and ranks of each finding."""


def log_run(
    request: LogRequest,
    *,
    folder: Path,
    show: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Log a run until it has ended, and return a line that says what was logged.

    While it lives, a store or a tracker that fails is tried again. Steps that a restart repeats are
    logged once, as they were first.

    Args:
        request: What to log, and where.
        folder: Where it is kept what was logged.
        show: Takes a line for the user.
        sleep: Waits for some seconds.

    Raises:
        UnknownRunError: The store holds no run of this name.
        EmptyRunError: The run has ended without a step.
        BadInputError: The package of the tracker is not installed.
        FailedError: The tracker failed at the beginning, or after the run's end.
        StoreError: The store failed likewise.
    """
    with closing(_Follower(request, folder=folder, show=show)) as follower:
        while not follower.is_over:
            try:
                follower.look()
            except UnknownRunError:
                if not request.waits or follower.has_begun:
                    raise
            except (StoreError, FailedError, OSError) as error:
                if follower.has_ended or not follower.has_begun:
                    raise
                follower.reopen(error)
            if not follower.is_over:
                sleep(LOOK_S)
    return follower.summarize()


class _Follower:
    """A run, the tracker into which it is logged, and what was logged."""

    def __init__(self, request: LogRequest, *, folder: Path, show: Callable[[str], None]) -> None:
        self._request, self._folder, self._show = request, folder, show
        self._reader: _Reader | None = None
        self._sink: Sink | None = None
        self._logged, self._path = Logged(), folder
        self._failure = ""
        self.has_ended = False
        """Whether the run had ended at the last look."""

        self.is_over = False
        """Whether an ended run is logged."""

    @property
    def has_begun(self) -> bool:
        """Return whether the tracker has been opened."""
        return self._sink is not None

    def look(self) -> None:
        """Log what is new of the run."""
        self._reader = self._reader or _Reader(self._request)
        summary = self._reader.find()
        self.has_ended = summary.state != RUNNING
        with _tracker_failures(self._request.to):
            self._sink = self._sink or self._open(summary)
            new = self._reader.read_new(summary, after=self._logged.step)
            if new is not None:
                _write(self._sink, *new, self._logged)
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with new_file(self._path, mode=0o600) as file:
                    file.write(json.dumps(asdict(self._logged)).encode())
        self.is_over = self.has_ended

    def reopen(self, error: Exception) -> None:
        """Open the store anew at the next look, and say why."""
        if str(error) != self._failure:
            self._show(f"{error}: trying again")
        self._failure = str(error)
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def summarize(self) -> str:
        """Return a line that says what is logged."""
        num = format_count(len(self._logged.findings), "finding")
        return f"logged run {self._request.run} up to step {self._logged.step}, with {num}"

    def close(self) -> None:
        """Close store and tracker."""
        if self._reader is not None:
            self._reader.close()
        if self._sink is not None:
            with _tracker_failures(self._request.to):
                self._sink.close(has_ended=self.is_over)

    def _open(self, summary: RunSummary) -> Sink:
        request = self._request
        store = request.store_url or default_store_url()
        texts = (store, request.run, str(summary.started_ns), request.to, request.into or "")
        name = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]
        self._path = self._folder / f"{name}.json"
        self._logged = Logged()
        with suppress(FileNotFoundError):
            self._logged = Logged(**json.loads(self._path.read_text(encoding="utf-8")))
        target = Target(
            run=request.run,
            started_ns=summary.started_ns or 0,
            into=request.into or self._logged.into,
        )
        sink = SINKS[request.to](target)
        self._logged.into = sink.into
        self._show(f"logging run {request.run} into {request.to}: {sink.into}")
        return sink


def _write(sink: Sink, steps: Sequence[LoggedStep], diagnosis: Diagnosis, logged: Logged) -> None:
    """Write what is new, and note it."""
    if steps:
        sink.log_steps(steps)
    known = [_finding_key(finding) for finding in diagnosis.findings]
    new = [
        finding
        for finding, key in zip(diagnosis.findings, known, strict=True)
        if key not in logged.findings
    ]
    texts = [diagnosis.verdict, str(diagnosis.severity), diagnosis.link]
    if new or texts != logged.verdict:
        sink.log_diagnosis(diagnosis, new)
    logged.step = steps[-1].step if steps else logged.step
    logged.verdict = texts
    logged.findings += map(_finding_key, new)


def _finding_key(finding: Finding) -> list[str]:
    return [finding.cause, str(finding.severity or ""), ",".join(map(str, finding.ranks))]


@contextmanager
def _tracker_failures(name: str) -> Iterator[None]:
    """Turn the errors of a tracker's package into `FailedError`."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in TRACKERS:
            raise
        raise FailedError(f"{name} failed: {error}") from error


class _Reader:
    """Reads a run of a store, until reading fails."""

    def __init__(self, request: LogRequest) -> None:
        self._request = request
        self._store = open_for_reading(request.store_url or default_store_url())
        self._source = StoreSource(self._store)
        self._reports = Reports(self._source)
        self._seen: tuple[object, ...] | None = None
        self._seen_s = 0.0

    def find(self) -> RunSummary:
        """Return the run as the store has it now.

        Raises:
            UnknownRunError: The store holds no run of this name.
            StoreError: The store could not be read.
        """
        return find_run(self._source, self._request.run)

    def read_new(
        self, summary: RunSummary, *, after: int
    ) -> tuple[tuple[LoggedStep, ...], Diagnosis] | None:
        """Return the steps after one that is logged, and the diagnosis.

        None if the run has not grown since the last call, or has no step.

        Raises:
            EmptyRunError: The run has ended without a step.
            StoreError: The store could not be read.
        """
        seen = (summary.num_steps, summary.num_rows, summary.state)
        if seen == self._seen and time.monotonic() - self._seen_s < HANG_S:
            return None
        report = self._diagnose(summary)
        self._seen, self._seen_s = seen, time.monotonic()
        if report is None:
            return None
        steps = read_logged_steps(self._store, report, after=after)
        return steps, self._to_diagnosis(report, steps)

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def _diagnose(self, summary: RunSummary) -> RunReport | None:
        """Return the report of the run, of a running one that of its newest steps."""
        if summary.state != RUNNING:
            run = self._source.run_info(summary.run_id)
            return find_or_analyze(self._store, run, steps=(None, None))
        if isinstance(self._store, ServedStore):
            served = fetch_report(self._store.server, summary.run_id)
            if served is not None:
                return served
        return self._reports.refresh(summary)

    def _to_diagnosis(self, report: RunReport, steps: Sequence[LoggedStep]) -> Diagnosis:
        address = self._request.address
        if address is None and isinstance(self._store, ServedStore):
            address = self._store.server.url
        return Diagnosis(
            step=max(report.steps, default=-1),
            at_ns=steps[-1].end_ns if steps else time.time_ns(),
            verdict=verdict_sentence(report),
            severity=report.top_finding.severity or Severity.NONE,
            link=format_report_address(report, address),
            findings=report.findings,
        )


def read_logged_steps(store: Store, report: RunReport, *, after: int) -> tuple[LoggedStep, ...]:
    """Return the steps of a report after one of them, ascending.

    Of a step that a restart repeated, the last time counts, as in the report.

    Raises:
        StoreError: The store could not be read.
    """
    times = read_step_times(store, report.run, most=MAX_STEPS, first=after + 1)
    end_ns = {row["step"]: row["last_ns"] for row in times}  # by epoch, so the last one remains
    mfu = {} if report.mfu is None else report.mfu.by_step
    return tuple(
        LoggedStep(
            step=step,
            end_ns=end_ns[step],
            step_time_s=actual_s,
            mfu=mfu.get(step),
            slowdown=report.slowdown_by_step.get(step),
        )
        for step, actual_s in sorted(report.actual_s_by_step.items())
        if step in end_ns
    )
