"""Programs on a separate disk that is small or becomes read-only."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

from tests.support.missing_tools import skip_for_missing
from tests.support.mounts import NO_MOUNTS, needs_mounts
from tests.support.paths import PYTHON_PATH

if TYPE_CHECKING:
    from pathlib import Path

MAY_NOT_MOUNT = 77
"""Exit code of a command of `run_with_mounts` that may not mount."""


def run_with_mounts(
    command: list[str | Path], spool: Path, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a command that mounts file systems in a private namespace and records into ``spool``.

    If the kernel forbids such mounts, the test is skipped; with ``CI=true`` it fails.
    """
    needs_mounts()
    done = subprocess.run(
        ["unshare", "-rm", *command],
        env={
            **os.environ,
            "PYTHONPATH": PYTHON_PATH,
            "RANKSCOPE_TRACE": str(spool),
            "RANKSCOPE_RUN": "run",
            **environ,
        },
        capture_output=True,
        text=True,
        errors="replace",  # two writers of one pipe may cut each other's letters
        timeout=180,
        check=False,
    )
    if done.returncode == MAY_NOT_MOUNT:
        skip_for_missing(NO_MOUNTS.format(reason=" ".join(done.stderr.split())))
    return done
