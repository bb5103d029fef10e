"""Reports of the cases: a spool is written or unpacked, stored and analysed as a user would."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.analysis.analyze import analyze_run
from rankscope.collector.store.store import open_store
from rankscope.collector.store.writer import StoreWriter
from rankscope.sources.store_source import StoreSource
from rankscope.spool_check import read_spool

if TYPE_CHECKING:
    from rankscope.analysis.report.report import RunReport

CASES = Path(__file__).parent


def analyze_job(folder: Path, script: str, *arguments: str, run: str) -> RunReport:
    """Run a script of `jobs/`, whose first argument is the spool, and analyse a run of it."""
    spool = folder / "spool"
    command = [sys.executable, str(CASES / "jobs" / script), str(spool), *arguments]
    subprocess.run(command, check=True)
    return analyze_spool(folder, spool, run)


def analyze_recording(folder: Path, name: str) -> RunReport:
    """Analyse a recording of `gpu/`."""
    with tarfile.open(CASES / "gpu" / f"{name}.tar.gz") as archive:
        archive.extractall(folder / "spool", filter="data")
    return analyze_spool(folder, folder / "spool", name)


def analyze_spool(folder: Path, spool: Path, run: str) -> RunReport:
    """Store the runs of a spool in a new store and analyse one of them."""
    with open_store(f"chdb://{folder / 'store'}") as store:
        read_spool(spool, StoreWriter(store), run_id=None, show=lambda _: None)
        return analyze_run(StoreSource(store), run)
