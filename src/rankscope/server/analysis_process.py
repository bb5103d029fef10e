"""Analysis of an ended run in a process of its own, whose memory ends with it.

A step of 12,288 ranks takes 2 to 3 GB to analyse, of which the C library of a server that lives for
weeks would keep a part. The process reads an embedded store through the server that holds it. It
may use `limit_bytes` of memory: one that needs more ends alone, and its run says so.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

from rankscope.analysis.report.exchange import read_report, write_report
from rankscope.analysis.trace.errors import EmptyRunError
from rankscope.collector.machine_memory import machine_bytes
from rankscope.dashboard.records.progress import Activity, Progress

from ..errors import FailedError
from .run_failures import describe_failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from rankscope.analysis.report.report import RunReport
    from rankscope.collector.store.store import Store

START_S = 60.0
"""Longest wait for the server: it starts to analyse shortly before it answers."""

RETRY_S = 0.5
MAX_BYTES = 6 << 30
"""Twice what the largest analysis of a server takes (`reports.MAX_SPANS`)."""

MACHINE_SHARE = 1 / 2
"""Of a smaller machine or cgroup: the server needs the rest."""


def limit_bytes() -> int:
    """Return the memory that one analysis may use."""
    return min(MAX_BYTES, int(machine_bytes() * MACHINE_SHARE))


def analyze_elsewhere(
    store_url: str, run_id: str, *, first: int | None, show: Callable[[Progress], None]
) -> RunReport:
    """Return the report of a run, made by another process.

    Args:
        store_url: URL of the store, with its password.
        first: First step; None: all of them.
        show: Called with the progress, in this thread.

    Raises:
        EmptyRunError: The run has no spans in these steps.
        FailedError: The process failed, or would have needed more memory than `limit_bytes`.
    """
    asked = json.dumps(
        {"store_url": store_url, "run_id": run_id, "first": first, "most_bytes": limit_bytes()}
    )
    with subprocess.Popen(  # noqa: S603  # our own module
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a Ctrl-C at the terminal is for the server, whose end ends it
    ) as process:
        if process.stdin is None or process.stdout is None:
            raise FailedError("the process that analyses has no pipes")
        process.stdin.write(asked + "\n")
        process.stdin.flush()
        for line in process.stdout:
            name, found = json.loads(line)
            if name == "report":
                return read_report(found)
            if name == "empty":
                raise EmptyRunError(found)
            if name == "failed":
                raise FailedError(found)
            show(Progress(activity=Activity(name), num_spans=found))
    raise FailedError(
        f"the process that analyses {run_id!r} ended with status {process.returncode}: its log"
        " lines are above; -9 and -6 mean that it was short of memory"
    )


def main() -> None:
    """Analyse the run that stdin names, and write progress and report to stdout."""
    asked = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    most = asked.pop("most_bytes")
    # Private memory that can be written to: the kernel counts what is reserved, not what is used.
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    try:
        _say("report", write_report(_analyze(**asked)))
    except EmptyRunError as error:
        _say("empty", str(error))
    except Exception as error:  # noqa: BLE001  # the server logs it
        _say("failed", _describe(error, asked["run_id"], most))


def _describe(error: Exception, run_id: str, most_bytes: int) -> str:
    # A thread needs memory, too: its stack.
    if isinstance(error, MemoryError) or "can't start new thread" in str(error):
        return (
            f"the analysis of {run_id} needs more than {most_bytes / (1 << 30):.1f} GiB of memory,"
            f" and was ended: rankscope analyze {run_id} --steps FIRST:LAST analyses fewer steps"
        )
    return describe_failure(error)


def _end_with_parent() -> None:
    """End this process when the server closes its end of stdin, or dies."""
    sys.stdin.read()
    os._exit(1)


def _say(name: str, found: str | int) -> None:
    sys.stdout.write(json.dumps([name, found]) + "\n")
    sys.stdout.flush()


def _analyze(store_url: str, run_id: str, first: int | None) -> RunReport:
    from rankscope.analysis.analyze import analyze_run

    from ..memory import keep_freed_memory, without_collection
    from ..sources.store_source import StoreSource
    from .reports import ObservedSource

    keep_freed_memory()  # before numpy starts threads, each of which would get its own arena
    with without_collection(), _open(store_url) as store:
        source = ObservedSource(
            StoreSource(store), on_progress=lambda at: _say(at.activity, at.num_spans)
        )
        with source.observe(run_id):
            return analyze_run(source, run_id, first=first)


def _open(store_url: str) -> Store:
    from rankscope.collector.client.served_store import open_for_reading
    from rankscope.collector.errors import StoreHeldError

    deadline_s = time.monotonic() + START_S
    while True:
        try:
            return open_for_reading(store_url)
        except StoreHeldError:
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(RETRY_S)


if __name__ == "__main__":
    main()
