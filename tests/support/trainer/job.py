"""The trainer as a job of one or more processes."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.paths import ROOT

WITHIN_S = 240


def trainer_command(*flags: str, num_ranks: int) -> list[str]:
    """Return the command of a job, which `torchrun` starts if it has several ranks."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks), "-m"]
    launched = launcher if num_ranks > 1 else []
    return [sys.executable, "-m", *launched, "rankscope.trainer", *flags]


def trainer_environment() -> dict[str, str]:
    """Return the environment of a job: none of the tracer's settings of this process."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RANKSCOPE_")}
    return kept | {"OMP_NUM_THREADS": "1"}


def run_trainer(*flags: str, num_ranks: int) -> subprocess.CompletedProcess[str]:
    """Run a job until it ends, well or not."""
    return subprocess.run(
        trainer_command(*flags, num_ranks=num_ranks),
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=trainer_environment(),
        timeout=WITHIN_S,
    )
