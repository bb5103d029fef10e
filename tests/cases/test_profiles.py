"""Traces of torch.profiler, written as its tutorial has it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from rankscope.analysis.analyze import analyze_run
from rankscope.collector.store.store import open_store
from rankscope.sources.store_source import StoreSource
from tests.cases.reports import CASES
from tests.integration.programs import rankscope

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
NUM_TRIES = 4


def profile_job(folder: Path) -> Path:
    """Return the folder of the traces of a job on four ranks.

    Torch aborts some processes at their exit ("terminate called without an active exception"), one
    job of four here, so a job that fails is started again.
    """
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    failures = []
    for number in range(NUM_TRIES):
        traces = folder / f"traces-{number}"
        done = subprocess.run(
            [*torchrun, "--nproc-per-node=4", CASES / "jobs" / "k_kineto.py", traces],
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
        )
        if done.returncode == 0:
            return traces
        failures.append(done.stderr)
    pytest.fail("\n".join(failures))


def test_the_windows_of_a_schedule_are_one_run(tmp_path: Path) -> None:
    traces = profile_job(tmp_path)
    assert len(list(traces.iterdir())) == 8

    store = tmp_path / "store"
    done = rankscope("import", str(traces), "--format", "kineto", "--run", "windows", store=store)

    assert done.returncode == 0, done.stderr
    with open_store(f"chdb://{store}") as opened:
        report = analyze_run(StoreSource(opened), "windows")
    assert len(report.epochs) == 1
    assert sorted((*report.steps, *report.warmup_steps)) == [*range(2, 10), *range(12, 20)]
    top = report.top_finding
    assert (top.cause, top.ranks) == ("slow-compute", (2,))
