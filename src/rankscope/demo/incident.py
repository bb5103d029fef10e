"""An incident from end to end on this host: a rank is killed, its host excluded, the job restarted.

The loop that MegaScale (arXiv 2402.15627, section 4) runs by itself, with the parts that rankscope
has for each step of it. Each process gives the name of a host that does not exist, so one machine
plays five.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.collector.spool.descriptions import FAILED, LOST
from rankscope.collector.spool.liveness import HOSTS_VARIABLE
from rankscope.collector.store.location import default_store_url
from rankscope.collector.store.store import open_store
from rankscope.tracer.span import NS_PER_S
from rankscope.tracer.topology import Layout

from ..errors import FailedError
from ..server.signals import sigterm_as_interrupt
from ..terminal.lines import wrap_text
from .demo import TRAINING_LOG, drain
from .plan import plan_demo
from .training import STEP_TIMEOUT_S, Training, require_torch, training_command

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rankscope.analysis.report.report import Finding
    from rankscope.collector.spool.tail import SpoolTail
    from rankscope.collector.store.store import Store

    from .plan import DemoPlan

WIDTH = 80
HOSTS = tuple(f"demo-host-{number}" for number in range(1, 5))
SPARE = "demo-host-5"
FAULTY_RANK = 2
NUM_STEPS, FAULT_STEP, CHECKPOINT_STEPS = 24, 13, 5
PACE_SHARE = 0.5
"""Of the demo's set times: four ranks share the cores that eight share there."""

EXCLUDED_NS = 3_600 * NS_PER_S

SELECT_FIRST_DEAD = """
SELECT rank, host, exit_state FROM ranks FINAL
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND exit_state IN {states:Array(String)}
ORDER BY exit_state = {lost:String} DESC, exit_ns, rank LIMIT 1
"""

COUNT_ENDED = """
SELECT uniqExact(rank) AS num FROM ranks FINAL
WHERE run_id = {run_id:String} AND epoch = {epoch:Int32} AND exit_state NOT IN ('', 'running')
"""

