"""Recorders for tests, in this process or in a child that may be killed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

from rankscope.tracer.install import make_spool_identity
from rankscope.tracer.job.identity import read_identity
from rankscope.tracer.record.exit_record import write_json
from rankscope.tracer.record.recorder import Recorder
from rankscope.tracer.record.segment import segment_capacity
from rankscope.tracer.record.segment_pool import STARTER_BYTES, SpoolLimits
from rankscope.tracer.spool import CONTROL_FILE, read_anchor
from tests.support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rankscope.tracer.record.sampling import Settings


NUM_IN_STARTER = segment_capacity(STARTER_BYTES)
"""Number of records in a lane's first segment, unless the spool limit is small."""


class AlarmError(Exception):
    """Raised by a signal handler of the job."""


def recorder_in(
    folder: Path,
    *,
    segment_bytes: int = 1 << 16,
    spool_bytes: int = 1 << 22,
    settings: Settings | None = None,
) -> Recorder:
    """Return a started recorder that writes small segments straight into ``folder``."""
    identity = make_spool_identity(read_identity("test", {}), read_anchor())
    limits = SpoolLimits(segment_bytes=segment_bytes, spool_bytes=spool_bytes)
    recorder = Recorder(folder, identity, limits=limits, settings=settings)
    recorder.start()
    return recorder


def run_script(script: str, spool: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python source in a child process that records into ``spool``."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        env={**os.environ, "RANKSCOPE_TRACE": str(spool), "RANKSCOPE_RUN": "run", **environ},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def write_control(folder: Path, document: Mapping[str, object]) -> None:
    """Write the control file of a run's or a process's folder, atomically by rename."""
    write_json(folder / CONTROL_FILE, dict(document))
