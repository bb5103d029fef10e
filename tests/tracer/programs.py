"""Programs that tests run in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.support.paths import PYTHON_PATH, ROOT

if TYPE_CHECKING:
    from pathlib import Path

AUTOSTART = str(ROOT / "src" / "rankscope" / "tracer" / "autostart")


def run_python(
    *arguments: str | Path,
    cwd: str | Path = ROOT,
    interpreter: str = sys.executable,
    **environ: str,
) -> subprocess.CompletedProcess[str]:
    """Run an interpreter that finds this checkout; no variable numbers it as a rank."""
    unset = {"RANK", "LOCAL_RANK", "WORLD_SIZE"}
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.run(
        [interpreter, *arguments],
        cwd=cwd,
        env={**kept, "PYTHONPATH": PYTHON_PATH, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