END_TIMEOUT_S = 30.0
"""Time until the death of a process without an exit record is certain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """The parts of the demo that both incarnations of the job share."""

    plan: DemoPlan
    run_id: str
    store: Store
    tail: SpoolTail
    folder: Path
    begun_s: float

    def show(self, event: str, text: str) -> None:
        """Print one line about what happened."""
        first = f"{time.monotonic() - self.begun_s:4.0f} s  {event:<9} "
        for line in wrap_text(text, WIDTH, first=first):
            sys.stdout.write(line + "\n")
        sys.stdout.flush()


def run_incident(store_url: str | None) -> int:
    """Train, lose a rank, find its host, exclude it, restart without it, and print the goodput.

    It ends by itself. The run stays in the store; the host is excluded for an hour.

    Returns:
        0 if the job ended and the diagnosis named the rank that was killed; otherwise 1.

    Raises:
        BadInputError: torch is not installed.
        StoreError: The store could not be opened.
        FailedError: The restarted training failed.
    """
    require_torch()
    from rankscope.collector.spool.tail import SpoolTail
    from rankscope.collector.store.writer import StoreWriter

    url = store_url or default_store_url()
    layout = Layout(pp=2, dp=2)
    plan = plan_demo(layout=layout, num_steps=NUM_STEPS, fault="none")
    run_id = f"incident-{datetime.now().astimezone():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    folder = Path(tempfile.mkdtemp(prefix="rankscope-incident-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        stack.enter_context(sigterm_as_interrupt())
        os.environ[HOSTS_VARIABLE] = ",".join((*HOSTS, SPARE))
        stack.callback(os.environ.pop, HOSTS_VARIABLE, None)
        store = stack.enter_context(open_store(url))
        (folder / "spool").mkdir()
        tail = stack.enter_context(closing(SpoolTail(folder / "spool", StoreWriter(store))))
        job = _Job(
            plan=plan,
            run_id=run_id,
            store=store,
            tail=tail,
            folder=folder,
            begun_s=time.monotonic(),
        )
        _announce(job)
        culprit = _diagnose(job, _train(job, HOSTS, epoch=0))
        hosts = _replace_hosts(job, culprit.hosts)
        job.show("restart", f"epoch 1 on {', '.join(hosts)}")
        restarted = _train(job, hosts, epoch=1)
        if restarted.status != 0:
            raise FailedError(f"the restarted training failed: {restarted.last_error()}")
        job.show("end", f"all {NUM_STEPS} steps are trained")
        _print_goodput(job, url)
    return 0 if culprit.ranks == (FAULTY_RANK,) else 1


def _announce(job: _Job) -> None:
    job.show(
        "start",
        f"{len(HOSTS)} ranks, one on each of {HOSTS[0]} to {HOSTS[-1][-1]}; {SPARE} is spare",
    )
    job.show("hosts", "this machine plays all five")
    job.show(
        "fault", f"rank {FAULTY_RANK} on {HOSTS[FAULTY_RANK]} will be killed in step {FAULT_STEP}"
    )


def _train(job: _Job, hosts: Sequence[str], *, epoch: int) -> Training:
    """Run one incarnation of the job until it ends, and store what it recorded."""
    fault = f"crash:rank={FAULTY_RANK},step={FAULT_STEP},kind=kill" if epoch == 0 else "none"
    command = [
        *training_command(job.plan, spool=job.folder / "spool"),
        *("--pace-ms", f"{job.plan.pace_ms * PACE_SHARE:g}", "--fault", fault),
        *("--checkpoint", str(job.folder / "checkpoints")),
        *("--checkpoint-every", str(CHECKPOINT_STEPS), "--hosts", ",".join(hosts)),
    ]
    with Training(
        command,
        run_id=job.run_id,
        log=job.folder / f"{epoch}-{TRAINING_LOG}",
        environment={"RANKSCOPE_EPOCH": str(epoch)},
    ) as training:
        for number, step in enumerate(training.follow(job.tail)):
            if number == 0:
                job.show("training", f"epoch {epoch} begins with step {step.step}")
    until_s = time.monotonic() + END_TIMEOUT_S
    while time.monotonic() < until_s:
        drain(job.tail)
        bound = {"run_id": job.run_id, "epoch": epoch}
        if job.store.rows(COUNT_ENDED, bound)[0]["num"] >= len(hosts):
            break
        time.sleep(STEP_TIMEOUT_S)
    return training


def _diagnose(job: _Job, training: Training) -> Finding:
    """Print which process was lost and what the diagnosis says; return its finding.

    Raises:
        FailedError: The diagnosis names no host.
    """
    from rankscope.analysis.analyze import analyze_run
    from rankscope.analysis.severity import ends_run

    from ..sources.store_source import StoreSource

    bound = {"run_id": job.run_id, "epoch": 0, "states": [LOST, FAILED], "lost": LOST}
    for row in job.store.rows(SELECT_FIRST_DEAD, bound):
        job.show("lost", f"the process of rank {row['rank']} on {row['host']} is gone")
    report = analyze_run(StoreSource(job.store), job.run_id)
    finding = next(filter(ends_run, report.findings), report.top_finding)
    if not finding.hosts:
        raise FailedError(
            f"the diagnosis names no host ({finding.cause}): {finding.evidence}."
            f" The training said: {training.last_error()}"
        )
    first, _, _ = finding.evidence.partition(";")
    job.show("finding", f"{finding.cause}: {first}")
    return finding


def _replace_hosts(job: _Job, culprits: Sequence[str]) -> tuple[str, ...]:
    """Examine and exclude hosts; return those of the next incarnation, with the spare."""
    from rankscope.collector.read.host_checks import COMMAND, TABLE
    from rankscope.collector.read.hosts import HostMark, marks_in_force, read_host_changes

    from ..doctor.examination import examine_host
    from ..doctor.host import Host
    from ..doctor.result import count_states
    from ..doctor.stored import check_rows
    from ..server.host_changes import HostChanges, apply_host_changes
    from ..server.node_lists import filter_hostfile

    now_ns = time.time_ns()
    for host in culprits:
        results = examine_host(Host(name=host))
        job.store.insert_rows(
            TABLE, check_rows(results, host=host, at_ns=now_ns, occasion=COMMAND, run_id=job.run_id)
        )
        counted = ", ".join(f"{num} {state}" for state, num in count_states(results).items() if num)
        job.show("doctor", f"{host}: {counted}")
    changes = HostChanges(
        hosts=list(culprits),
        marks=["excluded"],
        is_set=True,
        until_ns=now_ns + EXCLUDED_NS,
        reason=f"rankscope demo --incident, run {job.run_id}",
        by="demo",
    )
    apply_host_changes(job.store, changes, url="")
    job.show("exclude", f"{', '.join(culprits)} for one hour (rankscope hosts list)")
    marks = marks_in_force(read_host_changes(job.store), time.time_ns())
    excluded = [mark.host for mark in marks if mark.mark is HostMark.EXCLUDED]
    return filter_hostfile(HOSTS, excluded=excluded, spares=[SPARE]).hosts


def _print_goodput(job: _Job, url: str) -> None:
    """Print what the time of the run was spent on, and where to look."""
    from rankscope.analysis.analyze import analyze_run
    from rankscope.dashboard.address import View, write_address

    from ..server.listen import DEFAULT_PORT, LOOPBACK
    from ..sources.goodput import read_goodput
    from ..sources.store_source import StoreSource
    from ..sources.stored_reports import StoredReports
    from ..terminal.goodput_text import goodput_lines

    source = StoreSource(job.store)
    report = analyze_run(source, job.run_id)
    (summary,) = (run for run in source.runs() if run.run_id == job.run_id)
    StoredReports(job.store).keep(summary, report)
    goodput = read_goodput(job.store, job.run_id, report, state=summary.state)
    lines = goodput_lines(goodput, width=WIDTH, is_whole=True, table_width=WIDTH)
    at = write_address(View(run=job.run_id), base_path=f"http://{LOOPBACK}:{DEFAULT_PORT}/")
    sys.stdout.write("\n".join(["", *lines, "", f"rankscope serve --store {url}", at, ""]))
    sys.stdout.flush()
