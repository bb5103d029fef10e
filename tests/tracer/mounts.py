"""Run a program on a disk of its own: one that is small, or turns read-only."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.tracer.recording import ROOT

if TYPE_CHECKING:
    from pathlib import Path

MAY_NOT_MOUNT = 77
"""Exit code by which a command of `run_with_mounts` says that it was refused one."""


def run_with_mounts(
    command: list[str | Path], spool: Path, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run a command that mounts, where nobody else sees it, with the tracer's folder set.

    Where the kernel forbids such mounts the test is skipped: no installation can mend that.
    """
    done = subprocess.run(
        ["unshare", "-rm", *command],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RANKSCOPE_TRACE": str(spool),
            "RANKSCOPE_RUN": "run",
            **environ,
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    if done.returncode == MAY_NOT_MOUNT or "unshare failed" in done.stderr:
        pytest.skip(f"this machine allows no mounts in a namespace of one's own: {done.stderr}")
    return done
