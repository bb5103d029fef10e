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

pytestmark = pytest.mark.slow


def test_the_windows_of_a_schedule_are_one_run(tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    subprocess.run(
        [*torchrun, "--nproc-per-node=4", CASES / "jobs" / "k_kineto.py", tmp_path / "traces"],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
    )
    assert len(list((tmp_path / "traces").iterdir())) == 8

    store = tmp_path / "store"
    done = rankscope(
        "import", str(tmp_path / "traces"), "--format", "kineto", "--run", "windows", store=store
    )

    assert done.returncode == 0, done.stderr
    with open_store(f"chdb://{store}") as opened:
        report = analyze_run(StoreSource(opened), "windows")
    assert len(report.epochs) == 1
    assert sorted((*report.steps, *report.warmup_steps)) == [*range(2, 10), *range(12, 20)]
    top = report.top_finding
    assert (top.cause, top.ranks) == ("slow-compute", (2,))
