"""Watch over live runs and hosts for alerts, on a thread of its own: the analysis may be what is
late.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from rankscope.analysis.alert_signals import LOSS_STEPS, RunSignals, StepLoss, Traffic
from rankscope.analysis.report.liveness import RECENT_NS
from rankscope.collector.read.signals import read_heartbeat_step, read_step_ends, read_traffic
from rankscope.collector.spool.descriptions import RUNNING
from rankscope.tracer.span import NS_PER_S

from .bad_hosts import BadHosts
from .rank_view import read_liveness
from .run_failures import WATCHED, RunFailures

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rankscope.analysis.trace.tables import RunSummary, SpanSource
    from rankscope.collector.store.store import Store

    from .alerting import Alerting
    from .reports import Reports

WATCH_NS = 10 * NS_PER_S
"""Pause between two looks at the signals of the live runs."""

HOSTS_NS = 30 * NS_PER_S
"""Pause between two looks at the hosts."""

MIN_BUCKET_NS = 10 * NS_PER_S
NUM_BUCKETS = 30
"""Buckets of traffic: five minutes, or 60 steps if these are longer."""

MIN_AHEAD = 2
"""Steps that ranks must be ahead of the store before it is behind: one is always in progress."""

LOSS_WINDOW = 10 * LOSS_STEPS
"""Steps whose losses are read."""


class AlertWatch:
    """Alerts about live runs that need no diagnosis, and everything that is sent.

    Args:
        source: Lists the runs.
        reports: Diagnoses, to see which steps were analysed.
        alerting: Raises and sends.
        failures: Failures of single runs. None: they are kept here alone.
        checks: Each returns why a part of the server does not work; no heartbeat is sent then.
        unix_ns: Clock of the store's rows.
    """

    def __init__(  # noqa: PLR0913  # effects come in here
        self,
        store: Store,
        source: SpanSource,
        reports: Reports,
        alerting: Alerting,
        *,
        failures: RunFailures | None = None,
        checks: Sequence[Callable[[], str | None]] = (),
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._store = store
        self._source = source
        self._reports = reports
        self.alerting = alerting
        """Raises and sends."""

        self._failures = failures or RunFailures(store)
        self._checks = checks
        self._unix_ns = unix_ns
        self._watched_ns = 0
        self._hosts = BadHosts(store, unix_ns=unix_ns)
        self._hosts_ns = 0
        self.signals: dict[str, RunSignals] = {}
        """The newest signals of each live run."""

        self._waiting_ns: dict[str, dict[int, int]] = {}
        """By run: the steps that wait for their analysis, and when the watch saw them first."""

    def turn(self) -> None:
        """Look at the live runs and the hosts, if it is time, and send what is due."""
        now_ns = self._unix_ns()
        if now_ns - self._watched_ns >= WATCH_NS:
            self._watched_ns = now_ns
            running = [run for run in self._source.runs() if run.state == RUNNING]
            signals: dict[str, RunSignals] = {}
            for run in running:
                with self._failures.catch(run.run_id, WATCHED):
                    signals[run.run_id] = self.read(run, now_ns)
                    self.alerting.evaluate_signals(signals[run.run_id])
            self.signals = signals
            self._waiting_ns = {run: self._waiting_ns.get(run, {}) for run in signals}
            if now_ns - self._hosts_ns >= HOSTS_NS:
                self._hosts_ns = now_ns
                records = self._hosts.read({run.run_id for run in running})
                self.alerting.evaluate_hosts(records)
        self.alerting.turn()
        if all(check() is None for check in self._checks):
            self.alerting.beat()

    def read(self, run: RunSummary, now_ns: int) -> RunSignals:
        """Return the signals of a live run."""
        run_id = run.run_id
        report = self._reports.peek(run_id)
        analysed = report.steps[-1] if report is not None and report.steps else -1
        step_s = report.step_time_s.actual if report is not None else None
        ends = read_step_ends(self._store, run_id, first=analysed - LOSS_WINDOW)
        num_ranks = max((row["num_ranks"] for row in ends), default=0)
        complete = [row for row in ends if row["num_ranks"] == num_ranks]
        # Not since the step's end: its rows may be late, or the run may be an old one.
        known = self._waiting_ns.get(run_id, {})
        steps = [row["step"] for row in complete if row["step"] > analysed]
        waiting = {step: known.get(step, now_ns) for step in steps}
        self._waiting_ns[run_id] = waiting
        return RunSignals(
            run=run_id,
            liveness=read_liveness(self._store, run_id, now_ns=now_ns),
            losses=tuple(
                StepLoss(
                    step=row["step"],
                    mean=row["mean_loss"] if row["num_finite"] else None,
                    num_ranks=row["num_ranks"],
                    num_bad=row["num_bad"],
                    num_infinite=row["num_infinite"],
                )
                for row in complete
            ),
            traffic=self._read_traffic(run_id, step_s, now_ns),
            collector_lag_s=self._collector_lag_s(run_id, ends, now_ns),
            analysis_lag_s=(now_ns - min(waiting.values())) / NS_PER_S if waiting else None,
        )

    def _collector_lag_s(
        self, run_id: str, ends: Sequence[dict[str, int]], now_ns: int
    ) -> float | None:
        step = read_heartbeat_step(self._store, run_id, since_ns=now_ns - RECENT_NS)
        if step is None or not ends or step - ends[-1]["step"] < MIN_AHEAD:
            return None
        return (now_ns - ends[-1]["ended_ns"]) / NS_PER_S

    def _read_traffic(self, run_id: str, step_s: float | None, now_ns: int) -> Traffic | None:
        """Return the hosts' traffic in buckets of at least two steps."""
        bucket_ns = max(MIN_BUCKET_NS, round(2 * (step_s or 0.0) * NS_PER_S))
        # The newest bucket ends before the samples that may still be on their way.
        first_ns = now_ns - RECENT_NS - NUM_BUCKETS * bucket_ns
        rows = read_traffic(
            self._store, run_id, first_ns=first_ns, num_buckets=NUM_BUCKETS, bucket_ns=bucket_ns
        )
        if not rows:
            return None
        hosts = tuple(sorted({row["host"] for row in rows}))
        place = {host: k for k, host in enumerate(hosts)}
        rate = np.full((len(hosts), NUM_BUCKETS), np.nan)
        for row in rows:
            if row["span_ns"] > 0 and row["num_bytes"] >= 0:
                per_s = row["num_bytes"] / row["span_ns"] * NS_PER_S
                rate[place[row["host"]], row["bucket"]] = per_s
        return Traffic(hosts=hosts, bytes_per_s=rate)
