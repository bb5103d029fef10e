"""The demo from end to end: train with a fault, collect, diagnose, serve."""

from __future__ import annotations

import json
import secrets
import shutil
import sys
import tempfile
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.collector.store.location import default_store_url
from rankscope.collector.store.store import open_store
from rankscope.tracer.topology import Layout

from ..errors import FailedError
from ..server.listen import ListenOptions, open_endpoint
from ..server.logs import Log, log_lines
from ..server.signals import sigterm_as_interrupt
from ..terminal.lines import Progress, say, terminal_width
from .plan import DemoPlan, is_found, outcome_line, plan_demo
from .training import Training, require_torch, training_command

if TYPE_CHECKING:
    from rankscope.collector.spool.tail import SpoolTail
    from rankscope.collector.store.store import Store

    from ..server.listen import Endpoint

PROGRESS_EVERY = 5
MAX_LAST_POLLS = 20
TRAINING_LOG = "training.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """Flags of `rankscope demo`."""

    pp: int
    dp: int
    tp: int
    num_steps: int
    fault: str | None
    serve: bool
    as_json: bool
    port: int | None
    spool: Path | None
    store_url: str | None


def run_demo(options: DemoOptions) -> int:
    """Train, diagnose and print the diagnosis; then serve until Ctrl-C unless ``--no-serve``.

    All errors but `FailedError` are raised before the training starts.

    Returns:
        0 if the fault was found, or if there was none and the run is healthy; otherwise 1.

    Raises:
        ConfigError: The fault or the layout is invalid.
        BadInputError: torch is not installed, or the port is taken.
        StoreError: The store could not be opened.
        FailedError: The training failed.
    """
    layout = Layout(pp=options.pp, dp=options.dp, tp=options.tp)
    plan = plan_demo(layout=layout, num_steps=options.num_steps, fault=options.fault)
    require_torch()
    run_id = f"demo-{datetime.now().astimezone():%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    with ExitStack() as stack:
        stack.enter_context(sigterm_as_interrupt())
        listen = ListenOptions(port=options.port)
        endpoint = stack.enter_context(open_endpoint(listen)) if options.serve else None
        store = stack.enter_context(open_store(options.store_url or default_store_url()))
        collect_training(store, plan, run_id=run_id, spool=options.spool)
        from rankscope.analysis.analyze import analyze_run
        from rankscope.analysis.report.document import to_document
        from rankscope.analysis.verdict import verdict_sentence

        from ..sources.store_source import StoreSource
        from ..terminal.report_text import report_text

        report = analyze_run(StoreSource(store), run_id)
        if options.as_json:
            document = to_document(report) | {"planted": plan.spec, "found": is_found(report, plan)}
            text = json.dumps(document, allow_nan=False)
        else:
            body = report_text(report, verdict=verdict_sentence(report), width=terminal_width())
            text = f"{body}\n\n{outcome_line(report, plan)}"
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        if endpoint is not None:
            _serve(store, endpoint)
    return 0 if is_found(report, plan) else 1


def collect_training(store: Store, plan: DemoPlan, *, run_id: str, spool: Path | None) -> None:
    """Train and store all spans of the run; without ``spool``, the spool is a temporary folder.

    Raises:
        FailedError: The training failed. Its output is kept, and the message names the file.
    """
    folder = Path(tempfile.mkdtemp(prefix="rankscope-demo-"))
    layout = plan.layout
    say(
        f"training a small GPT on {layout.world_size} local processes"
        f" (pp {layout.pp} x dp {layout.dp} x tp {layout.tp}), {plan.num_steps} steps; paced:"
        " compute is padded to set times, so that a few cores can stand for many devices;"
        f" fault: {plan.spec}"
    )
    try:
        status, reason = _train_and_store(store, plan, run_id=run_id, spool=spool, folder=folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if status != 0:
        log = folder / TRAINING_LOG
        raise FailedError(
            f"the training failed with exit status {status}: {reason} (whole output: {log})"
        )
    shutil.rmtree(folder)


def _train_and_store(
    store: Store, plan: DemoPlan, *, run_id: str, spool: Path | None, folder: Path
) -> tuple[int | None, str]:
    """Train and store; return the exit status of the training and its last error line."""
    from rankscope.collector.spool.tail import SpoolTail
    from rankscope.collector.store.writer import StoreWriter

    target = spool or folder / "spool"
    target.mkdir(parents=True, exist_ok=True)
    command = training_command(plan, spool=target)
    with (
        closing(SpoolTail(target, StoreWriter(store))) as tail,
        Training(command, run_id=run_id, log=folder / TRAINING_LOG) as training,
    ):
        with Progress(every=PROGRESS_EVERY) as progress:
            progress.show(f"starting {plan.layout.world_size} processes")
            for step in training.follow(tail):
                left_s = (plan.num_steps - step.step - 1) * step.seconds
                progress.show(
                    f"step {step.step + 1} of {plan.num_steps}, loss {step.loss:.3f},"
                    f" {step.seconds:.2f} s per step, about {left_s:.0f} s left"
                )
        drain(tail)
        return training.status, training.last_error()


def drain(tail: SpoolTail) -> None:
    """Store the remaining rows. The processes have ended, so the spool no longer changes."""
    for _ in range(MAX_LAST_POLLS):
        progress = tail.poll()
        for problem in progress.problems:
            say(problem)
        if progress.num_cuts == 0 and progress.num_running == 0:
            return


def _serve(store: Store, endpoint: Endpoint) -> None:
    from rankscope.collector.retention.deletion import Deletions
    from rankscope.collector.retention.retention import RetentionPolicy

    from ..server.run_failures import RunFailures
    from ..server.serve import AnalysisParts, ServerParts, serve_opened
    from ..server.upkeep import open_upkeep
    from ..sources.store_source import StoreSource

    deletions = Deletions(store)
    with log_lines(Log()) as log:
        serve_opened(
            ServerParts(
                store=store,
                endpoint=endpoint,
                deletions=deletions,
                failures=RunFailures(store),
                log=log,
                analysis=AnalysisParts(before=StoreSource(store).runs()),
                loops=open_upkeep(store, deletions, RetentionPolicy()),
            )
        )
